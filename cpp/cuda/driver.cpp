// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

#include <flashbsr/core/error.h>

#include "api.h"

namespace flashbsr::cuda {

namespace {

struct Driver {
  Api api{};
  std::string problem;
  std::vector<CUdevice> handles;
  std::vector<DeviceInfo> devices;
  int version = 0;
};

/// Symbols of the driver carry a version that <cuda.h> hides behind macros. These exist since CUDA
/// 12.0 and have the types that toolkits from 12.4 on declare.
std::string load_symbols(void* library, Api& a) {
  std::string missing;
  const auto load = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
        reinterpret_cast<void*>(dlsym(library, symbol)));
    if (!function && missing.empty()) missing = symbol;
  };
  load(a.init, "cuInit");
  load(a.driver_get_version, "cuDriverGetVersion");
  load(a.get_error_name, "cuGetErrorName");
  load(a.get_error_string, "cuGetErrorString");
  load(a.device_get_count, "cuDeviceGetCount");
  load(a.device_get, "cuDeviceGet");
  load(a.device_get_name, "cuDeviceGetName");
  load(a.device_get_attribute, "cuDeviceGetAttribute");
  load(a.device_total_mem, "cuDeviceTotalMem_v2");
  load(a.device_primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  load(a.ctx_get_current, "cuCtxGetCurrent");
  load(a.ctx_get_device, "cuCtxGetDevice");
  load(a.ctx_push_current, "cuCtxPushCurrent_v2");
  load(a.ctx_pop_current, "cuCtxPopCurrent_v2");
  load(a.library_load_data, "cuLibraryLoadData");
  load(a.library_get_kernel, "cuLibraryGetKernel");
  load(a.kernel_get_function, "cuKernelGetFunction");
  load(a.kernel_set_attribute, "cuKernelSetAttribute");
  load(a.launch_kernel_ex, "cuLaunchKernelEx");
  load(a.occupancy_max_active_clusters, "cuOccupancyMaxActiveClusters");
  load(a.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
  load(a.mem_alloc, "cuMemAlloc_v2");
  load(a.mem_free, "cuMemFree_v2");
  load(a.mem_host_alloc, "cuMemHostAlloc");
  load(a.mem_free_host, "cuMemFreeHost");
  load(a.memcpy_htod_async, "cuMemcpyHtoDAsync_v2");
  load(a.memcpy_dtoh_async, "cuMemcpyDtoHAsync_v2");
  load(a.memset_d8_async, "cuMemsetD8Async");
  load(a.memset_d32_async, "cuMemsetD32Async");
  load(a.stream_create, "cuStreamCreate");
  load(a.stream_synchronize, "cuStreamSynchronize");
  load(a.stream_wait_event, "cuStreamWaitEvent");
  load(a.stream_is_capturing, "cuStreamIsCapturing");
  load(a.stream_get_capture_info, "cuStreamGetCaptureInfo_v2");
  load(a.stream_get_id, "cuStreamGetId");
  load(a.thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
  load(a.user_object_create, "cuUserObjectCreate");
  load(a.graph_retain_user_object, "cuGraphRetainUserObject");
  load(a.event_create, "cuEventCreate");
  load(a.event_destroy, "cuEventDestroy_v2");
  load(a.event_record, "cuEventRecord");
  load(a.event_synchronize, "cuEventSynchronize");
  return missing;
}

std::string text_of(const Api& a, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  a.get_error_name(result, &name);
  a.get_error_string(result, &text);
  return std::string(name ? name : "error " + std::to_string(static_cast<int>(result))) +
         (text ? " (" + std::string(text) + ")" : "");
}

DeviceInfo read_device(const Api& a, CUdevice handle) {
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    if (const CUresult r = a.device_get_attribute(&value, which, handle)) {
      throw Error(ErrorCode::kCuda, "cuDeviceGetAttribute", text_of(a, r), "success");
    }
    return value;
  };
  DeviceInfo d;
  char name[256] = "";
  a.device_get_name(name, sizeof name, handle);
  d.name = name;
  d.cc = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
         attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  d.sm_count = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  d.max_smem_per_block = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  d.max_smem_per_sm = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  d.l2_bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  size_t bytes = 0;
  a.device_total_mem(&bytes, handle);
  d.memory_bytes = static_cast<int64_t>(bytes);
  return d;
}

/// Fills `d` and returns what is wrong, nothing where all is well.
std::string open_driver(Driver& d) {
  // Never closed: kernels stay loaded until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return std::string("no CUDA driver: ") + dlerror();
  const std::string missing = load_symbols(library, d.api);
  if (d.api.driver_get_version) d.api.driver_get_version(&d.version);
  if (!missing.empty()) {
    return "the CUDA driver is too old, it lacks " + missing + "; CUDA 12.0 or later is needed";
  }
  if (const CUresult r = d.api.init(0)) return "cuInit: " + text_of(d.api, r);
  int count = 0;
  if (const CUresult r = d.api.device_get_count(&count)) {
    return "cuDeviceGetCount: " + text_of(d.api, r);
  }
  if (count == 0) return "the CUDA driver sees no device";
  for (int i = 0; i < count; ++i) {
    CUdevice handle;
    if (const CUresult r = d.api.device_get(&handle, i)) {
      return "cuDeviceGet: " + text_of(d.api, r);
    }
    d.handles.push_back(handle);
    d.devices.push_back(read_device(d.api, handle));
  }
  return "";
}

const Driver& driver() {
  static const Driver instance = [] {
    Driver d;
    try {
      d.problem = open_driver(d);
    } catch (const Error& e) {
      d.problem = e.what();
    }
    if (!d.problem.empty()) d.devices.clear();
    return d;
  }();
  return instance;
}

/// Retained once and never released: a process has few devices, and kernels live in the context.
CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::vector<std::atomic<CUcontext>> contexts(driver().devices.size());
  auto& slot = contexts[static_cast<size_t>(device)];
  CUcontext context = slot.load(std::memory_order_acquire);
  if (context) return context;
  const std::lock_guard lock(mutex);
  context = slot.load(std::memory_order_relaxed);
  if (context) return context;
  check(api().device_primary_ctx_retain(&context, driver().handles[static_cast<size_t>(device)]),
        "cuDevicePrimaryCtxRetain of device " + std::to_string(device));
  slot.store(context, std::memory_order_release);
  return context;
}

}  // namespace

