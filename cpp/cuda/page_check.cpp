// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "page_check.h"

#include <flashbsr/core/error.h>
#include <flashbsr/kernel/ops/args.h>

#include "launcher.h"

namespace flashbsr::cuda {

void PageCheck::operator()(const PlanHeader* plan, const int32_t* kv_indices, int64_t pages,
                           CUstream stream) {
  if (!kernel_) {
    const RelaxedCapture relaxed;
    kernel_ = &find({.family = "check_pages"}, device_info(device_).cc);
    prepare(*kernel_, device_);
    first_bad_.fit(sizeof(uint64_t));
  }
  check(api().memset_d8_async(first_bad_.address(), 0xFF, sizeof(uint64_t), stream),
        "cuMemsetD8Async of a page check");
  const ops::CheckPagesArgs args{.header = plan,
                                 .kv_indices = kv_indices,
                                 .pages = pages,
                                 .first_bad = reinterpret_cast<uint64_t*>(first_bad_.data())};
  launch(*kernel_,
         {.device = device_,
          .stream = stream,
          .grid_x = device_info(device_).sm_count,
          .threads = ops::kThreads},
         args);
  uint64_t first_bad = 0;
  check(api().memcpy_dtoh_async(&first_bad, first_bad_.address(), sizeof(first_bad), stream),
        "cuMemcpyDtoHAsync of a page check");
  check(api().stream_synchronize(stream), "cuStreamSynchronize of a page check");
  if (first_bad == ops::kNoBadPage) return;
  throw Error(ErrorCode::kIndexRange, "kv_indices[" + std::to_string(first_bad >> 32) + "]",
              std::to_string(static_cast<int32_t>(first_bad)) + " in the memory of the GPU",
              "a page of the cache, in [0, " + std::to_string(pages) + ")");
}

}  // namespace flashbsr::cuda
