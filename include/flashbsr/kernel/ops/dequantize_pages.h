// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 to 16 bits, exactly, for the requests of a plan: a code times its scale has six bits. The
// page that the plan names i-th is written as page i, so that attention reads it by a list of
// 0, 1, ... Slots behind a request's end are neither read nor written.
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/kernel/ops/args.h>
#include <flashbsr/kernel/ops/indices.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr::ops {

/// Groups that a thread has under way: a look-up, then codes, are two waits for memory.
inline constexpr int kGroupsInFlight = 4;

/// A code's three bits on the border of exponent and mantissa are the value times 2^-126, whether
/// that is subnormal or not.
FLASHBSR_DEVICE float e2m1_by(uint32_t code, float scale) {
  return bits_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f * scale;
}

FLASHBSR_DEVICE uint4 values_of(uint32_t codes, float scale, DType to) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = e2m1_by(codes >> 8 * i, scale), high = e2m1_by(codes >> (8 * i + 4), scale);
    pairs[i] = to == DType::kBF16 ? ptx::pack2<DType::kBF16>(low, high)
                                  : ptx::pack2<DType::kF16>(low, high);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

/// Tokens [begin, end) of a request, by a block.
FLASHBSR_DEVICE void dequantize_rows(const DequantizePagesArgs& a, const DequantizeRows& x,
                                     const Request& r, int32_t begin, int32_t end) {
  const int32_t groups = (end - begin) * static_cast<int32_t>(x.groups.divisor);
  for (int32_t first = static_cast<int32_t>(threadIdx.x); first < groups;
       first += kThreads * kGroupsInFlight) {
    uint2 codes[kGroupsInFlight];
    float scales[kGroupsInFlight];
    char* out[kGroupsInFlight];
#pragma unroll
    for (int i = 0; i < kGroupsInFlight; ++i) {
      const int32_t group = first + i * kThreads;
      out[i] = nullptr;
      if (group >= groups) continue;
      const int32_t token = x.groups.quotient(group), rest = x.groups.remainder(group, token);
      const int32_t head = x.row_groups.quotient(rest), at = x.row_groups.remainder(rest, head);
      const int32_t position = begin + token;
      int64_t page = int64_t{r.kv_begin} + position, to = page;
      int32_t within = 0;
      if (a.kv_indices) {
        const int32_t nth = a.page_size.quotient(position);
        within = a.page_size.remainder(position, nth);
        to = int64_t{r.kv_begin} + nth;
        page = a.kv_indices[to];
      }
      codes[i] = *reinterpret_cast<const uint2*>(x.codes.row(page, within, head) + 8 * at);
      scales[i] = load_as_float(x.scales.row(page, within, head), at, DType::kE4M3);
      out[i] = x.out.row(to, within, head) + 2 * kCodeGroup * at;
    }
#pragma unroll
    for (int i = 0; i < kGroupsInFlight; ++i) {
      if (!out[i]) continue;
      uint4* const to = reinterpret_cast<uint4*>(out[i]);
      to[0] = values_of(codes[i].x, scales[i], x.out.dtype);
      to[1] = values_of(codes[i].y, scales[i], x.out.dtype);
    }
  }
}

FLASHBSR_DEVICE void dequantize_pages(const DequantizePagesArgs& a) {
  const PlanHeader& h = *a.header;
  for (int64_t i = first_index(); a.kv_indices && i < h.num_kv_indices; i += index_stride()) {
    a.page_ids[i] = static_cast<int32_t>(i);
  }
  const int32_t blocks = max_of(ceil_div(h.max_kv_len, kDequantizeTokens), 1);
  const int64_t all = int64_t{blocks} * h.num_requests;
  for (int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Request r = a.requests[i / blocks];
    const int32_t begin = static_cast<int32_t>(i % blocks) * kDequantizeTokens;
    const int32_t end = min_of(begin + kDequantizeTokens, r.kv_len);
    if (begin >= end) continue;
    dequantize_rows(a, a.k, r, begin, end);
    dequantize_rows(a, a.v, r, begin, end);
  }
}

}  // namespace flashbsr::ops