bool available() { return driver().problem.empty(); }

const std::string& unavailable_reason() { return driver().problem; }

const std::vector<DeviceInfo>& devices() { return driver().devices; }

int driver_version() { return driver().version; }

const DeviceInfo& device_info(int device) {
  api();
  const auto& all = devices();
  if (device < 0 || static_cast<size_t>(device) >= all.size()) {
    throw Error(ErrorCode::kDevice, "device", "cuda:" + std::to_string(device),
                "cuda:0 to cuda:" + std::to_string(all.size() - 1) + ", what the driver sees");
  }
  return all[static_cast<size_t>(device)];
}

const Api& api() {
  if (!available()) {
    throw Error(ErrorCode::kCuda, "CUDA driver", unavailable_reason(),
                "a driver and a GPU; backend=\"cpu\" needs neither");
  }
  return driver().api;
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) check(result, std::string(what));
}

void check(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) return;
  throw Error(ErrorCode::kCuda, what, text_of(driver().api, result), "success");
}

ContextGuard::ContextGuard(int device) {
  device_info(device);
  const CUcontext context = primary_context(device);
  CUcontext current = nullptr;
  check(api().ctx_get_current(&current), "cuCtxGetCurrent");
  if (current == context) return;
  check(api().ctx_push_current(context), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  CUcontext popped;
  if (pushed_) driver().api.ctx_pop_current(&popped);
}

}  // namespace flashbsr::cuda
