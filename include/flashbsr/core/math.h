// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Integer helpers and constants, host and device.
#pragma once

#include <flashbsr/config.h>

namespace flashbsr {

inline constexpr float kLog2e = 1.4426950408889634f;  // softmax runs in base 2
inline constexpr float kLn2 = 0.6931471805599453f;

template <class T>
FLASHBSR_FN constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
FLASHBSR_FN constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

template <class T>
FLASHBSR_FN constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
FLASHBSR_FN constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

/// Rounds to -inf, as Python's // does. A zero divisor does not trap; what it gives is unspecified.
FLASHBSR_FN int32_t floor_div(int32_t a, int32_t b) {
  if (b == 0) return 0;
  const int64_t q = int64_t{a} / b;
  return static_cast<int32_t>(q - (int64_t{a} % b != 0 && (a < 0) != (b < 0)));
}

FLASHBSR_FN constexpr float infinity() { return __builtin_bit_cast(float, 0x7f800000u); }
FLASHBSR_FN constexpr float not_a_number() { return __builtin_bit_cast(float, 0x7fc00000u); }

/// 2^x and log2(x) in full precision. Compilers of the host know them without a header, CUDA's have
/// them as functions.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
FLASHBSR_FN float exp2_of(float x) { return ::exp2f(x); }
FLASHBSR_FN float log2_of(float x) { return ::log2f(x); }
FLASHBSR_FN float sqrt_of(float x) { return ::sqrtf(x); }
FLASHBSR_FN float floor_of(float x) { return ::floorf(x); }
#else
FLASHBSR_FN float exp2_of(float x) { return __builtin_exp2f(x); }
FLASHBSR_FN float log2_of(float x) { return __builtin_log2f(x); }
FLASHBSR_FN float sqrt_of(float x) { return __builtin_sqrtf(x); }
FLASHBSR_FN float floor_of(float x) { return __builtin_floorf(x); }
#endif

}  // namespace flashbsr
