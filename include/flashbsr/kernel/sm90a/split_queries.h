// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Q of bf16 over K of e4m3: bf16 has eight significant bits, e4m3 four, so Q is the sum of two e4m3
// matrices, and K is multiplied as it lies: two products of e4m3 take as long as one of 16 bits,
// and K need not be widened. Every row is multiplied by the power of two that takes its largest
// element to [128, 256); elements below 2^-9 of that one lose bits, at most 2^-17 of it.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// Four numbers as sums of two e4m3 numbers each.
struct SplitFour {
  uint32_t high;  ///< the four, rounded
  uint32_t low;   ///< what that left
};

FLASHBSR_DEVICE SplitFour split4_e4m3(float a, float b, float c, float d) {
  const uint32_t high = ptx::pack4_e4m3(a, b, c, d);
  uint32_t ab, cd;
  ptx::float8_to_f16<kArch, DType::kE4M3>(high, ab, cd);
  return {high, ptx::pack4_e4m3(
                    a - ptx::unpack_low<DType::kF16>(ab), b - ptx::unpack_high<DType::kF16>(ab),
                    c - ptx::unpack_low<DType::kF16>(cd), d - ptx::unpack_high<DType::kF16>(cd))};
}

/// The 16 rows of every warp of a warpgroup, which all of its threads call for, in place: lanes l
/// and l + 16 have halves of row l, [dims] becomes [low parts][high parts]. Small sums come first
/// in products that truncate. Products read what this writes: a fence for them is done, a barrier
/// is to follow.
///
/// @param first    shared address of the warp's first row
/// @param barrier  a named one of the warpgroup; a warp's own would make the main loop spill
/// @param unit     what the products of the thread's rows, lane / 4 and eight on, are to be
///                 multiplied by
template <class Traits>
FLASHBSR_DEVICE void split_queries(uint32_t first, int barrier, float (&unit)[2]) {
  constexpr int kChunks = Traits::kHeadDimQk / 16;  ///< of 16 bytes, in half a row
  const int32_t lane = ptx::thread_index() % 32, row = lane % 16, half = lane / 16;
  const auto address = [&](int32_t chunk) {
    return first + chunk / 8 * Traits::kRows * 128 + row * 128 + ((chunk ^ row) % 8 << 4);
  };
  uint4 x[kChunks];
  float most = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    x[c] = ptx::load_shared_16(address(half * kChunks + c));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = (&x[c].x)[i];
      most = ptx::max(most, fabsf(ptx::unpack_low<DType::kBF16>(pair)));
      most = ptx::max(most, fabsf(ptx::unpack_high<DType::kBF16>(pair)));
    }
  }
  most = ptx::max(most, __shfl_xor_sync(0xffffffffu, most, 16));
  // Exponents are those of floats, with 127 for 2^0. e4m3 has no infinity: a row with one becomes
  // NaN, as softmax would make it.
  const int32_t exponent = min_of(127 + 7 + 127 - (__float_as_int(most) >> 23), 227);
  const float scale = __int_as_float(most < infinity() ? exponent << 23 : 0x7fffffff);
  const float inverse = __int_as_float((254 - exponent) << 23);
  ptx::named_barrier_sync(barrier, 128);  // all have read
#pragma unroll
  for (int c = 0; c < kChunks; c += 2) {
    uint4 low, high;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t ab = (&x[c + i / 2].x)[i % 2 * 2], cd = (&x[c + i / 2].x)[i % 2 * 2 + 1];
      const SplitFour four = split4_e4m3(
          ptx::unpack_low<DType::kBF16>(ab) * scale, ptx::unpack_high<DType::kBF16>(ab) * scale,
          ptx::unpack_low<DType::kBF16>(cd) * scale, ptx::unpack_high<DType::kBF16>(cd) * scale);
      (&low.x)[i] = four.low;
      (&high.x)[i] = four.high;
    }
    const int32_t chunk = half * (kChunks / 2) + c / 2;
    ptx::store_shared_16(address(chunk), low);
    ptx::store_shared_16(address(kChunks + chunk), high);
  }
  ptx::fence_async_proxy();
#pragma unroll
  for (int h = 0; h < 2; ++h) unit[h] = __shfl_sync(0xffffffffu, inverse, lane / 4 + 8 * h);
}

}  // namespace flashbsr::sm90a
