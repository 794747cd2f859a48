// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions that flashbsr calls, with their types from the toolkit's header; every
// failure becomes an Error(kCuda). For sources of cpp/cuda only.
#pragma once

#include <cuda.h>

#include <string>

#include "driver.h"

namespace flashbsr::cuda {

/// Functions by what they do; the symbols, with their version, are in driver.cpp.
struct Api {
  decltype(&::cuInit) init;
  decltype(&::cuDriverGetVersion) driver_get_version;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuDeviceGetCount) device_get_count;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetName) device_get_name;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDeviceTotalMem) device_total_mem;
  decltype(&::cuDevicePrimaryCtxRetain) device_primary_ctx_retain;
  decltype(&::cuCtxGetCurrent) ctx_get_current;
  decltype(&::cuCtxGetDevice) ctx_get_device;
  decltype(&::cuCtxPushCurrent) ctx_push_current;
  decltype(&::cuCtxPopCurrent) ctx_pop_current;
  decltype(&::cuLibraryLoadData) library_load_data;
  decltype(&::cuLibraryGetKernel) library_get_kernel;
  decltype(&::cuKernelGetFunction) kernel_get_function;
  decltype(&::cuKernelSetAttribute) kernel_set_attribute;
  decltype(&::cuLaunchKernelEx) launch_kernel_ex;
  decltype(&::cuOccupancyMaxActiveClusters) occupancy_max_active_clusters;
  decltype(&::cuTensorMapEncodeTiled) tensor_map_encode_tiled;
  decltype(&::cuMemAlloc) mem_alloc;
  decltype(&::cuMemFree) mem_free;
  decltype(&::cuMemHostAlloc) mem_host_alloc;
  decltype(&::cuMemFreeHost) mem_free_host;
  decltype(&::cuMemcpyHtoDAsync) memcpy_htod_async;
  decltype(&::cuMemcpyDtoHAsync) memcpy_dtoh_async;
  decltype(&::cuMemsetD8Async) memset_d8_async;
  decltype(&::cuMemsetD32Async) memset_d32_async;
  decltype(&::cuStreamCreate) stream_create;
  decltype(&::cuStreamSynchronize) stream_synchronize;
  decltype(&::cuStreamWaitEvent) stream_wait_event;
  decltype(&::cuStreamIsCapturing) stream_is_capturing;
  /// _v2: later versions add data of edges, and toolkits before 13 do not declare them.
  CUresult(CUDAAPI* stream_get_capture_info)(CUstream, CUstreamCaptureStatus*, cuuint64_t*,
                                             CUgraph*, const CUgraphNode**, size_t*);
  decltype(&::cuStreamGetId) stream_get_id;
  decltype(&::cuThreadExchangeStreamCaptureMode) thread_exchange_stream_capture_mode;
  decltype(&::cuUserObjectCreate) user_object_create;
  decltype(&::cuGraphRetainUserObject) graph_retain_user_object;
  decltype(&::cuEventCreate) event_create;
  decltype(&::cuEventDestroy) event_destroy;
  decltype(&::cuEventRecord) event_record;
  decltype(&::cuEventSynchronize) event_synchronize;
};

/// The loaded driver. Throws Error(kCuda) with unavailable_reason() where there is none.
const Api& api();

/// Throws Error(kCuda) unless `result` is success. `what` names the call and what it was for.
void check(CUresult result, const char* what);
void check(CUresult result, const std::string& what);

/// Makes a device's primary context current in this thread, the one that PyTorch, JAX and CuPy use
/// too, and restores what was. Costs one driver call where it is current already.
class ContextGuard {
 public:
  explicit ContextGuard(int device);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace flashbsr::cuda
