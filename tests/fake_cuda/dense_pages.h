// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 written as 16 bits, on the host.
#pragma once

#include <flashbsr/kernel/ops/args.h>

namespace fake {

/// Of K or V: what the kernel writes, an element at a time.
inline void dequantize_rows(const flashbsr::ops::DequantizePagesArgs& a,
                            const flashbsr::ops::DequantizeRows& x, const flashbsr::Request& r) {
  for (int32_t position = 0; position < r.kv_len; ++position) {
    const int32_t nth = a.kv_indices ? position / x.codes.page_size : position;
    const int64_t to = int64_t{r.kv_begin} + nth, page = a.kv_indices ? a.kv_indices[to] : to;
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
  }
}

inline void dequantize_pages(const flashbsr::ops::DequantizePagesArgs& a) {
  for (int32_t i = 0; a.kv_indices && i < a.header->num_kv_indices; ++i) a.page_ids[i] = i;
  for (int32_t r = 0; r < a.header->num_requests; ++r) {
    dequantize_rows(a, a.k, a.requests[r]);
    dequantize_rows(a, a.v, a.requests[r]);
  }
}

}  // namespace fake
