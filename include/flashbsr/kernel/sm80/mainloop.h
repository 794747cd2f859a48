// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp's rows against a tile of K and V: S = Q K^T, softmax, O += P V. S, P and O stay in
// registers; S becomes the A operand of P V as it lies (FlashAttention-2, Dao, 2023).
//
// Softmax is online, in base 2, and lazy: O is rescaled only when a row's maximum grew by more
// than 8. A row that has seen nothing has a finite maximum, so that no case needs a look at it.
// Weights therefore reach 2^8; fp16 ones are shifted up by 2^7 more, so that as many small
// ones as possible stay above its smallest number.
#pragma once

#include <flashbsr/kernel/sm80/scores.h>

namespace flashbsr::sm80 {

/// Reference of a row that has seen nothing yet: any weight made with it is infinite or 0.
inline constexpr float kNothing = -1e38f;

template <class Traits, class Variant>
  requires AttentionVariant<Variant, ThreadMath>
class Mainloop : public Scores<Traits, Variant> {
  using Base = Scores<Traits, Variant>;

 public:
  using Base::kBands, Base::kShift;
  static constexpr int kDims = Traits::kHeadDim / Traits::kParts;  ///< of O, in this warp
  static constexpr int kDimTiles = kDims / 8;
  static constexpr bool kExact = false;  ///< all dims of O exist: none is padding
  static constexpr int kBlocks = Traits::kKvTile / 16;

  /// A thread has rows g and g + 8 of each band, g = lane / 4, and of O columns as in out_column().
  float o[kBands][kDimTiles][4];
  float base[kBands][2];  ///< what is added to exponents: kShift less the row's reference
  float sum[kBands][2];   ///< this thread's part of the denominators

  FLASHBSR_DEVICE Mainloop(const KernelArgs& args, const BlockState& state, uint32_t query_tile,
                           int32_t thread)
      : Base(args, state, query_tile, thread),
        value_tile_(query_tile + Traits::kValueOffset +
                    first_dim(thread) * dtype_size(Traits::kV)) {}

  /// The first column of O that a thread's warp has.
  FLASHBSR_DEVICE static int32_t first_dim(int32_t thread) {
    if constexpr (Traits::kParts == 1) return 0;
    return static_cast<uint32_t>(thread) / (32 * Traits::kRowWarps) * kDims;
  }

  /// Where a dim of those is, from the first on.
  FLASHBSR_DEVICE static constexpr int column(int dim) { return dim; }

  /// Once rows and scales of an item are in shared memory.
  FLASHBSR_DEVICE void begin(const Task& task) {
    Base::begin(task);
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      base[b][0] = base[b][1] = kShift - kNothing;
      sum[b][0] = sum[b][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[b][n][e] = 0.0f;
      }
    }
  }

  /// O += P V, for the tile of V `tile` bytes from the first. Calls between.block_begin(n) and
  /// between.block_end(n), n < kBlocks, on the way. Stops before a block of 16 tokens whose weights
  /// do not fit their type, and returns its number: then resume().
  template <class Between>
  FLASHBSR_DEVICE int accumulate(uint32_t tile, Between&& between) {
    const Values values = Base::template operands<Values>(value_tile_ + tile);
    uint32_t p[2][kBands][kWeightWords], v[kLoaded][2];
    float part[kBands][2];
    weigh_all(0, p[0], part);
    values.load(v, 0, 0);
    if (!settle<0, false>(p[0], part)) return 0;
    return accumulate_block<0>(values, p, part, v, between);
  }

  /// The rest of a tile, from block `start`, whatever its logits are.
  FLASHBSR_DEVICE void resume(int start, uint32_t tile) {
    resume_block<0>(start, Base::template operands<Values>(value_tile_ + tile));
  }

 private:
  using Base::factor_, Base::s_, Base::kTokenTiles;
  template <bool kPacked, class = void>
  struct ValuesOf {
    using Type = ValueFragments<Traits::kArch, Traits::kHeadDim, Traits::kV, Traits::kCompute>;
  };
  template <class Unused>
  struct ValuesOf<true, Unused> {
    using Type = PackedValueFragments<Traits::kHeadDim>;
  };
  using Values = typename ValuesOf<Traits::kValuePacked>::Type;
  /// Pairs of words that a load of V gives: packed codes are widened where they are multiplied.
  static constexpr int kLoaded = Values::kDims / (Traits::kValuePacked ? 32 : 8);
  /// Weights take scales of groups where the dims of these begin: until then they are floats.
  static constexpr bool kGroupWeights = Traits::kV == DType::kI4;
  static constexpr int kWeightWords = kGroupWeights ? 8 : 4;
  static constexpr int kPairs = 4 * kBands;  ///< of weights that a thread has of 16 tokens
  /// Loads of V that the weights stay behind. More cost registers: bytes spend them on widening.
  static constexpr int kLag = Traits::kValuePacked  ? kDims / Values::kDims - 1
                              : Traits::kValueBytes ? 1
                                                    : 2;
  /// What four of a row's weights may add up to, so that each fits its type with room to spare.
  static constexpr float kMost = 32768.0f;

