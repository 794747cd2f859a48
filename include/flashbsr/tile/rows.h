// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The packed rows of an item: what they are, what they see, how their logits scale.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/core/math.h>

namespace flashbsr {

/// Per packed row of an item, in shared memory.
struct PrefillRow {
  int32_t token;
  int32_t q_head;
  Span span;  ///< visible KV positions
};

/// Describes row `r`. Rows past row_count see nothing.
FLASHBSR_DEVICE PrefillRow describe_row(const KernelArgs& args, const WorkItem& item,
                                        const Request& request, int32_t r) {
  PrefillRow row{0, item.kv_head * static_cast<int32_t>(args.group.divisor), {0, 0}};
  if (r < item.row_count) {
    const int32_t packed = item.row_begin + r;
    row.token = args.group.quotient(packed);
    row.q_head += args.group.remainder(packed, row.token);
    row.span = visible_keys(*args.header, request, row.token);
    // Its last tile may reach past a split item's end.
    row.span.end = min_of(row.span.end, item.kv_end);
  }
  return row;
}

/// Natural logits per raw dot product.
FLASHBSR_DEVICE float logit_scale(const Params& p, int32_t q_head, int32_t kv_head) {
  return p.sm_scale * (p.q_head_scale ? p.q_head_scale[q_head] : 1.0f) *
         (p.k_head_scale ? p.k_head_scale[kv_head] : 1.0f);
}

/// What a run of rows sees: some of them [any.begin, any.end), all of them [all.begin, all.end).
struct Visibility {
  Span any;
  Span all;

  /// Rows [first, end). Spans move right from row to row, so the outer rows tell.
  FLASHBSR_DEVICE static Visibility of(const PrefillRow* rows, int32_t first, int32_t end) {
    if (first >= end) return {{0, 0}, {0, 0}};
    const Span a = rows[first].span, z = rows[end - 1].span;
    return {{a.begin, z.end}, {z.begin, a.end}};
  }
  FLASHBSR_DEVICE bool sees(int32_t begin, int32_t end) const {
    return begin < any.end && end > any.begin;
  }
  FLASHBSR_DEVICE bool whole(int32_t begin, int32_t end) const {
    return begin >= all.begin && end <= all.end;
  }
};

}  // namespace flashbsr
