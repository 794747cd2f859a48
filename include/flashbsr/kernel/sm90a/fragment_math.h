// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The math policy that variants are instantiated with on Hopper: a logit type that holds all of a
// thread's columns of one row, columns 8 i and 8 i + 1 for i < kGroups. Run-time switches of a
// variant are taken once per row of a tile, and a mask's bits are read as words.
#pragma once

#include <flashbsr/ptx/math.h>

namespace flashbsr::sm90a {

/// A row's logits: x * factor + offset. Scalars are multiplied and added to these two, once for the
/// row, until the values are asked for.
template <int kGroups>
struct RowLogits {
  static constexpr int kCount = 2 * kGroups;
  float x[kCount];
  float factor = 1.0f;
  float offset = -0.0f;  ///< which added to anything changes nothing, and costs nothing

  FLASHBSR_DEVICE float value(int i) const { return x[i] * factor + offset; }

  template <class F>
  FLASHBSR_DEVICE RowLogits each(const F& f) const {
    RowLogits r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = f(value(i));
    return r;
  }
  template <class F>
  FLASHBSR_DEVICE RowLogits with(const RowLogits& y, const F& f) const {
    RowLogits r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = f(value(i), y.value(i));
    return r;
  }

  FLASHBSR_DEVICE friend RowLogits operator+(const RowLogits& a, const RowLogits& b) {
    RowLogits r;
    const float offset = a.offset + b.offset;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      r.x[i] = a.x[i] * a.factor + (b.x[i] * b.factor + offset);
    }
    return r;
  }
  FLASHBSR_DEVICE friend RowLogits operator-(const RowLogits& a, const RowLogits& b) {
    return a + b * -1.0f;
  }
  FLASHBSR_DEVICE friend RowLogits operator*(const RowLogits& a, const RowLogits& b) {
    return a.with(b, [](float x, float y) { return x * y; });
  }
  FLASHBSR_DEVICE friend RowLogits operator+(RowLogits a, float b) {
    a.offset += b;
    return a;
  }
  FLASHBSR_DEVICE friend RowLogits operator+(float a, const RowLogits& b) { return b + a; }
  FLASHBSR_DEVICE friend RowLogits operator-(const RowLogits& a, float b) { return a + -b; }
  FLASHBSR_DEVICE friend RowLogits operator*(RowLogits a, float b) {
    a.factor *= b;
    a.offset *= b;
    return a;
  }
  FLASHBSR_DEVICE friend RowLogits operator*(float a, const RowLogits& b) { return b * a; }
};

/// The KV positions of a row's logits, by the first.
struct RowPositions {
  int32_t first;

  FLASHBSR_DEVICE friend RowPositions operator+(RowPositions a, int32_t b) { return {a.first + b}; }
  FLASHBSR_DEVICE friend RowPositions operator-(RowPositions a, int32_t b) { return {a.first - b}; }
};

/// A bit per column of a tile, of which a thread uses 8 i and 8 i + 1.
template <int kGroups>
struct RowBits {
  static constexpr int kWords = (kGroups + 3) / 4;
  uint32_t word[kWords];

  FLASHBSR_DEVICE bool at(int i) const { return word[i / 8] >> (i / 2 % 4 * 8 + i % 2) & 1; }
  /// Whether all that the thread uses are set.
  FLASHBSR_DEVICE bool all() const {
    uint32_t missing = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int groups = kGroups - 4 * i;
      missing |= ~word[i] & (groups >= 4 ? 0x03030303u : 0x03030303u >> 8 * (4 - groups));
    }
    return missing == 0;
  }
  /// Sets the bits of the first `count` columns.
  FLASHBSR_DEVICE void set_first(int32_t count) {
    if (count <= 0) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int32_t ones = count - 32 * i;
      if (ones > 0) word[i] |= ones < 32 ? (1u << ones) - 1 : 0xffffffffu;
    }
  }
};

