// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// ALiBi (Press et al., 2022): adds slope[head] * (kv position - q position).
#pragma once

#include <flashbsr/variant/variant.h>

namespace flashbsr {

struct Alibi {
  const float* slopes = nullptr;  ///< [H_qo]; null: off

  FLASHBSR_FN bool active() const { return slopes != nullptr; }

  template <class M>
  FLASHBSR_FN typename M::Float apply(typename M::Float x, const LogitsAt<M>& at) const {
    return x + at.row_value * M::to_float(at.kv_position - at.q_position);
  }
};

/// The paper's slopes for `heads` heads: 2^(-8 i / n) for the first n = 2^floor(log2 heads) heads,
/// and for the rest the odd-numbered slopes of 2 n heads. `head` counts from 0.
FLASHBSR_FN float standard_alibi_slope(int32_t head, int32_t heads) {
  int32_t n = 1;
  while (n * 2 <= heads) n *= 2;
  const float exponent =
      head < n ? 8.0f * static_cast<float>(head + 1) / static_cast<float>(n)
               : 4.0f * static_cast<float>(2 * (head - n) + 1) / static_cast<float>(n);
  return exp2_of(-exponent);
}

}  // namespace flashbsr
