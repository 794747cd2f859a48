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
/// @tparam kCoarse  weights are rounded to bf16: exponents may be off by as much as that
template <class Variant, bool kCoarse = false>
struct Exponents {
  static constexpr bool kExist = false;
  /// Whole tiles with maxima at an item's beginning, after those that are cut.
  static constexpr int kLongTiles = 0;
  /// And behind the first that had to be done again, then twice as many.
  static constexpr int kPatience = 4;
};

/// Where no hook changes logits.
template <class Variant>
struct PlainExponents {
  static constexpr bool kExist = true;
  static constexpr int kLongTiles = 0;
  static constexpr int kPatience = 4;

  FLASHBSR_DEVICE static bool pay(const Variant& v) { return !v.transforms_logits(); }
  FLASHBSR_DEVICE static float most(const Variant&, float, float, float fits) { return fits; }
  template <class At>
  FLASHBSR_DEVICE static void apply(const Variant&, const RowLine& row, int columns, const At& at) {
#pragma unroll
    for (int i = 0; i < columns; ++i) at(i) = __fmaf_rn(at(i), row.factor, row.base);
  }
};
template <bool kCoarse>
struct Exponents<Plain, kCoarse> : PlainExponents<Plain> {};
/// Masks, and RoPE: of tiles that a mask keeps whole.
template <bool kCoarse>
struct Exponents<Standard, kCoarse> : PlainExponents<Standard> {};

template <bool kCoarse>
struct Exponents<WithAlibi, kCoarse> {
  static constexpr bool kExist = true;
  static constexpr int kLongTiles = 0;
  static constexpr int kPatience = 4;

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

/// tanh(y) as y times a polynomial in y^2, which grows everywhere. Beyond `end` weights are wrong,
/// and must not count: above it a row's sum says so, as it does where weights outgrow their type;
/// below -end they are under 2^-23, which is asked of the row's reference.
template <int kCount>
struct TanhPolynomial {
  static constexpr int kTerms = kCount;
  float term[kCount];
  float of_end;  ///< tanh(end)
};
/// Up to 1, relative error 7e-6.
template <bool kCoarse>
inline constexpr auto kTanh = TanhPolynomial<5>{
    {0.99999311f, -0.33298119f, 0.13036971f, -0.044819321f, 0.0090370876f}, 0.76159f};
/// Up to 0.75, absolute error 7e-5: with a cap of 50 a weight is off by 0.0035, where rounding it
/// to bf16 is 0.002, and 80 of a step's 350 instructions are saved. Up to 0.6 nearly all tiles are
/// done again, up to 0.7 3 %: logits of Gemma 2, standard deviation 8, reach 35.
template <>
inline constexpr auto kTanh<true> =
    TanhPolynomial<3>{{0.99932212f, -0.32304698f, 0.0927636f}, 0.63514f};

template <bool kCoarse>
struct Exponents<SoftCapped, kCoarse> {
  static constexpr bool kExist = true;
  static constexpr int kLongTiles = 1;  ///< logits that are to be capped are large
  static constexpr int kPatience = 1;   ///< single ones are beyond the polynomial, here and there
  static constexpr float kNegligible = 23.0f;

  /// With small caps references are seldom so high.
  FLASHBSR_DEVICE static bool pay(const SoftCapped& v) { return end(v) >= kNegligible - 3.0f; }
  FLASHBSR_DEVICE static float most(const SoftCapped& v, float base, float shift, float fits) {
    if (base > end(v) - kNegligible + shift) return 0.0f;
    return ptx::min(fits, ptx::exp2(end(v) + base));
  }
  template <class At>
  FLASHBSR_DEVICE static void apply(const SoftCapped& v, const RowLine& row, int columns,
                                    const At& at) {
    constexpr auto tanh = kTanh<kCoarse>;
    const float in_caps = row.factor * (1.0f / (v.soft_cap.cap * kLog2e));
    float power = row.factor, c[tanh.kTerms];
#pragma unroll
    for (int k = 0; k < tanh.kTerms; ++k, power *= in_caps * in_caps) c[k] = tanh.term[k] * power;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      const float x = at(i), u = x * x;
      float p = c[tanh.kTerms - 1];
#pragma unroll
      for (int k = tanh.kTerms - 2; k >= 0; --k) p = __fmaf_rn(u, p, c[k]);
      at(i) = __fmaf_rn(x, p, row.base);
    }
  }

 private:
  /// The logit in base 2 up to which the polynomial serves.
  FLASHBSR_DEVICE static float end(const SoftCapped& v) {
    return v.soft_cap.cap * (kTanh<kCoarse>.of_end * kLog2e);
  }
};

}  // namespace flashbsr::sm90a
