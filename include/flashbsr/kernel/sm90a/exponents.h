// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From a row of S to exponents of 2 by as few instructions as there are, where nothing is masked:
// weights are 2^x without a look at the row's maximum. Scores::exponents() says when.
#pragma once

#include <flashbsr/kernel/sm90a/fragment_math.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::sm90a {

/// What a row's S is multiplied by and added to. All in base 2.
struct RowLine {
  float factor;    ///< of S
  float base;      ///< minus the reference
  float slope;     ///< of ALiBi, per KV position
  int32_t offset;  ///< of the thread's first column, from the query's position
};

/// Variants of which the main loop tries tiles without maxima.
template <class Variant>
struct Exponents {
  static constexpr bool kExist = false;
};

/// Where no hook changes logits.
template <class Variant>
struct PlainExponents {
  static constexpr bool kExist = true;

  FLASHBSR_DEVICE static bool pay(const Variant& v) { return !v.transforms_logits(); }
  FLASHBSR_DEVICE static float most(const Variant&, float, float, float fits) { return fits; }
  template <class At>
  FLASHBSR_DEVICE static void apply(const Variant&, const RowLine& row, int columns, const At& at) {
#pragma unroll
    for (int i = 0; i < columns; ++i) at(i) = __fmaf_rn(at(i), row.factor, row.base);
  }
};
template <>
struct Exponents<Plain> : PlainExponents<Plain> {};
/// Masks, and RoPE: of tiles that a mask keeps whole.
template <>
struct Exponents<Standard> : PlainExponents<Standard> {};

template <>
struct Exponents<WithAlibi> {
  static constexpr bool kExist = true;

  FLASHBSR_DEVICE static bool pay(const WithAlibi&) { return true; }
  FLASHBSR_DEVICE static float most(const WithAlibi&, float, float, float fits) { return fits; }
  template <class At>
  FLASHBSR_DEVICE static void apply(const WithAlibi&, const RowLine& row, int columns,
                                    const At& at) {
    const float start = __fmaf_rn(row.slope, static_cast<float>(row.offset), row.base);
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const float column = static_cast<float>(i / 2 * 8 + i % 2);
      at(i) = __fmaf_rn(at(i), row.factor, __fmaf_rn(row.slope, column, start));
    }
  }
};

/// tanh(y) as y times a polynomial in y^2, with a relative error of 7e-6 at most up to y = 1, which
/// grows everywhere. Beyond 1 weights are wrong, and must not count: above it a row's sum says so,
/// as it does where weights outgrow their type; below -1 they are under 2^-23, which is asked of
/// the row's reference.
template <>
struct Exponents<SoftCapped> {
  static constexpr bool kExist = true;
  static constexpr float kTanhOf1 = 0.76159f;
  static constexpr float kNegligible = 23.0f;

  /// With small caps references are seldom so high.
  FLASHBSR_DEVICE static bool pay(const SoftCapped& v) { return end(v) >= kNegligible - 3.0f; }
  FLASHBSR_DEVICE static float most(const SoftCapped& v, float reference, float shift, float fits) {
    if (end(v) + reference < kNegligible) return 0.0f;
    return ptx::min(fits, ptx::exp2(end(v) - reference + shift));
  }
  template <class At>
  FLASHBSR_DEVICE static void apply(const SoftCapped& v, const RowLine& row, int columns,
                                    const At& at) {
    constexpr float kTanh[5] = {0.99999311f, -0.33298119f, 0.13036971f, -0.044819321f,
                                0.0090370876f};
    const float in_caps = row.factor * (1.0f / (v.soft_cap.cap * kLog2e));
    float power = row.factor, c[5];
#pragma unroll
    for (int k = 0; k < 5; ++k, power *= in_caps * in_caps) c[k] = kTanh[k] * power;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const float x = at(i), u = x * x;
      float p = __fmaf_rn(u, c[4], c[3]);
      p = __fmaf_rn(u, p, c[2]);
      p = __fmaf_rn(u, p, c[1]);
      at(i) = __fmaf_rn(x, __fmaf_rn(u, p, c[0]), row.base);
    }
  }

 private:
  /// The logit in base 2 up to which the polynomial serves.
  FLASHBSR_DEVICE static float end(const SoftCapped& v) {
    return v.soft_cap.cap * (kTanhOf1 * kLog2e);
  }
};

}  // namespace flashbsr::sm90a
