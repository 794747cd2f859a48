// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// FlashSigmoid: each value is weighed by a sigmoid of its logit, and nothing is normalised:
//
//   o_i = sum_j sigmoid(x_ij + bias) v_j,    x_ij = sm_scale q_i . k_j
//
// Ramapuram et al., arXiv:2409.04431, eq. 3; figure 5 of the FlashInfer paper, arXiv:2501.01005.
#pragma once

#include <flashbsr/variant/variant.h>

struct FlashSigmoid : flashbsr::VariantBase {
  static constexpr bool use_softmax = false;
  static constexpr bool weights_at_most_one = true;
  float bias;

  FLASHBSR_FN explicit FlashSigmoid(const flashbsr::Params& p) : bias(p.extras.number<float>(0)) {}

  /// M is the backend's: a logit is one float on a GPU and a vector on the CPU.
  template <class M>
  FLASHBSR_FN typename M::Float activation(typename M::Float x) const {
    return M::sigmoid(x + bias);
  }
};
