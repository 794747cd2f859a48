// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One thread's part of S = Q K^T of a warpgroup, and what masks, scales and hooks make of it: two
// rows, eight apart, and two neighbouring columns of every eight.
#pragma once

#include <flashbsr/kernel/sm90a/exponents.h>
#include <flashbsr/kernel/sm90a/mask.h>
#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::sm90a {

/// The hooks of logits: `Plain` has none, and saves their registers.
template <class Variant>
inline constexpr bool kHasHooks = !flashbsr::detail::kSame<Variant, Plain>;

/// A user's variant, which is compiled while somebody waits.
template <class Variant>
inline constexpr bool kPerLogit = requires { Variant::per_logit; };

/// A thread's first row of the 64 of consumer `group`, within the item; its second is eight on. Its
/// index is read anew at every call: the main loop has no register to keep what follows from it.
FLASHBSR_DEVICE int32_t first_row(int32_t group) {
  const int32_t thread = ptx::thread_index();
  return group * 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
}

template <class Traits, class Variant>
  requires AttentionVariant<Variant, FragmentMath<Traits::kKvTile / 8>>
class Scores {
 public:
  static constexpr int kGroups = Traits::kKvTile / 8;
  /// log2 of what weights are multiplied by, to keep small ones in their type.
  static constexpr float kShift = Traits::kWeightType == DType::kE4M3  ? 4.0f
                                  : Traits::kWeightType != DType::kF16 ? 0.0f
                                  : Variant::use_softmax               ? 7.0f
                                  : Variant::weights_at_most_one       ? 15.0f
                                                                       : 0.0f;

  FLASHBSR_DEVICE explicit Scores(const KernelArgs& args) : args_(args), variant_(args.params) {}

  /// Where tokens have scales: shared address of this thread's first two of K, of the tile at hand.
  uint32_t token_scales;

  /// s[4 i + e]: column 8 i + lane % 4 * 2 + e % 2 of row lane / 4 + e / 2 * 8 of the warp.
  float s[4 * kGroups];
  /// From S to logits in base 2. Not positive: every tile goes the long way. 0: no such row.
  float factor[2];