/// @tparam kShortTanh  where soft-cap is all there is
/// @tparam kShift      log2 of what weights without softmax will be multiplied by
template <int kGroups, bool kShortTanh = false, int kShift = 0>
struct FragmentMath {
  using Float = RowLogits<kGroups>;
  using Int = RowPositions;
  using Bool = RowBits<kGroups>;

  FLASHBSR_DEVICE static Bool all() {
    Bool r;
#pragma unroll
    for (int i = 0; i < Bool::kWords; ++i) r.word[i] = 0xffffffffu;
    return r;
  }
  FLASHBSR_DEVICE static Float to_float(Int p) {
    Float r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = static_cast<float>(i / 2 * 8 + i % 2);
    r.offset = static_cast<float>(p.first);
    return r;
  }
  FLASHBSR_DEVICE static Float select(const Bool& m, const Float& yes, const Float& no) {
    Float r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = m.at(i) ? yes.value(i) : no.value(i);
    return r;
  }
  FLASHBSR_DEVICE static Float exp(const Float& x) { return x.each(&ThreadMath::exp); }
  /// If short, 1 - 2 / (1 + e^2x), and its last step becomes the cap's: five instructions in place
  /// of nine, and no registers that spill. Absolute error 5e-7, of a logit capped at 50 2.4e-5.
  FLASHBSR_DEVICE static Float tanh(const Float& x) {
    if constexpr (!kShortTanh) return x.each(&ThreadMath::tanh);
    const auto part = [](float y) { return ptx::reciprocal(1.0f + ptx::exp2(y)); };
    return (x * (2.0f * kLog2e)).each(part) * -2.0f + 1.0f;
  }
  /// 1 / (1 + 2^y), whose unit is in its exponents: 2^kShift of it is 1 / (2^-kShift + 2^(y -
  /// kShift)). One reciprocal for two would need a look at the largest, for products that are not
  /// finite: slower (docs/kernels/sm90a.md).
  FLASHBSR_DEVICE static Float sigmoid(const Float& x) {
    constexpr float kPart = 1.0f / (1 << kShift);
    const Float y = x * -kLog2e + -static_cast<float>(kShift);
    Float r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      const float d = kPart + ptx::exp2(y.value(i));
      const bool by_fma = kShift == 0 && i % kEvery == kEvery - 1;
      r.x[i] = by_fma ? unit_reciprocal(d) : ptx::reciprocal(d);
    }
    return r * kPart;
  }
  /// Of how many reciprocals one goes to the FMA units: the slow unit, which has the exponentials
  /// too, is as busy as the tensor cores otherwise. +7 % over plain instead of +17.
  static constexpr int kEvery = 2;
  /// 1 / d of d >= 1 by other units than ptx::reciprocal, for weights that are rounded to bf16:
  /// relative error 1.3e-3. A guess by the exponent, d r within 5 % of 1, and a step of Newton.
  /// Infinity, which the guess makes negative, and what is next to it come out as 0.
  FLASHBSR_DEVICE static float unit_reciprocal(float d) {
    const float r = __int_as_float(0x7EF33409 - __float_as_int(d));
    return __saturatef(r * __fmaf_rn(-d, r, 2.0012813f));
  }

  /// Reads up to 8 kGroups bits from `first` on, and up to 31 around them: the memory of masks has
  /// room for that. The first `kept` columns are true whatever is read.
  FLASHBSR_DEVICE static Bool test_bits(const uint8_t* bits, int64_t first, int32_t,
                                        int32_t kept = 0) {
    const uint64_t bit = reinterpret_cast<uint64_t>(bits) * 8 + static_cast<uint64_t>(first);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(bit / 32 * 4);
    const uint32_t shift = static_cast<uint32_t>(bit) % 32;
    Bool r;
    uint32_t low = __ldg(words);
#pragma unroll
    for (int i = 0; i < Bool::kWords; ++i) {
      const uint32_t high = __ldg(words + i + 1);
      r.word[i] = __funnelshift_r(low, high, shift);
      low = high;
    }
    r.set_first(kept);
    return r;
  }
};

}  // namespace flashbsr::sm90a
