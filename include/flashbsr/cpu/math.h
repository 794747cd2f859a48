// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Vector exponentials for softmax and the variants' functions.
#pragma once

#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// 2^x for -126 <= x <= 127; below 1.2e-38 under that, and zero from -127 down. Relative error
/// 1.9e-7: a shorter polynomial would do for bf16 weights, but not for the LSE, and saves 1.5 % at
/// most. Exact at 0; NaN in, NaN out.
///
/// x = n + f with |f| <= 1/2; 2^f by a minimax polynomial with constant term 1; 2^n is n + 127 in
/// the exponent field. At the clamp, x = -127 makes that field 0 and 2^n = +0: masked logits (-inf)
/// become exact zeros without a select.
FLASHBSR_FN FloatV exp2_clamped(FloatV x) {
  x = max(splat(-127.0f), x);
  // 1.5 * 2^23 + 127: the sum holds round(x) + 127 in its low bits.
  const FloatV kMagic = splat(12583039.0f);
  const FloatV shifted = x + kMagic;
  const FloatV f = x - (shifted - kMagic);
  FloatV p = 0.00132647272f * f + 0.00967151281f;
  p = p * f + 0.0555073374f;
  p = p * f + 0.240222421f;
  p = p * f + 0.693146978f;
  p = p * f + 1.0f;
  return p * as_float(bits(shifted) << 23);
}

FLASHBSR_FN FloatV exp2(FloatV x) { return exp2_clamped(min(splat(127.0f), x)); }
FLASHBSR_FN FloatV exp(FloatV x) { return exp2(x * kLog2e); }

/// tanh by (e - 1) / (e + 1), e = exp(2x). Absolute error below 1.4e-7; saturates beyond |x| = 10.
FLASHBSR_FN FloatV tanh(FloatV x) {
  const FloatV e = exp2(min(splat(10.0f), max(splat(-10.0f), x)) * (2.0f * kLog2e));
  return (e - 1.0f) / (e + 1.0f);
}

FLASHBSR_FN FloatV sigmoid(FloatV x) { return 1.0f / (1.0f + exp2(x * -kLog2e)); }

/// The math policy that variants are instantiated with on the CPU: kLanes logits at a time.
struct VectorMath {
  using Float = FloatV;
  using Int = IntV;
  using Bool = IntV;  ///< all ones or all zeros per lane

  FLASHBSR_FN static Bool all() { return splat_int(-1); }
  FLASHBSR_FN static Float to_float(Int x) { return __builtin_convertvector(x, FloatV); }
  FLASHBSR_FN static Float select(Bool m, Float yes, Float no) { return cpu::select(m, yes, no); }
  FLASHBSR_FN static Float exp(Float x) { return cpu::exp(x); }
  FLASHBSR_FN static Float tanh(Float x) { return cpu::tanh(x); }
  FLASHBSR_FN static Float sigmoid(Float x) { return cpu::sigmoid(x); }

  /// Lane i: bit first + i of a little-endian bit string. Reads no byte beyond the one that holds
  /// bit first + count - 1.
  FLASHBSR_FN static Bool test_bits(const uint8_t* bits, int64_t first, int32_t count) {
    const int64_t byte = first >> 3;
    const int64_t last = (first + count - 1) >> 3;
    uint32_t window = 0;
    for (int64_t i = byte; i <= last; ++i) {
      window |= static_cast<uint32_t>(bits[i]) << (8 * (i - byte));
    }
    const UintV shifted = (UintV{} + (window >> (first & 7))) >> reinterpret_cast<UintV>(iota());
    return reinterpret_cast<IntV>(shifted & 1u) != 0;
  }
};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
