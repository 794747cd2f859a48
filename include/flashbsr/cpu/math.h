// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Vector exponentials for softmax and the variants' functions.
#pragma once

#include <flashbsr/cpu/gather.h>
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

/// Natural logarithm; relative error 1.2e-7. -inf at 0, NaN below. x = 2^e m with m from sqrt(1/2)
/// to sqrt(2); log(m) by the polynomial of Cephes' logf.
FLASHBSR_FN FloatV log(FloatV x) {
  // Subnormals are brought into the normal range first.
  const IntV tiny = x < 1.17549435e-38f;
  const IntV b = reinterpret_cast<IntV>(select(tiny, x * 8388608.0f, x));
  const IntV shift = (b - 0x3f3504f3) >> 23;
  const FloatV f = reinterpret_cast<FloatV>(b - (shift << 23)) - 1.0f;
  const FloatV e = __builtin_convertvector(shift - (tiny & 23), FloatV);
  FloatV p = 7.0376836292e-2f * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const FloatV z = f * f;
  // ln 2 in two parts, of which the first has few bits: e times it is exact.
  FloatV y = f * z * p + -2.12194440e-4f * e - 0.5f * z;
  y = f + y + 0.693359375f * e;
  const FloatV nan = splat(__builtin_nanf(""));
  y = select(x == 0.0f, splat(-infinity()), y);
  y = select(x == infinity(), x, y);
  return select(x >= 0.0f, y, nan);
}

/// Truncates: SSE2 has no instruction that rounds, and floats from 2^23 on are whole.
FLASHBSR_FN FloatV floor(FloatV x) {
  const FloatV whole = __builtin_convertvector(__builtin_convertvector(x, IntV), FloatV);
  const FloatV below = whole - select(whole > x, splat(1.0f), FloatV{});
  const FloatV size = as_float(bits(x) & 0x7fffffffu);
  return select(size < 8388608.0f, below, x);
}

/// Rounds to -inf, as Python's // does. Doubles hold every quotient of two int32 apart from the
/// integers next to it. Zero divisors do not trap; what they give is unspecified.
FLASHBSR_FN IntV floor_div(IntV a, IntV b) {
  using DoubleV = double __attribute__((vector_size(8 * kLanes)));
  const DoubleV q = __builtin_convertvector(a, DoubleV) / __builtin_convertvector(b, DoubleV);
  const IntV whole = __builtin_convertvector(q, IntV);
  const IntV rest = a - whole * b;
  return whole + ((rest != 0) & ((rest ^ b) < 0));  // true is -1
}

/// The math policy that variants are instantiated with on the CPU: kLanes logits at a time.
struct VectorMath {
  using Float = FloatV;
  using Int = IntV;
  using Bool = IntV;  ///< all ones or all zeros per lane

  FLASHBSR_FN static Bool all() { return splat_int(-1); }
  FLASHBSR_FN static Float splat(float x) { return cpu::splat(x); }
  FLASHBSR_FN static Int splat(int32_t x) { return splat_int(x); }
  FLASHBSR_FN static Bool splat(bool x) { return splat_int(x ? -1 : 0); }
  FLASHBSR_FN static Float to_float(Int x) { return __builtin_convertvector(x, FloatV); }
  FLASHBSR_FN static Int to_int(Float x) { return __builtin_convertvector(x, IntV); }
  FLASHBSR_FN static Bool logical_not(Bool x) { return ~x; }
  FLASHBSR_FN static Float select(Bool m, Float yes, Float no) { return cpu::select(m, yes, no); }
  FLASHBSR_FN static Int select(Bool m, Int yes, Int no) { return m ? yes : no; }
  FLASHBSR_FN static Float exp(Float x) { return cpu::exp(x); }
  FLASHBSR_FN static Float exp2(Float x) { return cpu::exp2(x); }
  FLASHBSR_FN static Float log(Float x) { return cpu::log(x); }
  FLASHBSR_FN static Float tanh(Float x) { return cpu::tanh(x); }
  FLASHBSR_FN static Float sigmoid(Float x) { return cpu::sigmoid(x); }
  FLASHBSR_FN static Float floor(Float x) { return cpu::floor(x); }
  FLASHBSR_FN static Float sqrt(Float x) {
    for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
  }
  FLASHBSR_FN static Float abs(Float x) { return as_float(bits(x) & 0x7fffffffu); }
  FLASHBSR_FN static Int abs(Int x) { return x < 0 ? -x : x; }
  /// NaN wherever one is NaN.
  FLASHBSR_FN static Float max(Float a, Float b) { return cpu::select(a == a, cpu::max(a, b), a); }
  FLASHBSR_FN static Float min(Float a, Float b) { return cpu::select(a == a, cpu::min(a, b), a); }
  FLASHBSR_FN static Int max(Int a, Int b) { return a < b ? b : a; }
  FLASHBSR_FN static Int min(Int a, Int b) { return b < a ? b : a; }
  FLASHBSR_FN static Int floor_div(Int a, Int b) { return cpu::floor_div(a, b); }

  /// Elements of a tensor at indices that are one for all lanes (int32_t) or one for each (Int).
  template <class T, int kRank, class... I>
  FLASHBSR_FN static auto gather(const ExtraTensor<T, kRank>& x, I... index) {
    static_assert(sizeof...(I) == kRank, "one index for each dimension");
    if constexpr (!(std::is_same_v<I, Int> || ...)) {
      return splat(x(index...));
    } else {
      return cpu::gather(x, index...);
    }
  }

  /// Lane i: bit first + i of a little-endian bit string; the first `kept` < count lanes are true.
  /// Reads no byte but those that hold bits first + kept (or first) to first + count - 1.
  FLASHBSR_FN static Bool test_bits(const uint8_t* bits, int64_t first, int32_t count,
                                    int32_t kept = 0) {
    kept = max_of(kept, 0);
    const int64_t begin = first + kept;
    const int64_t byte = begin >> 3;
    const int64_t last = (first + count - 1) >> 3;
    uint32_t window = 0;
    for (int64_t i = byte; i <= last; ++i) {
      window |= static_cast<uint32_t>(bits[i]) << (8 * (i - byte));
    }
    window = window >> (begin & 7) << kept | ((1u << kept) - 1);
    const UintV shifted = (UintV{} + window) >> reinterpret_cast<UintV>(iota());
    return reinterpret_cast<IntV>(shifted & 1u) != 0;
  }
};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
