// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Q of bf16 for products with codes in fp16: every row is multiplied by the power of two that
// brings its largest element to [2^14, 2^15). bf16 has fewer bits than fp16, so that is exact, but
// for what lies 2^28 below the largest; from there on 2^-39 of that one is lost.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// By what a row is multiplied whose largest magnitude has these bits of bf16, and what undoes it.
struct FitFactor {
  float factor, unit;

  FLASHBSR_DEVICE explicit FitFactor(uint32_t largest) {
    const int32_t exponent = static_cast<int32_t>(largest >> 7);  // biased by 127; 255: inf or NaN
    // 2^(14 - e), as far as rows' factors stay far from 0 and from infinity: rows of zeros.
    const int32_t shift = exponent == 255 ? 0 : max_of(-64, min_of(64, 14 + 127 - exponent));
    factor = __int_as_float((127 + shift) << 23);
    unit = __int_as_float((127 - shift) << 23);
  }
};

/// Eight of the 16 rows of every warp of a warpgroup, which all of its threads call for, in place.
/// Columns of latents become fp16; that of tails does, too, or stays bf16, times Traits::kKeyUnit's
/// inverse, by which latents are larger than they were. Products read what this writes: a fence for
/// them is done, a barrier is to follow.
///
/// @param queries  shared address of the tile
/// @param units    of what the products of each row are to be multiplied by
/// @param half     of each warp's rows
template <class Traits>
FLASHBSR_DEVICE void fit_queries(uint32_t queries, uint32_t units, int32_t half) {
  constexpr int kLatentColumns = Traits::kLandingColumnsQk;
  // Eight lanes have a chunk of 16 bytes of as many rows, which takes every bank once.
  const int32_t thread = ptx::thread_index() % 128, lane = thread % 32;
  const int32_t row = thread / 32 * 16 + half * 8 + lane % 8, chunk = lane / 8 * 2;
  const uint32_t first = queries + row * 128;
  const auto address = [&](int column, int i) {
    return first + column * Traits::kRows * 128 + ((chunk + i ^ lane) % 8 << 4);
  };
  uint32_t largest = 0;  // of the magnitudes' bits, which order as the numbers do
#pragma unroll
  for (int column = 0; column < Traits::kColumnsQk; ++column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 x = ptx::load_shared_16(address(column, i));
#pragma unroll
      for (int k = 0; k < 4; ++k) largest = ptx::max2(largest, (&x.x)[k] & 0x7fff7fffu);
    }
  }
  largest = max_of(largest & 0xffffu, largest >> 16);
  largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
  largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
  const FitFactor fitting(largest);
  const float factor = fitting.factor;
  if (lane < 8) ptx::store_shared(units + 4 * row, __float_as_uint(fitting.unit));
#pragma unroll 3
  for (int column = 0; column < Traits::kColumnsQk; ++column) {
    const auto fit = [&]<DType kTo>(float by) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint4 x = ptx::load_shared_16(address(column, i));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          uint32_t& pair = (&x.x)[k];
          pair = ptx::pack2<kTo>(ptx::unpack_low<DType::kBF16>(pair) * by,
                                 ptx::unpack_high<DType::kBF16>(pair) * by);
        }
        ptx::store_shared_16(address(column, i), x);
      }
    };
    if (Traits::kTailType == Traits::kType || column < kLatentColumns) {
      fit.template operator()<Traits::kType>(factor);
    } else {
      fit.template operator()<Traits::kTailType>(factor / Traits::kKeyUnit);
    }
  }
  ptx::fence_async_proxy();
}

}  // namespace flashbsr::sm90a
