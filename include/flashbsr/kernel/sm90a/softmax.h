// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A thread's rows between the products: S becomes weights P, O follows their references.
//
// Softmax is online, in base 2, and lazy: O is rescaled only when a row's maximum grew by more than
// 8. S, P and O stay in registers; P is the A operand of P V as it lies.
#pragma once

#include <flashbsr/kernel/sm90a/scores.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/wgmma.h>

namespace flashbsr::sm90a {

/// Reference of a row that has seen nothing yet. Finite, so that no case needs a look at it.
inline constexpr float kNothing = -1e30f;

template <class Traits, class Variant>
class Softmax {
 public:
  using Score = Scores<Traits, Variant>;
  static constexpr float kShift = Score::kShift;
  static constexpr float kValueUnit = Traits::kValueUnit;
  /// log2 of how far weights may grow before their reference follows. e4m3 ends at 448.
  static constexpr float kSlack = Traits::kWeightType == DType::kE4M3 ? 4.0f : 8.0f;
  static constexpr int kWeightSteps = Traits::kKvTile * dtype_size(Traits::kWeightType) / 32;

  float o[Traits::kOutputDims / 2];  ///< as Scores::s, columns are dims
  float top[2];                      ///< of each row, before its factor: what exponents refer to
  float sum[2];                      ///< this thread's part of the denominators
  uint32_t p[kWeightSteps][4];       ///< weights, as A operands
  Score scores;

  FLASHBSR_DEVICE explicit Softmax(const KernelArgs& args) : scores(args) {}

  /// Before an item's rows.
  FLASHBSR_DEVICE void clear() {
    top[0] = top[1] = kNothing;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kOutputDims / 2; ++i) o[i] = 0.0f;
  }

