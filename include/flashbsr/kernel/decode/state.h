// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a streaming warp accumulates over an item.
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/kernel/decode/traits.h>

namespace flashbsr {

/// Softmax state of the rows of one lane.
template <class Traits>
struct DecodeState {
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kTiles = Traits::kRows / 8;

  float o[kSteps][kTiles][4];
  float max[kTiles][2];  ///< base 2
  float sum[kTiles][2];  ///< this lane's part

  FLASHBSR_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0;
      max[n][0] = max[n][1] = -infinity();
      sum[n][0] = sum[n][1] = 0;
    }
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