  /// Before an item. Returns whether this thread's rows need no mask where they see all of a tile.
  FLASHBSR_DEVICE bool begin(const Tile& tile, const Span* spans, int32_t row) {
    tile_ = &tile;
    spans_ = spans + row;
    bool simple = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int32_t r = row + 8 * h;
      float scale = args_.params.sm_scale;
      if (scaled_by_head()) {
        scale = logit_scale(args_.params, RowName(args_, tile.item, r).q_head, tile.item.kv_head);
      }
      scale *= Traits::kKeyUnit;
      factor[h] = scale * kLog2e;
      if constexpr (kHasHooks<Variant>) {
        // Of a missing row there are no mask bits either.
        const RowName name(args_, tile.item, min_of(r, tile.item.row_count - 1));
        token_[h] = name.token;
        q_head_[h] = name.q_head;
        scale_[h] = scale;
        row_value_[h] = variant_.row_value(name.q_head);
        if (hooked()) factor[h] = kLog2e;
      }
      // What lies in the place of a missing row must not decide when others are rescaled.
      if (r >= tile.item.row_count) {
        factor[h] = 0.0f;
      } else {
        simple = simple && factor[h] > 0.0f;
      }
    }
    return simple;
  }

  /// Whether rows may have factors of different signs.
  FLASHBSR_DEVICE bool scaled_by_head() const {
    return args_.params.q_head_scale || args_.params.k_head_scale;
  }
  /// Otherwise, whether the one that they have is above 0.
  FLASHBSR_DEVICE bool scaled_up() const { return hooked() || args_.params.sm_scale > 0.0f; }

  /// Where Q is not as it was: the products of the thread's rows are to be multiplied by `unit`.
  FLASHBSR_DEVICE void multiply(const float (&unit)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (hooked()) {
        scale_[h] *= unit[h];
      } else {
        factor[h] *= unit[h];
      }
    }
  }

  /// Whether a mask in bits sorts tiles, uniform.
  FLASHBSR_DEVICE bool sorts() const {
    if constexpr (kMasksByBits<Variant>) return variant_.masks_logits();
    return false;
  }
  /// Whether the mask may hide logits of the tile at hand: otherwise it is not asked.
  FLASHBSR_DEVICE bool cut() const {
    if constexpr (kMasksByBits<Variant>) return cut_;
    return kHasHooks<Variant> && variant_.masks_logits();
  }
  FLASHBSR_DEVICE void set_cut(bool cut) { cut_ = cut; }

  /// Before the products of the tile at `begin`: what a variant masks depends on places only, and
  /// its look-ups run beside them.
  FLASHBSR_DEVICE void look_ahead(int32_t begin) {
    if (!cut()) return;
    const int32_t column = begin + ptx::thread_index() % 4 * 2;
    if constexpr (kMasksByBits<Variant>) {
      // Both rows' words are on their way before one is waited for.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        kept_[h] = load_mask_bits<kGroups>(variant_.custom_mask, tile_->request, token_[h], column);
      }
      if (begin < tile_->request.mask_begin) {
#pragma unroll
        for (int h = 0; h < 2; ++h) kept_[h].set_first(tile_->request.mask_begin - column);
      }
    } else if constexpr (kHasHooks<Variant>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        kept_[h] = variant_.template logits_mask<Math>(where(h, column));
      }
    }
  }

  /// S of the tile at KV position `begin`: what a variant makes of logits, and where rows do not
  /// see all of the tile, its mask and the spans. Afterwards S times the absolute value of factor
  /// are logits in base 2; without softmax, S are the weights.
  FLASHBSR_DEVICE void transform(int32_t begin, bool masked) {
    const int32_t column = begin + ptx::thread_index() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (hooked()) {
        if constexpr (kHasHooks<Variant>) hook(h, column);
      } else if (factor[h] < 0.0f) {
        // A maximum is looked for before factors are multiplied: negative ones turn S over.
#pragma unroll
        for (int i = 0; i < 2 * kGroups; ++i) at(h, i) = -at(h, i);
      }
      if (cut()) mask(h);
      if (masked) {
        const Span span = spans_[8 * h];
        const int32_t end = span.end - column, first = span.begin - column;
#pragma unroll
        for (int i = 0; i < 2 * kGroups; ++i) {
          if (i / 2 * 8 + i % 2 >= end) at(h, i) = kOutside;
        }
        if (first > 0) {  // a window, or the tile begins before the item
#pragma unroll
          for (int i = 0; i < 2 * kGroups; ++i) {
            if (i / 2 * 8 + i % 2 < first) at(h, i) = kOutside;
          }
        }
      }
    }
  }

  /// S of codes becomes S of keys.
  FLASHBSR_DEVICE void scale_keys() { scale(kKeySide); }
  /// S of K's first half is about to become that of both.
  FLASHBSR_DEVICE void scale_first_half() { scale(0); }
  /// Weights become those of codes. Before the wait for the products under way, which read packed
  /// ones: behind it these 50 instructions are in the way of the next products.
  FLASHBSR_DEVICE void scale_weights() {
    if constexpr (!Traits::kPassed) scale(kSideBytes);
  }

  /// Whether exponents() are to be tried. The same in all threads.
  FLASHBSR_DEVICE bool exponents_pay() const {
    return Exponent::pay(variant_) && !(kFoldsKeyScales && scaled_by_head());
  }
  /// exponents() multiplies K's scales by the rows' factor and S by both: 20 instructions of a tile
  /// less than scale_keys() and a factor for each row, where rows have the same.
  static constexpr bool kFoldsKeyScales =
      Traits::kTokenScales && !Traits::kSplitsQueries && !kHasHooks<Variant>;

  /// S of a tile that all rows see all of becomes exponents of 2.
  /// @param base  minus the rows' references
  FLASHBSR_DEVICE void exponents(int32_t begin, const float (&base)[2]) {
    if constexpr (kFoldsKeyScales) {
      const float all = ptx::max(factor[0], factor[1]);  // 0: there is no such row
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float2 x = ptx::load_shared_pair(token_scales + kKeySide + 32 * i);
        const float by[2] = {x.x * all, x.y * all};
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * i + e] = __fmaf_rn(s[4 * i + e], by[e % 2], base[e / 2]);
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        RowLine row{factor[h], base[h]};
        if constexpr (kHasHooks<Variant>) {
          const int32_t column = begin + ptx::thread_index() % 4 * 2;
          if (hooked()) row.factor *= scale_[h];
          row.slope = factor[h] * row_value_[h];
          row.offset = column - (tile_->request.kv_len - tile_->request.q_len + token_[h]);
        }
        Exponent::apply(variant_, row, 2 * kGroups, [&](int i) -> float& { return at(h, i); });
      }
    }
  }
  /// Largest sum of a row's weights by exponents() that is right, if `fits` is what fits their
  /// type.
  /// @param base  as exponents() has it, of the row
  FLASHBSR_DEVICE float most(float base, float fits) const {
    return Exponent::most(variant_, base, kShift, fits);
  }

 private:
  /// log2 of what weights are multiplied by where there is no softmax to do it.
  static constexpr int kWeightShift = Variant::use_softmax ? 0 : static_cast<int>(kShift);
  using Math = FragmentMath<kGroups, flashbsr::detail::kSame<Variant, SoftCapped>, kWeightShift>;
  using Exponent = Exponents<Variant, Traits::kWeightType == DType::kBF16>;

  /// Of a tile's scales: K's, then V's; or of K's halves `a`, then `b`.
  static constexpr int kSideBytes = Traits::kKvTile * 4;
  static constexpr int kKeySide = Traits::kKeyHalves ? kSideBytes : 0;
  FLASHBSR_DEVICE void scale(int first) {
    if constexpr (Traits::kTokenScales) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float2 x = ptx::load_shared_pair(token_scales + first + 32 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * i + e] *= e % 2 ? x.y : x.x;
      }
    }
  }

  FLASHBSR_DEVICE void mask(int h) {
    if (kept_[h].all()) return;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) {
      if (!kept_[h].at(i)) at(h, i) = kOutside;
    }
  }
  FLASHBSR_DEVICE LogitsAt<Math> where(int h, int32_t column) const {
    const Request& request = tile_->request;
    return {.request = &request,
            .q_token = token_[h],
            .q_position = request.kv_len - request.q_len + token_[h],
            .q_head = q_head_[h],
            .kv_head = tile_->item.kv_head,
            .kv_first = column,
            .lanes = Traits::kKvTile,
            .kv_position = {column},
            .row_value = row_value_[h]};
  }
  static constexpr float kOutside = Variant::use_softmax ? -infinity() : 0.0f;

  /// Whether S becomes logits before their maximum is looked for, or weights. Otherwise factors do
  /// it afterwards, at no cost.
  FLASHBSR_DEVICE bool hooked() const {
    return kHasHooks<Variant> && (!Variant::use_softmax || variant_.transforms_logits());
  }

  /// Column `i` of the thread's row `h`.
  FLASHBSR_DEVICE float& at(int h, int i) { return s[i / 2 * 4 + 2 * h + i % 2]; }

  /// A row's S becomes logits, or weights.
  FLASHBSR_DEVICE void hook(int h, int32_t column) {
    const LogitsAt<Math> place = where(h, column);
    RowLogits<kGroups> x;
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) x.x[i] = at(h, i);
    x.factor = scale_[h];
    if (variant_.transforms_logits()) x = variant_.template logits_transform<Math>(x, place);
    if constexpr (!Variant::use_softmax) x = variant_.template activation<Math>(x);
    x = x * static_cast<float>(1 << kWeightShift);
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) at(h, i) = x.value(i);
  }

  const KernelArgs& args_;
  const Variant variant_;
  const Span* spans_ = nullptr;  ///< of this thread's first row; the second is eight on
  const Tile* tile_ = nullptr;
  int32_t token_[2], q_head_[2];
  float scale_[2], row_value_[2];
  RowBits<kGroups> kept_[2];  ///< by the variant's mask, of the tile at hand
  bool cut_ = false;
};

}  // namespace flashbsr::sm90a
