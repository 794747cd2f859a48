// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "numbered.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <unordered_map>

namespace flashbsr::api {

namespace {

struct Entry {
  std::weak_ptr<Attention> attention;
  bool check;
};

struct Numbers {
  std::mutex mutex;
  std::condition_variable unused;
  std::unordered_map<int64_t, Entry> attentions;
  int64_t in_use = 0;
  bool ended = false;
};

/// Never destroyed: other threads' programs may outlive main().
Numbers& numbers() {
  static Numbers* const kept = new Numbers;
  // A forked process has none of the threads that would end what is in use.
  static const int forks = pthread_atfork([] { kept->mutex.lock(); }, [] { kept->mutex.unlock(); },
                                          [] {
                                            kept->in_use = 0;
                                            kept->mutex.unlock();
                                          });
  static_cast<void>(forks);
  return *kept;
}

}  // namespace

void enter(int64_t number, const std::shared_ptr<Attention>& attention, bool check) {
  Numbers& all = numbers();
  const std::lock_guard<std::mutex> hold(all.mutex);
  if (!all.attentions.emplace(number, Entry{attention, check}).second) return;
  std::erase_if(all.attentions, [](const auto& entry) { return entry.second.attention.expired(); });
}

Used::Used(int64_t number) {
  Numbers& all = numbers();
  const std::lock_guard<std::mutex> hold(all.mutex);
  if (all.ended) {
    throw Error(ErrorCode::kPlan, "attention", "a call while the interpreter ends",
                "programs that have ended before it does");
  }
  const auto found = all.attentions.find(number);
  if (found != all.attentions.end()) {
    attention_ = found->second.attention.lock();
    check_ = found->second.check;
  }
  if (!attention_) {
    throw Error(ErrorCode::kPlan, "attention",
                "number " + std::to_string(number) + ", which is gone",
                "one that is alive: keep the Attention as long as the compiled program");
  }
  ++all.in_use;
}

Used::~Used() {
  attention_.reset();  // it may be the last, whose objects are the interpreter's
  Numbers& all = numbers();
  const std::lock_guard<std::mutex> hold(all.mutex);
  if (--all.in_use == 0) all.unused.notify_all();
}

void end_programs() {
  Numbers& all = numbers();
  std::unique_lock<std::mutex> hold(all.mutex);
  all.ended = true;
  all.unused.wait(hold, [&] { return all.in_use == 0; });
}

}  // namespace flashbsr::api
