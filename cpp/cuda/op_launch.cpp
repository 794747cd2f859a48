// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "api.h"
#include "launcher.h"
#include "memory.h"
#include "ops.h"

namespace flashbsr::cuda {

void launch_op(const char* family, const Queue& queue, const OpGrid& grid, const void* args) {
  const DeviceInfo& device = device_info(queue.device);
  const KernelRow& row = find({.family = family, .kv = grid.kv}, device.cc);
  int64_t blocks = grid.blocks;
  if (grid.blocks_per_sm) {
    blocks = min_of<int64_t>(blocks, int64_t{grid.blocks_per_sm} * device.sm_count);
  }
  void* params[] = {const_cast<void*>(args)};
  const RelaxedCapture relaxed;  // the first launch loads the kernel, perhaps during a capture
  launch(row,
         {.device = queue.device,
          .stream = static_cast<Stream>(queue.stream),
          .grid_x = static_cast<int>(blocks),
          .threads = grid.threads,
          .smem_bytes = 0,
          .overlap = grid.overlap},
         static_cast<void**>(params));
}

std::vector<int64_t> download(const Indices& indices, const Queue& queue) {
  const size_t count = static_cast<size_t>(indices.size);
  std::vector<int64_t> values(count);
  if (indices.size == 0) return values;
  std::vector<int32_t> narrow(indices.wide ? 0 : count);
  void* to = indices.wide ? static_cast<void*>(values.data()) : narrow.data();
  const ContextGuard current(queue.device);
  const Stream stream = static_cast<Stream>(queue.stream);
  check(api().memcpy_dtoh_async(to, reinterpret_cast<CUdeviceptr>(indices.data),
                                count * (indices.wide ? 8 : 4), stream),
        "cuMemcpyDtoHAsync (index array)");
  check(api().stream_synchronize(stream), "cuStreamSynchronize (index array)");
  if (!indices.wide) values.assign(narrow.begin(), narrow.end());
  return values;
}

}  // namespace flashbsr::cuda
