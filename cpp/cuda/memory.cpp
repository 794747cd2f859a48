// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <map>
#include <mutex>

#include <flashbsr/core/error.h>
#include <flashbsr/core/math.h>

#include "device_array.h"

namespace flashbsr::cuda {

namespace {

std::string bytes_on(const char* call, int64_t bytes, int device) {
  return std::string(call) + " of " + std::to_string(bytes) +
         " bytes on cuda:" + std::to_string(device);
}

/// Of a destructor: at the end of the process the driver may be gone, and there is nobody to tell.
template <class Free>
void quietly(int device, const Free& free) noexcept {
  try {
    const ContextGuard context(device);
    const RelaxedCapture relaxed;
    free();
  } catch (const Error&) {
  }
}

}  // namespace

DeviceMemory::~DeviceMemory() {
  if (pointer_) quietly(device_, [&] { api().mem_free(pointer_); });
}

bool DeviceMemory::fit(int64_t bytes) {
  if (bytes <= size_) return false;
  // Lengths grow by a page now and then; not every step shall allocate.
  const int64_t size = round_up<int64_t>(std::max(bytes, size_ + size_ / 2), 256);
  if (pointer_) check(api().mem_free(pointer_), bytes_on("cuMemFree", size_, device_));
  pointer_ = 0;
  size_ = 0;
  check(api().mem_alloc(&pointer_, static_cast<size_t>(size)),
        bytes_on("cuMemAlloc", size, device_));
  size_ = size;
  return true;
}

Event::~Event() {
  if (event_) quietly(device_, [&] { api().event_destroy(event_); });
}

CUevent Event::get() {
  if (!event_) check(api().event_create(&event_, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return event_;
}

Staging::Half::~Half() {
  if (memory) quietly(device, [&] { api().mem_free_host(memory); });
}

char* Staging::next(int64_t bytes) {
  turn_ ^= 1;
  Half& half = halves_[turn_];
  if (half.read.exists()) {
    check(api().event_synchronize(half.read.get()), "cuEventSynchronize of pinned memory");
  }
  if (bytes > half.size) {
    if (half.memory) check(api().mem_free_host(half.memory), "cuMemFreeHost");
    half.memory = nullptr;
    const int64_t size = std::max(bytes, half.size + half.size / 2);
    half.size = 0;
    void* memory = nullptr;
    check(api().mem_host_alloc(&memory, static_cast<size_t>(size), 0),
          bytes_on("cuMemHostAlloc", size, half.device));
    half.memory = static_cast<char*>(memory);
    half.size = size;
  }
  return half.memory;
}

void Staging::copy(CUdeviceptr to, int64_t bytes, CUstream stream) {
  Half& half = halves_[turn_];
  const CUresult copied =
      api().memcpy_htod_async(to, half.memory, static_cast<size_t>(bytes), stream);
  if (copied != CUDA_SUCCESS) check(copied, bytes_on("cuMemcpyHtoDAsync", bytes, half.device));
  read(stream);
}

void Staging::read(CUstream stream) {
  check(api().event_record(halves_[turn_].read.get(), stream), "cuEventRecord of pinned memory");
}

void Staging::wait() {
  for (Half& half : halves_) {
    if (!half.read.exists()) continue;
    check(api().event_synchronize(half.read.get()), "cuEventSynchronize of a copy");
  }
}

int32_t* PinnedPlans::next(int64_t words) {
  const ContextGuard context(device_);
  const RelaxedCapture relaxed;
  return reinterpret_cast<int32_t*>(staging_.next(4 * words));
}

void PinnedPlans::wait() {
  const RelaxedCapture relaxed;
  staging_.wait();
}

void PinnedPlans::copy_at_once(CUdeviceptr to, int64_t bytes, CUstream stream) {
  const CUresult copied =
      api().memcpy_htod_async(to, staging_.last(), static_cast<size_t>(bytes), stream);
  if (copied != CUDA_SUCCESS) check(copied, bytes_on("cuMemcpyHtoDAsync", bytes, device_));
  check(api().stream_synchronize(stream), "cuStreamSynchronize of a captured plan");
}

void UseOrder::before(CUstream stream, bool captures) {
  // A handle may come back as another stream, but not that of a default stream.
  next_id_ = last_id_;
  if (used_ && stream == last_ && is_default(stream)) return;
  if (captures) {
    next_id_ = reinterpret_cast<uintptr_t>(stream);
  } else {
    check(api().stream_get_id(stream, &next_id_), "cuStreamGetId");
  }
  if (!used_ || next_id_ == last_id_) return;
  if (!recorded_) check(api().event_record(event_.get(), last_), "cuEventRecord");
  recorded_ = true;
  check(api().stream_wait_event(stream, event_.get(), 0), "cuStreamWaitEvent");
}

/// An event on every use would keep the kernel after it from overlapping with it
/// (programmatic dependent launch). A default stream can take the event later, when somebody waits;
/// any other stream may be gone by then.
void UseOrder::after(CUstream stream) {
  last_id_ = next_id_;
  last_ = stream;
  used_ = true;
  recorded_ = !is_default(stream);
  if (recorded_) check(api().event_record(event_.get(), stream), "cuEventRecord");
}

bool capturing(CUstream stream) {
  if (is_default(stream)) return false;
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(api().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUstream side_stream(int device) {
  static std::mutex mutex;
  static std::map<int, CUstream> streams;  // never destroyed, as contexts are not
  const std::lock_guard<std::mutex> hold(mutex);
  CUstream& stream = streams[device];
  if (!stream) check(api().stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return stream;
}

void* allocate(int device, int64_t bytes) {
  const ContextGuard context(device);
  CUdeviceptr pointer = 0;
  check(api().mem_alloc(&pointer, static_cast<size_t>(std::max<int64_t>(bytes, 1))),
        bytes_on("cuMemAlloc", bytes, device));
  return reinterpret_cast<void*>(pointer);
}

void release(int device, void* memory) noexcept {
  quietly(device, [&] { api().mem_free(reinterpret_cast<CUdeviceptr>(memory)); });
}

void synchronize(int device, void* stream) {
  const ContextGuard context(device);
  check(api().stream_synchronize(static_cast<CUstream>(stream)), "cuStreamSynchronize");
}

}  // namespace flashbsr::cuda
