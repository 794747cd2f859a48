// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 written as 16 bits, on the host.
#pragma once

#include <flashbsr/kernel/ops/args.h>

namespace fake {

/// Of K or V: what the kernel writes, an element at a time.
inline void dequantize_rows(const flashbsr::ops::DequantizePagesArgs& a,
                            const flashbsr::ops::DequantizeRows& x, const flashbsr::Request& r,
                            int32_t first_page) {
  for (int32_t position = 0; position < r.kv_len; ++position) {
    const int32_t nth = a.kv_indices ? position / x.codes.page_size : position;
    const int64_t to = int64_t{first_page} + nth;
    const int64_t page = a.kv_indices ? a.kv_indices[r.kv_begin + nth] : to;
    const int32_t within = a.kv_indices ? position % x.codes.page_size : 0;
    for (int32_t head = 0; head < x.codes.heads; ++head) {
      for (int32_t d = 0; d < x.codes.dim; ++d) {
        const float code =
            flashbsr::load_as_float(x.codes.row(page, within, head), d, x.codes.dtype);
        const float scale = flashbsr::load_as_float(
            x.scales.row(page, within, head), d / (x.codes.dim / x.scales.dim), x.scales.dtype);
        flashbsr::store_from_float(x.out.row(to, within, head), d, x.out.dtype, code * scale);
      }
    }
    if (a.kv_indices) a.page_ids[r.kv_begin + nth] = static_cast<int32_t>(to);
  }
}

inline void dequantize_pages(const flashbsr::ops::DequantizePagesArgs& a) {
  for (int32_t n = 0; n < a.num_requests; ++n) {
    const flashbsr::Request& r = a.requests[a.named ? a.some[n].index : n];
    const int32_t first_page = a.named ? a.some[n].first_page : r.kv_begin;
    dequantize_rows(a, a.k, r, first_page);
    dequantize_rows(a, a.v, r, first_page);
  }
}

}  // namespace fake
