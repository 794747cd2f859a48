// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of bounds on the device: the lengths that they get, and rows that are then not there.
#pragma once

#include <flashbsr/core/resolve.h>
#include <flashbsr/kernel/ops/indices.h>
#include <flashbsr/ptx/sync.h>

namespace flashbsr::ops {

/// Its blocks come to their places while the kernel before it ends, and those of the run behind it
/// while it works: that waits for the plan (Overlap::kLaunch).
template <int kArch>
FLASHBSR_DEVICE void resolve(const ResolveArgs& a) {
  ptx::wait_for_prerequisites<kArch>();
  ptx::launch_dependents<kArch>();
  const BoundPlan plan(a.plan);
  if (plan.bound()) plan.resolve(a.lengths, first_index(), index_stride());
}

/// A thread per row of a head. Its blocks come to their places while the attention before it works.
template <int kArch>
FLASHBSR_DEVICE void clear_rows(const ClearRowsArgs& a) {
  ptx::wait_for_prerequisites<kArch>();
  const int64_t first = a.header->num_q_tokens_now;
  const int64_t rows = (a.header->num_q_tokens - first) * a.out.heads;
  const int64_t bytes = int64_t{a.out.dim} * dtype_size(a.out.dtype);
  for (int64_t i = first_index(); i < rows; i += index_stride()) {
    const int64_t token = first + i / a.out.heads, head = i % a.out.heads;
    char* row = a.out.row(token, head);
    for (int64_t at = 0; at < bytes; at += 8) {
      *reinterpret_cast<uint2*>(row + at) = make_uint2(0, 0);
    }
    if (a.lse) a.lse[token * a.lse_stride_token + head * a.lse_stride_head] = -infinity();
  }
}

}  // namespace flashbsr::ops
