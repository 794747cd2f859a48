// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Fast functions of one float (PTX ISA, "Floating Point Instructions"), and the math policy that
// variants are instantiated with on a GPU: one logit per thread.
#pragma once

#include <flashbsr/core/extras.h>

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

/// The larger of each half of two words of 16-bit elements, or NaN if one is; sm_80 and later.
template <DType kT>
FLASHBSR_DEVICE uint32_t max_or_nan_pairs(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (kT == DType::kBF16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

/// The smaller of each half, or NaN; sm_80 and later.
template <DType kT>
FLASHBSR_DEVICE uint32_t min_or_nan_pairs(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (kT == DType::kBF16) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

/// An element of a variant's tensor. One instruction for float16, which core/dtype.h widens by its
/// bits.
template <class T>
FLASHBSR_DEVICE auto element_value(T x) {
  return flashbsr::detail::element_value(x);
}
FLASHBSR_DEVICE float element_value(Half x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
}

}  // namespace flashbsr::ptx

namespace flashbsr {

struct ThreadMath {
  using Float = float;
  using Int = int32_t;
  using Bool = bool;

  FLASHBSR_DEVICE static Bool all() { return true; }
  template <class T>
  FLASHBSR_DEVICE static T splat(T x) {
    return x;
  }
  FLASHBSR_DEVICE static Float to_float(Int x) { return static_cast<float>(x); }
  FLASHBSR_DEVICE static Int to_int(Float x) { return static_cast<int32_t>(x); }
  FLASHBSR_DEVICE static Bool logical_not(Bool x) { return !x; }
  FLASHBSR_DEVICE static Float select(Bool m, Float yes, Float no) { return m ? yes : no; }
  FLASHBSR_DEVICE static Int select(Bool m, Int yes, Int no) { return m ? yes : no; }
  FLASHBSR_DEVICE static Float exp(Float x) { return ptx::exp2(x * kLog2e); }
  /// (1 - e) / (1 + e) with e = e^-2|x|: absolute error 1e-7. 1 - 2 / (e^2x + 1) has two
  /// instructions less and 2.3e-7, tanh.approx one and 5e-4, too much times a cap.
  FLASHBSR_DEVICE static Float tanh(Float x) {
    const float e = ptx::exp2(fabsf(x) * (-2.0f * kLog2e));
    return copysignf((1.0f - e) * ptx::reciprocal(1.0f + e), x);
  }
  FLASHBSR_DEVICE static Float sigmoid(Float x) {
    return ptx::reciprocal(1.0f + ptx::exp2(x * -kLog2e));
  }
  FLASHBSR_DEVICE static Float exp2(Float x) { return ptx::exp2(x); }
  FLASHBSR_DEVICE static Float log(Float x) { return logf(x); }
  FLASHBSR_DEVICE static Float floor(Float x) { return floorf(x); }
  FLASHBSR_DEVICE static Float sqrt(Float x) { return sqrtf(x); }
  FLASHBSR_DEVICE static Float abs(Float x) { return fabsf(x); }
  FLASHBSR_DEVICE static Int abs(Int x) { return x < 0 ? -x : x; }
  /// NaN wherever one is NaN.
  FLASHBSR_DEVICE static Float max(Float a, Float b) { return a != a ? a : b < a ? a : b; }
  FLASHBSR_DEVICE static Float min(Float a, Float b) { return a != a ? a : a < b ? a : b; }
  FLASHBSR_DEVICE static Int max(Int a, Int b) { return max_of(a, b); }
  FLASHBSR_DEVICE static Int min(Int a, Int b) { return min_of(a, b); }
  FLASHBSR_DEVICE static Int floor_div(Int a, Int b) { return flashbsr::floor_div(a, b); }
  template <class T, int kRank, class... I>
  FLASHBSR_DEVICE static auto gather(const ExtraTensor<T, kRank>& x, I... index) {
    return ptx::element_value(x.stored(index...));
  }
  /// One lane, which callers do not ask for if it is kept.
  FLASHBSR_DEVICE static Bool test_bits(const uint8_t* bits, int64_t first, int32_t, int32_t = 0) {
    return bits[first >> 3] >> (first & 7) & 1;
  }
};

}  // namespace flashbsr