  /// The weights of the next 16 tokens are made between the products of these: a load of V waits
  /// for some of them, otherwise the compiler puts them behind all products.
  template <int kBlock, class Between>
  FLASHBSR_DEVICE int accumulate_block(const Values& values, uint32_t (&p)[2][kBands][kWeightWords],
                                       float (&part)[kBands][2], uint32_t (&first)[kLoaded][2],
                                       Between&& between) {
    constexpr int kChunks = kDims / Values::kDims;
    constexpr bool kLast = kBlock + 1 == kBlocks;
    uint32_t (&next)[kBands][kWeightWords] = p[(kBlock + 1) % 2];
    int made = 0;
    between.block_begin(kBlock);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t v[kLoaded][2];
      if (c == 0) {
#pragma unroll
        for (int i = 0; i < kLoaded; ++i) v[i][0] = first[i][0], v[i][1] = first[i][1];
      } else {
        Values behind = values;
        if (made > 0 && !kGroupWeights) {  // whose weights are no pairs yet
          const int w = made - 1;
          behind.base = ptx::after_positive(values.base, next[w / 4][w % 4]);
        }
        behind.load(v, kBlock * 16, c * Values::kDims);
      }
      multiply_values(values, kBlock, c * (Values::kDims / 8), p[kBlock % 2], v);
      if (!kLast) {
        const int wanted = max_of(c + 2 - kLag, 0) * kPairs / (kChunks - kLag);
#pragma unroll
        for (int w = made; w < min_of(wanted, kPairs); ++w) weigh(kBlock + 1, w, next, part);
        made = min_of(wanted, kPairs);
      }
    }
    between.block_end(kBlock);
    if constexpr (!kLast) {
      values.load(first, (kBlock + 1) * 16, 0);
      if (!settle<kBlock + 1, false>(next, part)) return kBlock + 1;
      return accumulate_block<kBlock + 1>(values, p, part, first, between);
    } else {
      return kBlocks;
    }
  }

  template <int kBlock>
  FLASHBSR_DEVICE void resume_block(int start, const Values& values) {
    if (start <= kBlock) {
      uint32_t p[kBands][kWeightWords];
      float part[kBands][2];
      weigh_all(kBlock, p, part);
      settle<kBlock, true>(p, part);
#pragma unroll
      for (int d = 0; d < kDims; d += Values::kDims) {
        uint32_t v[kLoaded][2];
        values.load(v, kBlock * 16, d);
        multiply_values(values, kBlock, d / 8, p, v);
      }
    }
    if constexpr (kBlock + 1 < kBlocks) resume_block<kBlock + 1>(start, values);
  }

  /// Packed codes of a block and of a chunk of 32 dims, to operands.
  FLASHBSR_DEVICE void widen_values(uint32_t lane, int block, int chunk, const uint32_t (&words)[2],
                                    uint32_t (&v)[4][2]) const {
    using Codes = PackedCodes<Traits::kArch, Traits::kHeadDim, Traits::kV>;
    static_assert(Codes::kValueUnit == Traits::kValueUnit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* scales = value_scales(lane, block, half, chunk);
      uint32_t pairs[4];
      Codes::widen_values(words[half], scales[0], scales[Traits::kScaleWords], chunk, lane, pairs);
#pragma unroll
      for (int n = 0; n < 4; ++n) v[n][half] = pairs[n];
    }
  }
  /// Of packed codes: the word of a chunk, of this thread's first token of eight of a block.
  FLASHBSR_DEVICE const float* value_scales(uint32_t lane, int block, int half, int chunk) const {
    using Codes = PackedCodes<Traits::kArch, Traits::kHeadDim, Traits::kV>;
    return Base::scales_of(Traits::kKvTile + 16 * block + 8 * half + lane % 4 * 2) +
           Codes::word_of(chunk, Base::value_groups());
  }

  FLASHBSR_DEVICE void multiply_values(const Values& values, int block, int first,
                                       const uint32_t (&p)[kBands][kWeightWords],
                                       const uint32_t (&v)[kLoaded][2]) {
    [[maybe_unused]] uint32_t scaled[kBands][4], wide[4][2];
#pragma unroll
    for (int i = 0; i < Values::kDims / 8; ++i) {
      const int chunk = (first + i) / 4;
      if constexpr (Traits::kValuePacked) {
        if (i % 4 == 0) widen_values(values.lane, block, chunk, v[i / 4], wide);
      }
      if constexpr (kGroupWeights) {
        if (i % 4 == 0) scale_weights(values.lane, block, chunk, p, scaled);
      }
      const uint32_t low = Traits::kValuePacked ? wide[i % 4][0] : v[i % kLoaded][0];
      const uint32_t high = Traits::kValuePacked ? wide[i % 4][1] : v[i % kLoaded][1];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        if constexpr (kGroupWeights) {
          mma_16x8x16<Traits::kArch, Traits::kCompute>(o[b][first + i], scaled[b], low, high);
        } else {
          mma_16x8x16<Traits::kArch, Traits::kCompute>(o[b][first + i], p[b], low, high);
        }
      }
    }
  }

  /// Weights of a block for the dims of a chunk.
  FLASHBSR_DEVICE void scale_weights(uint32_t lane, int block, int chunk,
                                     const uint32_t (&p)[kBands][kWeightWords],
                                     uint32_t (&scaled)[kBands][4]) const {
    if constexpr (kGroupWeights) {
      constexpr int kWords = Traits::kScaleWords;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* scales = value_scales(lane, block, half, chunk);
        const float x = int4_scale(scales[0]), y = int4_scale(scales[kWords]);
#pragma unroll
        for (int b = 0; b < kBands; ++b) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scaled[b][i] = ptx::pack2<Traits::kCompute, Traits::kArch>(
                x * bits_float(p[b][2 * i]), y * bits_float(p[b][2 * i + 1]));
          }
        }
      }
    }
  }

  FLASHBSR_DEVICE void weigh_all(int block, uint32_t (&p)[kBands][kWeightWords],
                                 float (&part)[kBands][2]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) weigh(block, i, p, part);
  }

  /// Pair `pair` of the weights of tokens [16 block, 16 block + 16), as it stands in A operands,
  /// and what it adds to the sums.
  FLASHBSR_DEVICE void weigh(int block, int pair, uint32_t (&p)[kBands][kWeightWords],
                             float (&part)[kBands][2]) const {
    const int b = pair / 4, i = pair % 4, h = i % 2;
    float x = s_[b][2 * block + i / 2][2 * h], y = s_[b][2 * block + i / 2][2 * h + 1];
    if constexpr (Variant::use_softmax) {
      x = ptx::exp2(__fmaf_rn(x, factor_[b][h], base[b][h]));
      y = ptx::exp2(__fmaf_rn(y, factor_[b][h], base[b][h]));
      part[b][h] = i < 2 ? x + y : part[b][h] + (x + y);
    }
    if constexpr (kGroupWeights) {
      p[b][2 * i] = float_bits(x);
      p[b][2 * i + 1] = float_bits(y);
      return;
    } else if constexpr (Traits::kTokenScales && !Traits::kValuePacked) {
      const float2 scale = Base::token_scales(Traits::kKvTile + 16 * block + i / 2 * 8);
      x *= scale.x;
      y *= scale.y;
    }
    p[b][i] = ptx::pack2<Traits::kCompute, Traits::kArch>(x, y);
  }

  /// Adds them to the sums, if they are small enough. Otherwise, if kSure, the maxima are looked
  /// for, and the weights made again.
  template <int kBlock, bool kSure>
  FLASHBSR_DEVICE bool settle(uint32_t (&p)[kBands][kWeightWords], float (&part)[kBands][2]) {
    if constexpr (!Variant::use_softmax) return true;
    bool fits = true;
#pragma unroll
    for (int b = 0; b < kBands; ++b) fits = fits && part[b][0] < kMost && part[b][1] < kMost;
    if (!__all_sync(0xffffffffu, fits)) [[unlikely]] {
      if constexpr (!kSure) return false;
      float top[kBands][2];
      find_top<kBlock>(top);
      raise_to(top);
      weigh_all(kBlock, p, part);
    }
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      sum[b][0] += part[b][0];
      sum[b][1] += part[b][1];
    }
    return true;
  }

  /// Largest logits of the tokens from 16 kBlock on.
  template <int kBlock>
  FLASHBSR_DEVICE void find_top(float (&top)[kBands][2]) const {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = ptx::max(s_[b][2 * kBlock][2 * h], s_[b][2 * kBlock][2 * h + 1]);
        float y = ptx::max(s_[b][2 * kBlock + 1][2 * h], s_[b][2 * kBlock + 1][2 * h + 1]);
#pragma unroll
        for (int n = 2 * kBlock + 2; n < kTokenTiles; n += 2) {
          x = ptx::max(ptx::max(x, s_[b][n][2 * h]), s_[b][n][2 * h + 1]);
          y = ptx::max(ptx::max(y, s_[b][n + 1][2 * h]), s_[b][n + 1][2 * h + 1]);
        }
        top[b][h] = ptx::max(x, y);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          top[b][h] = ptx::max(top[b][h], __shfl_xor_sync(0xffffffffu, top[b][h], lanes));
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      top[b][0] *= factor_[b][0];
      top[b][1] *= factor_[b][1];
    }
  }

  FLASHBSR_DEVICE void raise_to(const float (&top)[kBands][2]) {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float lower = ptx::min(base[b][h], kShift - top[b][h]);
        const float shrink = ptx::exp2(lower - base[b][h]);
        base[b][h] = lower;
        sum[b][h] *= shrink;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          o[b][n][2 * h] *= shrink;
          o[b][n][2 * h + 1] *= shrink;
        }
      }
    }
  }

  const uint32_t value_tile_;
};

}  // namespace flashbsr::sm80
