// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention states and the operator that contracts them (FlashInfer, MLSys 2025, section 2.2):
//
//   LSE = log(exp(LSE_a) + exp(LSE_b))
//   O   = (exp(LSE_a) O_a + exp(LSE_b) O_b) / exp(LSE)
//
// The operator is associative and commutative; (0, -inf) is its identity. Here in base 2: the LSE
// of a state is log2 of its sum, as the kernels keep it. Natural logs are converted at the border.
#pragma once

#include <flashbsr/core/math.h>

namespace flashbsr {

/// How two states mix: O = weight_a * O_a + weight_b * O_b.
struct MergeWeights {
  float weight_a;
  float weight_b;
  float lse;
};

FLASHBSR_FN MergeWeights merge_weights(float lse_a, float lse_b) {
  // Both empty: the identity again, not NaN from inf - inf.
  if (lse_a == -infinity() && lse_b == -infinity()) return {0.0f, 0.0f, -infinity()};
  const float top = max_of(lse_a, lse_b);
  // A NaN side must not vanish: max_of keeps lse_a when lse_b is NaN, the exponentials carry it on.
  const float a = exp2_of(lse_a - top);
  const float b = exp2_of(lse_b - top);
  const float sum = a + b;
  return {a / sum, b / sum, top + log2_of(sum)};
}

/// The factor by which a learned sink (a logit that only joins the denominator) shrinks O, and the
/// LSE with it. `sink` is a natural logit, `lse` base 2.
FLASHBSR_FN MergeWeights sink_weights(float lse, float sink) {
  return merge_weights(lse, sink * kLog2e);
}

}  // namespace flashbsr