  FLASHBSR_DEVICE void pin_weights() {
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) ptx::pin(p[k]);
  }

  /// S becomes weights, still in fp32. True: O must be rescaled by shrink_.
  /// @param slack  log2 of how far weights may grow
  FLASHBSR_DEVICE bool soften(int32_t begin, bool masked, float slack = kSlack) {
    scores.scale_keys();
    if (masked || kHasHooks<Variant>) scores.transform(begin, masked);
    if constexpr (!Variant::use_softmax) return false;
    float (&s)[4 * Score::kGroups] = scores.s;
    float new_top[2], factor[2], base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = scores.factor[h];
      // Not 0: it meets infinities.
      if (masked) factor[h] = ptx::max(fabsf(factor[h]), 1e-30f);
      float x = s[2 * h], y = s[2 * h + 1];
#pragma unroll
      for (int i = 1; i < Score::kGroups; ++i) {
        x = ptx::max(x, s[4 * i + 2 * h]);
        y = ptx::max(y, s[4 * i + 2 * h + 1]);
      }
      x = ptx::max(x, y);
      x = ptx::max(x, __shfl_xor_sync(0xffffffffu, x, 1));
      new_top[h] = ptx::max(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    const bool grew = __any_sync(0xffffffffu, (new_top[0] - top[0]) * factor[0] > slack ||
                                                  (new_top[1] - top[1]) * factor[1] > slack);
    if (grew) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float higher = ptx::max(new_top[h], top[h]);
        shrink_[h] = ptx::exp2((top[h] - higher) * factor[h]);
        top[h] = higher;
        sum[h] *= shrink_[h];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = kShift - top[h] * factor[h];
#pragma unroll
    for (int i = 0; i < Score::kGroups; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * i + e] = ptx::exp2(__fmaf_rn(s[4 * i + e], factor[e / 2], base[e / 2]));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = s[2 * h], y = s[2 * h + 1];
#pragma unroll
      for (int i = 1; i < Score::kGroups; ++i) {
        x += s[4 * i + 2 * h];
        y += s[4 * i + 2 * h + 1];
      }
      sum[h] += x + y;
    }
    return grew;
  }

  FLASHBSR_DEVICE void pack() {
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Traits::kTransposesValues) {  // as S lies; V is transposed into that order
          const float* s = scores.s + 16 * k + i / 2 * 8 + i % 2 * 2;
          p[k][i] = ptx::pack4_e4m3(s[0], s[1], s[4], s[5]);
        } else {
          const float* s = scores.s + 8 * k + 2 * i;
          p[k][i] = ptx::pack2<Traits::kWeightType>(s[0], s[1]);
        }
      }
    }
  }

  FLASHBSR_DEVICE void rescale() {
#pragma unroll
    for (int i = 0; i < Traits::kOutputDims / 2; ++i) o[i] *= shrink_[i / 2 % 2];
  }

  /// Weights of a tile that all rows see all of, against the references as they are: without
  /// maxima, which take a tenth of the time. False: a weight of this thread outgrew its type, or
  /// there was no reference. Unless all threads of the warpgroup accept(), S is to be computed
  /// again.
  FLASHBSR_DEVICE bool soften_as_before(int32_t begin) {
    float (&s)[4 * Score::kGroups] = scores.s;
    float base[2], more[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = kShift - top[h] * scores.factor[h];
    if constexpr (!Score::kFoldsKeyScales) scores.scale_keys();
    scores.exponents(begin, base);
#pragma unroll
    for (int i = 0; i < 4 * Score::kGroups; ++i) {
      s[i] = ptx::exp2(s[i]);
      more[i / 2 % 2][i % 2] = i < 4 ? s[i] : more[i / 2 % 2][i % 2] + s[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) more_[h] = more[h][0] + more[h][1];
    if constexpr (Traits::kSumsTiles) return packs_bytes();
    // Before they are packed: sums of a thread tell, of half a row's tile in bytes, which a row of
    // equal weights would outgrow. NaN does not fit.
    bool fits = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = scores.most(base[h], kMostWeight);
      const bool rest_fits = !Traits::kLongSums || more[h][1] < most;
      fits =
          fits && (missing(h) || ((Traits::kLongSums ? more[h][0] : more_[h]) < most && rest_fits));
    }
    return fits;
  }

  /// The same where S stays as it is, so that a warp whose weights do not fit takes soften() by
  /// itself: weights are packed, 16 columns at a time.
  /// @param then  called with the number of each such step
  template <class Then>
  FLASHBSR_DEVICE bool pack_as_before(const Then& then) {
    float base[2], more[2][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = kShift - top[h] * scores.factor[h];
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
      float w[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int h = i / 2 % 2;
        w[i] = ptx::exp2(__fmaf_rn(scores.s[8 * k + i], scores.factor[h], base[h]));
        more[h][i % 2] += w[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[k][i] = ptx::pack2<Traits::kWeightType>(w[2 * i], w[2 * i + 1]);
      }
      then(k);
    }
    bool fits = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      more_[h] = more[h][0] + more[h][1];
      fits = fits && (missing(h) || more_[h] < kMostWeight);
    }
    return fits;
  }

  /// Afterwards, where the whole warpgroup's weights fit, or the warp's if S is still there.
  FLASHBSR_DEVICE void accept() {
    sum[0] += more_[0];
    sum[1] += more_[1];
  }
  /// fp16 ends at 65504, e4m3 at 448. bf16 ends where fp32 does: what is left is for V.
  static constexpr float kMostWeight = Traits::kLongSums                     ? 448.0f
                                       : Traits::kWeightType == DType::kBF16 ? 1073741824.0f
                                                                             : 32768.0f;

  /// What lies in the place of a row that is not there must decide nothing.
  FLASHBSR_DEVICE bool missing(int h) const { return scores.factor[h] == 0.0f; }

 private:
  /// Packs weights of e4m3, which must be below 256: a byte of that or above, NaN too, carries into
  /// its top bit.
  FLASHBSR_DEVICE bool packs_bytes() {
    pack();
    uint32_t outgrown = 0;
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) outgrown |= p[k][i] + 0x08080808u;
    }
    return !(outgrown & 0x80808080u);
  }

 protected:
  float shrink_[2];  ///< of each row, where its reference grew

 private:
  float more_[2];  ///< sums of weights that are not accepted yet
};

}  // namespace flashbsr::sm90a
