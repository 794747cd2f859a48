// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Mixed batches whose narrow items have a kernel of their own: which items a launch is for.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <flashbsr/core/launch.h>

namespace fake {

/// Of a plan whose narrow items have a kernel of their own those of one of the two.
inline void keep_items(std::vector<int32_t>& plan, const flashbsr::KernelArgs& args, bool narrow) {
  auto& h = *reinterpret_cast<flashbsr::PlanHeader*>(plan.data());
  if (h.num_narrow_workers == 0 || h.num_narrow_blocks > 0) return;
  const int64_t queue = args.queue_indptr - reinterpret_cast<const int32_t*>(args.header);
  const int32_t first = narrow ? h.num_workers - h.num_narrow_workers : 0;
  if (queue != h.off_queue_indptr + first) std::abort();  // not this kernel's workers
  auto* items = reinterpret_cast<flashbsr::WorkItem*>(plan.data() + h.off_items);
  if (narrow) std::copy(items + h.num_wide_items, items + h.num_items, items);
  h.num_items = narrow ? h.num_items - h.num_wide_items : h.num_wide_items;
}

}  // namespace fake
