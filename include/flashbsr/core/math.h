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

FLASHBSR_FN constexpr float infinity() { return __builtin_inff(); }

}  // namespace flashbsr
