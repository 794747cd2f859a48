// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the fake driver keeps: streams with the work that waits on them, events, pinned memory,
// captures, and what tests ask of the last launch.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <flashbsr/cpu/kernel_table.h>

namespace fake {

constexpr int kDevices = 2;
constexpr unsigned char kPoison = 0xFF;  // NaN in every floating-point type

struct Stream;

/// One record of an event: what a wait or a query that comes after it means.
struct Mark {
  Stream* stream;
  bool done = false;
};

struct Op {
  std::function<void()> work;  ///< empty: a record or a wait
  std::shared_ptr<Mark> record{}, wait{};
};

/// What the driver calls when the last graph that holds it is gone.
struct UserObject {
  void* data;
  CUhostFn destroy;
};

struct Graph {
  uint64_t capture = 0;
  std::vector<Op> ops;
  std::vector<UserObject*> kept;
};

struct Stream {
  uint64_t id = 0;
  std::deque<Op> queue;
  std::unique_ptr<Graph> capturing;  ///< null: it does not
};

struct Event {
  std::shared_ptr<Mark> last;  ///< null: never recorded
  bool in_capture = false;
};

struct State {
  std::recursive_mutex mutex;
  uint64_t next_id = 3;
  Stream legacy{.id = 1}, per_thread{.id = 2};
  std::set<Stream*> streams{&legacy, &per_thread};
  std::map<std::string, long> calls;
  std::map<const char*, size_t> pinned;
  std::set<std::string> names;  ///< kernels; their addresses are the handles
  std::map<std::string, flashbsr::cpu::KernelTable> variants;  ///< of users, by their names
  uint64_t next_capture = 1;
  std::vector<std::unique_ptr<Graph>> graphs;  ///< null: destroyed
  std::string last_kernel;
  const int32_t* last_pages = nullptr;
  int last_grid = 0, last_threads = 0, last_shared = 0, last_overlap = 0, last_programmatic = 0,
      last_path = -1, last_box = 0, last_cluster = 0;
  int memory_khz = 3125000;        ///< of an H200
  const void* unmapped = nullptr;  ///< no tensor map of what lies there
};

inline State& state() {
  static State* instance = new State;  // outlives every destructor of the library under test
  return *instance;
}

inline thread_local std::vector<int> contexts;   // devices, innermost last
inline thread_local bool in_destructor = false;  // of a user object: no call is allowed
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
inline char context_of[kDevices];

struct Call {
  std::lock_guard<std::recursive_mutex> hold{state().mutex};
  explicit Call(const char* name) {
    if (in_destructor) std::abort();
    ++state().calls[name];
  }
};

inline Stream& stream_of(CUstream handle) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return state().legacy;
  if (handle == CU_STREAM_PER_THREAD) return state().per_thread;
  return *reinterpret_cast<Stream*>(handle);
}

inline bool forbidden() {
  if (capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  return std::any_of(state().streams.begin(), state().streams.end(),
                     [](const Stream* s) { return s->capturing != nullptr; });
}

inline void put(Stream& s, Op op) {
  if (s.capturing) {
    s.capturing->ops.push_back(std::move(op));
  } else {
    s.queue.push_back(std::move(op));
  }
}

inline void run_until(const Mark& mark);

/// Runs the first thing on the stream.
inline void step(Stream& s) {
  const Op op = std::move(s.queue.front());
  s.queue.pop_front();
  if (op.work) op.work();
  if (op.wait) run_until(*op.wait);
  if (op.record) op.record->done = true;
}

inline void run_until(const Mark& mark) {
  while (!mark.done && !mark.stream->queue.empty()) step(*mark.stream);
}

inline void drain(Stream& s) {
  while (!s.queue.empty()) step(s);
}

inline void drain_all() {
  for (Stream* s : state().streams) drain(*s);
}

/// Pinned memory and the device's are read when the copy runs, other memory at once.
inline void copy_later(void* to, const void* from, size_t bytes, CUstream stream,
                       bool pageable = false) {
  if (!pageable) {
    put(stream_of(stream), {.work = [=] { std::memcpy(to, from, bytes); }});
    return;
  }
  const auto* begin = static_cast<const char*>(from);
  const auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
  put(stream_of(stream), {.work = [=] { std::memcpy(to, staged->data(), bytes); }});
}

inline bool is_pinned(const void* memory) {
  const auto after = state().pinned.upper_bound(static_cast<const char*>(memory));
  if (after == state().pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return memory < begin + bytes;
}

}  // namespace fake
