// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The library's own variants as one instance of the CPU's kernels.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::cpu {

/// Softmax or sigmoid, by the activation of the run. It is asked once for each row of a tile, and
/// an instance for each would double a SIMD level's code and the time it compiles (17 s, not 9).
struct BuiltIn : Sigmoid {
  using Sigmoid::Sigmoid;
};

/// Whether a run has a softmax. A caller's variant says so by itself.
template <class Variant>
constexpr bool has_softmax(Activation activation) {
  if constexpr (detail::kSame<Variant, BuiltIn>) {
    return activation == Activation::kSoftmax;
  } else {
    return Variant::use_softmax;
  }
}

}  // namespace flashbsr::cpu
