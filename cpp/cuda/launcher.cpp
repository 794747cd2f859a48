// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "launcher.h"

#include <array>
#include <mutex>

#include <flashbsr/core/error.h>

#include "jit.h"
#include "memory.h"

namespace flashbsr::cuda {

namespace {

constexpr int kMaxDevices = 64;  // the bits of LoadState::ready

std::mutex& mutex() {
  static std::mutex instance;
  return instance;
}

LoadState& state_of(const KernelRow& row) {
  if (row.jit) return row.jit->state;
  static std::vector<LoadState> states(kernel_rows().size());
  return states[static_cast<size_t>(&row - kernel_rows().data())];
}

std::string on_device(const char* call, const KernelRow& row, int device) {
  return std::string(call) + " of " + row.name + " on cuda:" + std::to_string(device) + " (" +
         device_info(device).name + ")";
}

void load(const KernelRow& row, const void* image, LoadState& state, int device) {
  if (state.kernel.load(std::memory_order_relaxed)) return;
  CUlibrary library;
  check(api().library_load_data(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0),
        on_device("cuLibraryLoadData", row, device));
  CUkernel kernel;
  check(api().library_get_kernel(&kernel, library, row.name),
        on_device("cuLibraryGetKernel", row, device));
  state.kernel.store(kernel, std::memory_order_release);
}

void prepare_slow(const KernelRow& row, LoadState& state, int device) {
  const DeviceInfo& info = device_info(device);
  if (device >= kMaxDevices) {
    throw Error(ErrorCode::kDevice, "device", "cuda:" + std::to_string(device),
                "at most " + std::to_string(kMaxDevices) + " devices in a process");
  }
  if (!row.runs_on(info.cc)) {
    throw Error(ErrorCode::kUnsupported, row.name, info.name + ", sm_" + std::to_string(info.cc),
                "a device that runs one of " + row.targets());
  }
  if (row.shape.smem_bytes > info.max_smem_per_block) {
    throw Error(ErrorCode::kUnsupported, row.name,
                std::to_string(row.shape.smem_bytes) + " bytes of shared memory on " + info.name,
                "at most " + std::to_string(info.max_smem_per_block) +
                    " there; a kernel of fewer rows or of a smaller head_dim fits");
  }
  // Before the lock is taken: a provider takes Python's, which others hold while they wait here.
  std::string code;
  const void* image = row.image;
  if (row.jit && !state.kernel.load(std::memory_order_acquire)) {
    code = row.jit->provider->cuda_kernel(row.jit->wish);
    image = code.data();
  }
  if (!image && code.empty() && !state.kernel.load(std::memory_order_acquire)) {
    throw Error(ErrorCode::kUnsupported, row.name, "a build with FLASHBSR_KERNELS=common",
                "FLASHBSR_KERNELS=all, which compiles rare kernels too; Python has them compiled "
                "when they are first used");
  }
  const ContextGuard context(device);
  const RelaxedCapture relaxed;  // loading may allocate
  const std::lock_guard lock(mutex());
  load(row, image, state, device);
  const CUkernel kernel = state.kernel.load(std::memory_order_relaxed);
  if (row.shape.smem_bytes) {
    CUdevice handle;
    check(api().device_get(&handle, device), "cuDeviceGet");
    check(api().kernel_set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     row.shape.smem_bytes, kernel, handle),
          on_device("cuKernelSetAttribute", row, device));
  }
  if (row.takes_clusters()) {  // of 16, too
    CUdevice handle;
    check(api().device_get(&handle, device), "cuDeviceGet");
    check(api().kernel_set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel,
                                     handle),
          on_device("cuKernelSetAttribute", row, device));
  }
  // Loads the code into this context now; the driver would otherwise do so at the first launch.
  CUfunction function;
  check(api().kernel_get_function(&function, kernel),
        on_device("cuKernelGetFunction", row, device));
  state.ready.fetch_or(uint64_t{1} << device, std::memory_order_release);
}

std::string shape_text(const KernelRow& row, const CUlaunchConfig& c, int device) {
  return on_device("cuLaunchKernelEx", row, device) + ", grid " + std::to_string(c.gridDimX) + "x" +
         std::to_string(c.gridDimY) + ", " + std::to_string(c.blockDimX) + " threads, " +
         std::to_string(c.sharedMemBytes) + " bytes of shared memory";
}

CUlaunchAttribute cluster_of(int size) {
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim.x = static_cast<unsigned>(size);
  attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
  return attribute;
}

}  // namespace

ClusterBlocks cluster_blocks(const KernelRow& row, int device) {
  const ContextGuard context(device);
  const auto function =
      reinterpret_cast<CUfunction>(state_of(row).kernel.load(std::memory_order_acquire));
  ClusterBlocks blocks{};
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int size = kClusterSizes[i];
    if (!row.takes_clusters_of(size)) continue;
    CUlaunchAttribute attribute = cluster_of(size);
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(size);
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = static_cast<unsigned>(row.shape.threads);
    config.sharedMemBytes = static_cast<unsigned>(row.shape.smem_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    const CUresult found = api().occupancy_max_active_clusters(&clusters, function, &config);
    blocks[i] = found == CUDA_SUCCESS ? clusters * size : 0;
  }
  return blocks;
}

void prepare(const KernelRow& row, int device) {
  LoadState& state = state_of(row);
  if (device < 0 || device >= kMaxDevices ||
      !(state.ready.load(std::memory_order_acquire) >> device & 1)) {
    prepare_slow(row, state, device);
  }
}

void launch(const KernelRow& row, const Launch& where, void** params) {
  if (where.grid_x == 0 || where.grid_y == 0) return;
  prepare(row, where.device);
  const ContextGuard context(where.device);
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(where.grid_x);
  config.gridDimY = static_cast<unsigned>(where.grid_y);
  config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(where.threads ? where.threads : row.shape.threads);
  config.blockDimY = 1;
  config.blockDimZ = 1;
  config.sharedMemBytes =
      static_cast<unsigned>(where.smem_bytes >= 0 ? where.smem_bytes : row.shape.smem_bytes);
  config.hStream = where.stream;
  CUlaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (where.overlap && device_info(where.device).cc >= 90) {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  if (where.cluster > 1) attributes[config.numAttrs++] = cluster_of(where.cluster);
  // A kernel is accepted where a function is: the driver finds the one of the current context.
  const auto function =
      reinterpret_cast<CUfunction>(state_of(row).kernel.load(std::memory_order_acquire));
  const CUresult result = api().launch_kernel_ex(&config, function, params, nullptr);
  if (result != CUDA_SUCCESS) check(result, shape_text(row, config, where.device));
}

}  // namespace flashbsr::cuda
