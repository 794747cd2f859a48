// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Device memory, pinned memory, events, and the order of what uses them. The context of the device
// must be current. For sources of cpp/cuda only.
#pragma once

#include <utility>

#include <flashbsr/plan/memory.h>

#include "api.h"

namespace flashbsr::cuda {

/// Allocation and waiting at plan time disturb no capture of another thread.
class RelaxedCapture {
 public:
  RelaxedCapture() { swap(); }
  ~RelaxedCapture() { swap(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void swap() { api().thread_exchange_stream_capture_mode(&mode_); }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/// Memory on a device that only grows. Growing loses the contents and waits for the work that uses
/// them (cuMemFree does).
class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  /// Returns whether the memory moved.
  bool fit(int64_t bytes);
  char* data() const { return reinterpret_cast<char*>(pointer_); }
  CUdeviceptr address() const { return pointer_; }
  int64_t size() const { return size_; }

 private:
  int device_;
  CUdeviceptr pointer_ = 0;
  int64_t size_ = 0;
};

class Event {
 public:
  explicit Event(int device) : device_(device) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// Created at the first use. Without timing: those cost the least.
  CUevent get();
  bool exists() const { return event_ != nullptr; }

 private:
  int device_;
  CUevent event_ = nullptr;
};

/// Two pinned buffers in turn, so that one is written while the other is still copied or read.
/// Every GPU reads them at the addresses that they have here.
class Staging {
 public:
  explicit Staging(int device) : halves_{Half(device), Half(device)} {}

  /// A buffer that nothing reads any more.
  char* next(int64_t bytes);
  /// Copies the buffer's first bytes to the device. `bytes` is what next() was asked for, or less.
  void copy(CUdeviceptr to, int64_t bytes, CUstream stream);
  /// Instead: the work on `stream` up to here reads the buffer where it is.
  void read(CUstream stream);
  /// Until all copies have been made: the last one's buffer need not be that of the last next().
  void wait();
  /// That of the last next().
  const char* last() const { return halves_[turn_].memory; }

 private:
  struct Half {
    explicit Half(int device) : device(device), read(device) {}
    ~Half();
    int device;
    char* memory = nullptr;
    int64_t size = 0;
    Event read;
  };
  Half halves_[2];
  int turn_ = 0;
};

/// Plans, written where they are copied from.
class PinnedPlans final : public PlanMemory {
 public:
  explicit PinnedPlans(int device) : device_(device), staging_(device) {}

  int32_t* next(int64_t words) override;
  /// Copies the first bytes of the last plan.
  void copy(CUdeviceptr to, int64_t bytes, CUstream stream) { staging_.copy(to, bytes, stream); }
  /// Until the last plan is there: who replays a graph is not known to wait for the stream of its
  /// copy.
  void wait();
  /// Copies and waits, beside a copy on another stream that may be under way.
  void copy_at_once(CUdeviceptr to, int64_t bytes, CUstream stream);

 private:
  const int device_;
  Staging staging_;
};

/// The order of all that touches one engine's memory on a device, from whatever streams: each use
/// follows the one before. Uses on one stream are in order by themselves and cost nothing.
class UseOrder {
 public:
  explicit UseOrder(int device) : event_(device) {}

  /// Before work is put on `stream`. `captures`: during a capture, where a stream has no id to ask
  /// for but lives as long as the capture.
  void before(CUstream stream, bool captures = false);
  /// After it was, on the stream of the last before().
  void after(CUstream stream);
  /// Forgets what was before.
  void restart() { used_ = recorded_ = false; }

 private:
  Event event_;
  CUstream last_ = nullptr;
  unsigned long long last_id_ = 0, next_id_ = 0;
  bool used_ = false;
  bool recorded_ = false;
};

/// The default streams: they live as long as the context, and none of them is ever captured.
inline bool is_default(CUstream stream) { return stream == nullptr || stream == CU_STREAM_LEGACY; }

/// Whether work put on `stream` now becomes part of a CUDA graph.
bool capturing(CUstream stream);

/// A stream of the library's own, which waits for no other and is never captured.
CUstream side_stream(int device);

}  // namespace flashbsr::cuda
