// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Logits soft-cap (Gemma 2, 2024, section 2): cap * tanh(x / cap).
#pragma once

#include <flashbsr/config.h>

namespace flashbsr {

struct SoftCap {
  float cap = 0;  ///< 0: off

  FLASHBSR_FN bool active() const { return cap > 0; }

  template <class M>
  FLASHBSR_FN typename M::Float apply(typename M::Float x) const {
    return cap * M::tanh(x * (1.0f / cap));
  }
};

}  // namespace flashbsr
