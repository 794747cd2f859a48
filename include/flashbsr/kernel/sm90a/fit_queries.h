// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Q of bf16 over K of e4m3: K becomes fp16, which takes one instruction for two elements where bf16
// takes four, and so does Q, in place. Every row is multiplied by the power of two that lets its
// largest element be below 2^15: what is below 2^-28 of that loses bits, all else is exact.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// The 16 rows of a warp, which all of its threads call for: lanes l and l + 16 have halves of row
/// l. Products read what this writes: a fence for them is done, a barrier is to follow.
///
/// @param first  shared address of the warp's first row
/// @param unit   what the products of the thread's rows, lane / 4 and eight on, are to be
///               multiplied by
template <class Traits>
FLASHBSR_DEVICE void fit_queries(uint32_t first, float (&unit)[2]) {
  constexpr int kChunks = Traits::kColumnsQk * 4;  ///< of 16 bytes, in half a row
  const int32_t lane = ptx::thread_index() % 32, row = lane % 16;
  const auto address = [&](int c) {
    const int32_t chunk = lane / 16 * kChunks + c;
    return first + chunk / 8 * Traits::kRows * 128 + row * 128 + ((chunk ^ row) % 8 << 4);
  };
  uint4 x[kChunks];
  float most = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    x[c] = ptx::load_shared_16(address(c));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = (&x[c].x)[i];
      most = ptx::max(most, fabsf(ptx::unpack_low<DType::kBF16>(pair)));
      most = ptx::max(most, fabsf(ptx::unpack_high<DType::kBF16>(pair)));
    }
  }
  most = ptx::max(most, __shfl_xor_sync(0xffffffffu, most, 16));
  // Exponents are those of floats, with 127 for 2^0. Rows of zeros, infinities and NaN stay.
  const int32_t exponent = min_of(127 + 14 + 127 - (__float_as_int(most) >> 23), 227);
  const float scale = __int_as_float(exponent << 23);
  const float inverse = __int_as_float((254 - exponent) << 23);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& pair = (&x[c].x)[i];
      pair = ptx::pack2<DType::kF16>(ptx::unpack_low<DType::kBF16>(pair) * scale,
                                     ptx::unpack_high<DType::kBF16>(pair) * scale);
    }
    ptx::store_shared_16(address(c), x[c]);
  }
  ptx::fence_async_proxy();
#pragma unroll
  for (int h = 0; h < 2; ++h) unit[h] = __shfl_sync(0xffffffffu, inverse, lane / 4 + 8 * h);
}

}  // namespace flashbsr::sm90a
