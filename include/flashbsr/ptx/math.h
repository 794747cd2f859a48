// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Fast functions of one float (PTX ISA, "Floating Point Instructions"), and the math policy that
// variants are instantiated with on a GPU: one logit per thread.
#pragma once

#include <flashbsr/core/math.h>

namespace flashbsr::ptx {

/// 2^x; relative error 2^-22. exp2(-inf) = 0.
FLASHBSR_DEVICE float exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// log2(x); absolute error 2^-22. log2(0) = -inf.
FLASHBSR_DEVICE float log2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// 1 / x; one ulp.
FLASHBSR_DEVICE float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// The larger; a number beats NaN (max.f32).
FLASHBSR_DEVICE float max(float a, float b) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

/// The smaller; a number beats NaN.
FLASHBSR_DEVICE float min(float a, float b) {
  float r;
  asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

}  // namespace flashbsr::ptx

namespace flashbsr {

struct ThreadMath {
  using Float = float;
  using Int = int32_t;
  using Bool = bool;

  FLASHBSR_DEVICE static Bool all() { return true; }
  FLASHBSR_DEVICE static Float to_float(Int x) { return static_cast<float>(x); }
  FLASHBSR_DEVICE static Float select(Bool m, Float yes, Float no) { return m ? yes : no; }
  FLASHBSR_DEVICE static Float exp(Float x) { return ptx::exp2(x * kLog2e); }
  /// 1 - 2 / (e^2x + 1): absolute error 2e-7, where tanh.approx has 5e-4, too much times a cap.
  FLASHBSR_DEVICE static Float tanh(Float x) {
    return 1.0f - 2.0f * ptx::reciprocal(ptx::exp2(x * (2.0f * kLog2e)) + 1.0f);
  }
  FLASHBSR_DEVICE static Float sigmoid(Float x) {
    return ptx::reciprocal(1.0f + ptx::exp2(x * -kLog2e));
  }
  FLASHBSR_DEVICE static Bool test_bits(const uint8_t* bits, int64_t first, int32_t) {
    return bits[first >> 3] >> (first & 7) & 1;
  }
};

}  // namespace flashbsr
