// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads a cache of codes back: codes times their scales. A warp takes a head of a token, a lane an
// element of every 32: for tests and inspection, so nothing is made of it being fast.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::ops {

/// The same bits as cpu::dequantize_row gives.
FLASHBSR_DEVICE void dequantize_head(const DequantizeArgs& a, int64_t page, int64_t token,
                                     int32_t head, int lane) {
  const char* codes = a.cache.row(page, token, head);
  const char* scales = a.scales.row(page, token, head);
  char* out = a.out.row(page, token, head);
  const int32_t size = a.cache.dim / a.scales.dim;
  for (int32_t d = lane; d < a.cache.dim; d += 32) {
    const float code = load_as_float(codes, d, a.cache.dtype);
    const float scale = load_as_float(scales, d / size, a.scales.dtype);
    const float x = a.cache.dtype != DType::kI4
                        ? code * scale
                        : (code - static_cast<float>(int4_zero(scale))) * int4_scale(scale);
    store_from_float(out, d, a.out.dtype, x * a.number);
  }
}

FLASHBSR_DEVICE void dequantize_kv(const DequantizeArgs& a) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < a.tokens * a.cache.heads; item += stride) {
    const int32_t t = a.heads.quotient(item);
    const int64_t slot = a.first_token + t;
    const int64_t page = slot / a.cache.page_size;
    dequantize_head(a, page, slot - page * a.cache.page_size, a.heads.remainder(item, t), lane);
  }
}

}  // namespace flashbsr::ops
