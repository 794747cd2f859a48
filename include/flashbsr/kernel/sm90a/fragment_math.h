// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The math policy that variants are instantiated with on Hopper: a logit type that holds all of a
// thread's columns of one row, columns 8 i and 8 i + 1 for i < kGroups. Run-time switches of a
// variant are taken once per row of a tile, and a mask's bits are read as words.
#pragma once

#include <flashbsr/ptx/math.h>

namespace flashbsr::sm90a {

/// A row's logits.
template <int kGroups>
struct RowLogits {
  float x[2 * kGroups];

  template <class F>
  FLASHBSR_DEVICE RowLogits each(const F& f) const {
    RowLogits r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = f(x[i]);
    return r;
  }
  template <class F>
  FLASHBSR_DEVICE RowLogits with(const RowLogits& y, const F& f) const {
    RowLogits r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = f(x[i], y.x[i]);
    return r;
  }

  FLASHBSR_DEVICE friend RowLogits operator+(const RowLogits& a, const RowLogits& b) {
    return a.with(b, [](float x, float y) { return x + y; });
  }
  FLASHBSR_DEVICE friend RowLogits operator-(const RowLogits& a, const RowLogits& b) {
    return a.with(b, [](float x, float y) { return x - y; });
  }
  FLASHBSR_DEVICE friend RowLogits operator*(const RowLogits& a, const RowLogits& b) {
    return a.with(b, [](float x, float y) { return x * y; });
  }
  FLASHBSR_DEVICE friend RowLogits operator+(const RowLogits& a, float b) {
    return a.each([=](float x) { return x + b; });
  }
  FLASHBSR_DEVICE friend RowLogits operator+(float a, const RowLogits& b) { return b + a; }
  FLASHBSR_DEVICE friend RowLogits operator-(const RowLogits& a, float b) { return a + -b; }
  FLASHBSR_DEVICE friend RowLogits operator*(const RowLogits& a, float b) {
    return a.each([=](float x) { return x * b; });
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
};

template <int kGroups>
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
    const float first = static_cast<float>(p.first);
    Float r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = first + static_cast<float>(i / 2 * 8 + i % 2);
    return r;
  }
  FLASHBSR_DEVICE static Float select(const Bool& m, const Float& yes, const Float& no) {
    Float r;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) r.x[i] = m.at(i) ? yes.x[i] : no.x[i];
    return r;
  }
  FLASHBSR_DEVICE static Float exp(const Float& x) { return x.each(&ThreadMath::exp); }
  /// By a polynomial where all of the warp's are small, as a soft-cap's are as a rule (relative
  /// error 8e-8 below 0.6): two instructions of the slowest unit less for each.
  FLASHBSR_DEVICE static Float tanh(const Float& x) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) largest = ptx::max(largest, fabsf(x.x[i]));
    if (!__all_sync(0xffffffffu, largest < 0.6f)) return x.each(&ThreadMath::tanh);
    return x.each([](float y) {
      const float u = y * y;
      float p = __fmaf_rn(u, 0.015475423f, -0.052101478f);
      p = __fmaf_rn(u, p, 0.13310173f);
      p = __fmaf_rn(u, p, -0.33332309f);
      return y * __fmaf_rn(u, p, 0.99999994f);
    });
  }
  FLASHBSR_DEVICE static Float sigmoid(const Float& x) { return x.each(&ThreadMath::sigmoid); }

  /// Reads up to 8 kGroups bits from `first` on, and up to 31 around them: the memory of masks has
  /// room for that.
  FLASHBSR_DEVICE static Bool test_bits(const uint8_t* bits, int64_t first, int32_t) {
    const uint64_t bit = reinterpret_cast<uint64_t>(bits) * 8 + static_cast<uint64_t>(first);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(bit / 32 * 4);
    const uint32_t shift = static_cast<uint32_t>(bit) % 32;
    Bool r;
    uint32_t low = words[0];
#pragma unroll
    for (int i = 0; i < Bool::kWords; ++i) {
      const uint32_t high = words[i + 1];
      r.word[i] = __funnelshift_r(low, high, shift);
      low = high;
    }
    return r;
  }
};

}  // namespace flashbsr::sm90a
