// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a streaming warp accumulates over an item.
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/kernel/decode/traits.h>

namespace flashbsr {

/// What weights are multiplied by beside int4 codes, which are the least numbers of bf16: a product
/// of both is a normal float, for scales of V from 2^-60 to 2^60.
inline constexpr float kLeastWeightUnit = 0x1p56f;

/// What zero points add to O, the same for all dims of a chunk: o[i][n][2 c + e] to element e of
/// chunk 2 i + c (packed.h).
template <class Traits, bool = Traits::kZeroPoints>
struct DecodeZeros {};
template <class Traits>
struct DecodeZeros<Traits, true> {
  float o[Traits::kHeadDim / 64][Traits::kRows / 8][4];
};

/// Softmax state of the rows of one lane.
template <class Traits>
struct DecodeState {
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kTiles = Traits::kRows / 8;

  float o[kSteps][kTiles][4];
  float max[kTiles][2];  ///< base 2
  float sum[kTiles][2];  ///< this lane's part
  DecodeZeros<Traits> zeros;

  FLASHBSR_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0;
      max[n][0] = max[n][1] = -infinity();
      sum[n][0] = sum[n][1] = 0;
      if constexpr (Traits::kZeroPoints) {
#pragma unroll
        for (auto& group : zeros.o) group[n][0] = group[n][1] = group[n][2] = group[n][3] = 0;
      }
    }
  }

  /// Makes what zero points leave of o[j][n][i] and [2 + i], over Traits::kValueUnit. Codes were
  /// the least numbers of bf16, and those of [2 + i] 16 times that.
  FLASHBSR_DEVICE void take_zeros_off(int j, int n, int i) {
    constexpr float kUnit = 0x1p127f / kLeastWeightUnit;  // 2^133 over that and kValueUnit
    static_assert(Traits::kValueUnit == 64.0f);
    const float zero = zeros.o[j / 4][n][2 * (j / 2 % 2) + i];
    o[j][n][i] = (o[j][n][i] - zero) * kUnit;
    o[j][n][2 + i] = (o[j][n][2 + i] * 0.0625f - zero) * kUnit;
  }

  /// Dim of o[j][n][0] and [1]; [2] and [3] are at dim + kPairStep.
  static constexpr int kPairStep = dtype_size(Traits::kKv) == 1 ? 1 : 8;
  FLASHBSR_DEVICE static int value_dim(int j, int g) {
    if constexpr (Traits::kPacked) return 32 * (j / 2) + 4 * g + 2 * (j % 2);
    return 16 * j + (Traits::kBytes ? 2 * g : g);
  }
};

/// What weights without softmax are multiplied by: fp16 ones that are at most one are kept larger,
/// so that small ones are not lost as subnormals.
template <class Traits, class Variant>
inline constexpr float kWeightUnit =
    !Variant::use_softmax && Variant::weights_at_most_one && Traits::kCompute == DType::kF16
        ? 32768.0f
        : 1.0f;

}  // namespace flashbsr
