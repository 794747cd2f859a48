// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Q of few rows for products with codes: fit_queries.h of 16 rows, and columns in the order in
// which codes come out of shared memory (tile/fragments.h).
#pragma once

#include <flashbsr/kernel/sm90a/fit_queries.h>

namespace flashbsr::sm90a {

/// Rows of bf16 are multiplied by powers of two that take their largest element to [2^14, 2^15),
/// in place, and become fp16; tails of packed rows stay bf16, in their order. 16 threads have a
/// row. Products read what this writes: a fence for them is done, a barrier is to follow.
/// @param queries  shared address of the tile
/// @param units    of what the products of each row are to be multiplied by
/// @param thread   of 256 or more
template <class Traits>
FLASHBSR_DEVICE void fit_few_queries(uint32_t queries, uint32_t units, int32_t thread) {
  constexpr int kGroups = Traits::kHeadDimQk / 16, kTail = Traits::kHeadDimVo / 16;
  static_assert(Traits::kRows == 16);
  if (thread >= 16 * Traits::kRows) return;
  const int32_t row = thread / 16, lane = thread % 16;
  // Half `i` of 16 dims.
  const auto address = [&](int32_t group, int32_t i) {
    const int32_t chunk = (group % 4 * 2 + i) ^ (row & 7);
    return queries + group / 4 * (Traits::kRows * 128) + row * 128 + chunk * 16;
  };
  uint32_t largest = 0;  // of the magnitudes' bits, which order as the numbers do
  for (int32_t group = lane; group < kGroups; group += 16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = ptx::load_shared_16(address(group, i));
#pragma unroll
      for (int k = 0; k < 4; ++k) largest = ptx::max2(largest, (&x.x)[k] & 0x7fff7fffu);
    }
  }
  largest = max_of(largest & 0xffffu, largest >> 16);
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) {
    largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
  }
  const FitFactor fitting(largest);
  if (lane == 0) ptx::store_shared(units + 4 * row, __float_as_uint(fitting.unit));
  for (int32_t group = lane; group < kGroups; group += 16) {
    uint4 x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = ptx::load_shared_16(address(group, i));
    const bool tail = Traits::kTailType == DType::kBF16 && group >= kTail;
    uint32_t pair[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t from = (&x[k / 4].x)[k % 4];
      const float a = ptx::unpack_low<DType::kBF16>(from) * fitting.factor,
                  b = ptx::unpack_high<DType::kBF16>(from) * fitting.factor;
      pair[k] = tail ? ptx::pack2<DType::kBF16>(a, b) : ptx::pack2<DType::kF16>(a, b);
    }
    if (tail) {
      ptx::store_shared_16(address(group, 0), {pair[0], pair[1], pair[2], pair[3]});
      ptx::store_shared_16(address(group, 1), {pair[4], pair[5], pair[6], pair[7]});
    } else {
      ptx::store_shared_16(address(group, 0), {pair[0], pair[2], pair[4], pair[6]});
      ptx::store_shared_16(address(group, 1), {pair[1], pair[3], pair[5], pair[7]});
    }
  }
  ptx::fence_async_proxy();
}

}  // namespace flashbsr::sm90a
