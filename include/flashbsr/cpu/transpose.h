// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Transposes a square of kLanes x kLanes words in registers.
#pragma once

#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Interleaves one half of two vectors: kFirst = 0: a0 b0 a1 b1 ..., kFirst = kLanes / 2: the
/// upper.
template <int kFirst>
FLASHBSR_FN FloatV zip(FloatV a, FloatV b) {
  return [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    return __builtin_shufflevector(a, b, (kFirst + I / 2 + I % 2 * kLanes)...);
  }(LaneSequence{});
}

/// Word `offset + i` of row j goes to out[i * ldo + j], for i, j < kLanes. Each round zips row i
/// with row i + half, which rotates the (row, lane) index by one bit; log2(kLanes) rounds swap the
/// two.
FLASHBSR_FN void transpose_words(const char* const* rows, int64_t offset, float* out, int64_t ldo) {
  FloatV r[kLanes];
#pragma GCC unroll 16
  for (int j = 0; j < kLanes; ++j) r[j] = load(rows[j] + offset * 4);
  constexpr int kHalf = kLanes / 2;
#pragma GCC unroll 4
  for (int round = 1; round < kLanes; round *= 2) {
    FloatV t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      t[2 * i] = zip<0>(r[i], r[i + kHalf]);
      t[2 * i + 1] = zip<kHalf>(r[i], r[i + kHalf]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) r[i] = t[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(out + i * ldo, r[i]);
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
