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

#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/ptx/math.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/tile/fragments.h>
#include <flashbsr/tile/rope.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::sm80 {

/// Reference of a row that has seen nothing yet: any weight made with it is infinite or 0.
inline constexpr float kNothing = -1e38f;

/// How a warp's rows see a tile.
struct TileSight {
  bool any;  ///< some row sees some of it
  bool all;  ///< every row sees all of it
};

/// RoPE and the hooks of logits: `Plain` has none, and saves their registers.
template <class Variant>
inline constexpr bool kHasHooks = !flashbsr::detail::kSame<Variant, Plain>;

/// What happens on the way through the products: nothing.
struct Nothing {
  FLASHBSR_DEVICE void begin() {}
  FLASHBSR_DEVICE void step(int) {}
  FLASHBSR_DEVICE void block_begin(int) {}
  FLASHBSR_DEVICE void block_end(int) {}
};

template <class Traits, class Variant>
  requires AttentionVariant<Variant, ThreadMath>
class Mainloop {
 public:
  static constexpr int kRowsPerWarp = Traits::kRows / Traits::kWarps;
  static constexpr int kBands = kRowsPerWarp / 16;  ///< A operands that share each B operand
  static constexpr int kTokenTiles = Traits::kKvTile / 8;
  static constexpr int kDimTiles = Traits::kHeadDim / 8;
  /// log2 of what weights are multiplied by.
  static constexpr float kShift = Traits::kCompute != DType::kF16 ? 0.0f
                                  : Variant::use_softmax          ? 7.0f
                                                                  : 15.0f;

  /// What four of a row's weights may add up to, so that each fits its type with room to spare.
  static constexpr float kMost = 32768.0f;

  /// A thread has rows g and g + 8 of each band, g = lane / 4, and of O columns as in out_column().
  float o[kBands][kDimTiles][4];
  float base[kBands][2];  ///< what is added to exponents: kShift less the row's reference
  float sum[kBands][2];  ///< this thread's part of the denominators

  FLASHBSR_DEVICE Mainloop(const KernelArgs& args, const BlockState& state, uint32_t query_tile,
                           int32_t thread)
      : args_(args),
        variant_(args.params),
        rows_(state.rows),
        scales_(state.scales),
        visible_(state.visible + static_cast<uint32_t>(thread) / 32),
        lane_(static_cast<uint32_t>(thread) % 32),
        first_row_(static_cast<uint32_t>(thread) / 32 * kRowsPerWarp),
        queries_(query_tile, first_row_, lane_),
        key_tile_(query_tile + Traits::kKeyOffset),
        value_tile_(query_tile + Traits::kValueOffset) {}

  FLASHBSR_DEVICE int32_t row_of(int band, int half) const {
    return first_row_ + band * 16 + half * 8 + lane_ / 4;
  }

  /// Once rows and scales of an item are in shared memory.
  FLASHBSR_DEVICE void begin(const Task& task) {
    task_ = &task;
    const int32_t end = min_of(task.item.row_count, first_row_ + kRowsPerWarp);
    if (lane_ == 0) *visible_ = Visibility::of(rows_, first_row_, end);
    __syncwarp();
    // The short way multiplies inside the exponent, after the maximum: only for positive scales.
    transforms_ = !Variant::use_softmax || variant_.transforms_logits() || variant_.masks_logits();
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        base[b][h] = kShift - kNothing;
        sum[b][h] = 0.0f;
        factor_[b][h] = scales_[row_of(b, h)] * kLog2e;
        if (!(factor_[b][h] > 0.0f)) transforms_ = true;
      }
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[b][n][e] = 0.0f;
      }
    }
    transforms_ = __any_sync(0xffffffffu, transforms_);
    if (transforms_) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) factor_[b][0] = factor_[b][1] = 1.0f;
    }
  }

  /// Whether a tile that all rows see whole needs none of soften().
  FLASHBSR_DEVICE bool is_plain() const { return !kHasHooks<Variant> && !transforms_; }
  /// The first KV position that all rows see.
  FLASHBSR_DEVICE int32_t whole_begin() const { return visible_->all.begin; }

  FLASHBSR_DEVICE TileSight sight(int32_t begin) const {
    const Visibility v = *visible_;
    return {v.sees(begin, begin + Traits::kKvTile), v.whole(begin, begin + Traits::kKvTile)};
  }

  /// S = Q K^T, for the tile of K at KV position `begin`, `tile` bytes from the first. Calls
  /// between.step(n), n < kSteps, on the way.
  template <class Between>
  FLASHBSR_DEVICE void score(int32_t begin, uint32_t tile, Between&& between) {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[b][n][e] = 0.0f;
      }
    }
    if constexpr (kHasHooks<Variant>) {
      if (args_.params.rope.fine) return score_rotated(begin, tile);
    }
    between.begin();
    const Keys keys = operands<Keys>(key_tile_ + tile);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) queries_.load(a[b], b * 16, step);
#pragma unroll
      for (int token = 0; token < Traits::kKvTile; token += Keys::kTokens) {
        uint32_t k[Keys::kTokens / 8][2];
        keys.load(k, token, step);
        if (token + Keys::kTokens >= Traits::kKvTile) between.step(step);
        multiply(a, k, token / 8);
      }
    }
  }

  /// S becomes logits (without softmax: weights), where it is not already.
  FLASHBSR_DEVICE void soften(int32_t begin, bool whole) {
    if (transforms_ || !whole) transform(begin);
  }

  /// O += P V, for the tile of V `tile` bytes from the first. Calls between.block(n), n < kBlocks,
  /// on the way. Unless kSure, stops before a block of 16 tokens whose weights do not fit their
  /// type, and returns its number: then resume().
  template <bool kSure, class Between>
  FLASHBSR_DEVICE int accumulate(uint32_t tile, Between&& between) {
    const Values values = operands<Values>(value_tile_ + tile);
    uint32_t p[2][kBands][4], v[Values::kDims / 8][2];
    float part[kBands][2];
    weigh_all(0, p[0], part);
    values.load(v, 0, 0);
    if (!settle<0, kSure>(p[0], part)) return 0;
    return accumulate_block<kSure, 0>(values, p, part, v, between);
  }

  /// The rest of a tile, from block `start`, whatever its logits are.
  FLASHBSR_DEVICE void resume(int start, uint32_t tile) {
    resume_block<0>(start, operands<Values>(value_tile_ + tile));
  }

  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kBlocks = Traits::kKvTile / 16;

 private:
  using Queries = QueryFragments<Traits::kHeadDim * 2>;
  using Keys = KeyFragments<Traits::kArch, Traits::kHeadDim, Traits::kKv>;
  using Values = ValueFragments<Traits::kArch, Traits::kHeadDim, Traits::kKv>;
  static constexpr int kPairs = 4 * kBands;  ///< of weights that a thread has of 16 tokens

  /// This lane's addresses in a tile of K or V. Kernels with hooks have no register to keep them
  /// in.
  template <class Operands>
  FLASHBSR_DEVICE Operands operands(uint32_t tile) const {
    if constexpr (kHasHooks<Variant>) {
      return Operands(tile, ptx::thread_index() % 32);
    } else {
      return Operands(tile, lane_);
    }
  }

  /// The weights of the next 16 tokens are made between the products of these: a load of V waits
  /// for some of them, otherwise the compiler puts them behind all products.
  template <bool kSure, int kBlock, class Between>
  FLASHBSR_DEVICE int accumulate_block(const Values& values, uint32_t (&p)[2][kBands][4],
                                       float (&part)[kBands][2],
                                       uint32_t (&first)[Values::kDims / 8][2],
                                       Between&& between) {
    constexpr int kChunks = Traits::kHeadDim / Values::kDims;
    constexpr int kLag = Traits::kLag;
    constexpr bool kLast = kBlock + 1 == kBlocks;
    uint32_t(&next)[kBands][4] = p[(kBlock + 1) % 2];
    int made = 0;
    between.block_begin(kBlock);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      uint32_t v[Values::kDims / 8][2];
      if (c == 0) {
#pragma unroll
        for (int i = 0; i < Values::kDims / 8; ++i) v[i][0] = first[i][0], v[i][1] = first[i][1];
      } else {
        Values behind = values;
        if (Variant::use_softmax && made > 0) {
          const int w = made - 1;
          behind.base = ptx::after_positive(values.base, next[w / 4][w % 4]);
        }
        behind.load(v, kBlock * 16, c * Values::kDims);
      }
      multiply_values(c * (Values::kDims / 8), p[kBlock % 2], v);
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
      if (!settle<kBlock + 1, kSure>(next, part)) return kBlock + 1;
      return accumulate_block<kSure, kBlock + 1>(values, p, part, first, between);
    } else {
      return kBlocks;
    }
  }

  template <int kBlock>
  FLASHBSR_DEVICE void resume_block(int start, const Values& values) {
    if (start <= kBlock) {
      uint32_t p[kBands][4];
      float part[kBands][2];
      weigh_all(kBlock, p, part);
      settle<kBlock, true>(p, part);
#pragma unroll
      for (int d = 0; d < Traits::kHeadDim; d += Values::kDims) {
        uint32_t v[Values::kDims / 8][2];
        values.load(v, kBlock * 16, d);
        multiply_values(d / 8, p, v);
      }
    }
    if constexpr (kBlock + 1 < kBlocks) resume_block<kBlock + 1>(start, values);
  }

  FLASHBSR_DEVICE void multiply_values(int first, const uint32_t (&p)[kBands][4],
                                       const uint32_t (&v)[Values::kDims / 8][2]) {
#pragma unroll
    for (int i = 0; i < Values::kDims / 8; ++i) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        mma_16x8x16<Traits::kArch, Traits::kCompute>(o[b][first + i], p[b], v[i][0], v[i][1]);
      }
    }
  }

  FLASHBSR_DEVICE void weigh_all(int block, uint32_t (&p)[kBands][4],
                                 float (&part)[kBands][2]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) weigh(block, i, p, part);
  }

  /// Pair `pair` of the weights of tokens [16 block, 16 block + 16), as it stands in A operands,
  /// and what it adds to the sums.
  FLASHBSR_DEVICE void weigh(int block, int pair, uint32_t (&p)[kBands][4],
                             float (&part)[kBands][2]) const {
    const int b = pair / 4, i = pair % 4, h = i % 2;
    float x = s_[b][2 * block + i / 2][2 * h], y = s_[b][2 * block + i / 2][2 * h + 1];
    if constexpr (Variant::use_softmax) {
      x = ptx::exp2(__builtin_fmaf(x, factor_[b][h], base[b][h]));
      y = ptx::exp2(__builtin_fmaf(y, factor_[b][h], base[b][h]));
      part[b][h] = i < 2 ? x + y : part[b][h] + (x + y);
    }
    p[b][i] = ptx::pack2<Traits::kCompute, Traits::kArch>(x, y);
  }

  /// Adds them to the sums, if they are small enough. Otherwise, if kSure, the maxima are looked
  /// for, and the weights made again.
  template <int kBlock, bool kSure>
  FLASHBSR_DEVICE bool settle(uint32_t (&p)[kBands][4], float (&part)[kBands][2]) {
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

  template <int kCount>
  FLASHBSR_DEVICE void multiply(const uint32_t (&a)[kBands][4], const uint32_t (&k)[kCount][2],
                                int first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        mma_16x8x16<Traits::kArch, Traits::kCompute>(s_[b][first + i], a[b], k[i][0], k[i][1]);
      }
    }
  }

  /// The same with every key turned to its position. Dims i and i + head_dim / 2 are in the same
  /// thread, kSteps / 2 steps apart.
  FLASHBSR_DEVICE void score_rotated(int32_t begin, uint32_t tile) {
    const Keys keys = operands<Keys>(key_tile_ + tile);
    const int32_t lane = ptx::thread_index() % 32;
#pragma unroll 1
    for (int step = 0; step < kSteps / 2; ++step) {
      uint32_t a[2][kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        queries_.load(a[0][b], b * 16, step);
        queries_.load(a[1][b], b * 16, step + kSteps / 2);
      }
#pragma unroll
      for (int token = 0; token < Traits::kKvTile; token += Keys::kTokens) {
        uint32_t x[Keys::kTokens / 8][2], y[Keys::kTokens / 8][2];
        keys.load(x, token, step);
        keys.load(y, token, step + kSteps / 2);
#pragma unroll
        for (int i = 0; i < Keys::kTokens / 8; ++i) {
          // Past the item's end keys are zeros, and the tables may end too.
          const int32_t position =
              min_of(begin + token + 8 * i + lane / 4, task_->item.kv_end - 1);
          const RopeRow angles(args_.params.rope, position, Traits::kHeadDim);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            turn_pair(angles, Keys::column_of(step, half, lane), x[i][half], y[i][half]);
          }
        }
        multiply(a[0], x, token / 8);
        multiply(a[1], y, token / 8);
      }
    }
  }

  FLASHBSR_DEVICE static void turn_pair(const RopeRow& angles, int column, uint32_t& x,
                                        uint32_t& y) {
    constexpr DType kType = Traits::kCompute;
    float x0 = ptx::unpack_low<kType>(x), x1 = ptx::unpack_high<kType>(x);
    float y0 = ptx::unpack_low<kType>(y), y1 = ptx::unpack_high<kType>(y);
    angles.at(column).turn(x0, y0);
    angles.at(column + 1).turn(x1, y1);
    x = ptx::pack2<kType, Traits::kArch>(x0, x1);
    y = ptx::pack2<kType, Traits::kArch>(y0, y1);
  }

  /// The long way: masks, and where `transforms_` also scales and hooks, after which S is in base-2
  /// units (without softmax: the weights).
  FLASHBSR_DEVICE void transform(int32_t begin) {
    const int32_t column = begin + lane_ % 4 * 2;
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t r = row_of(b, h);
        const PrefillRow row = rows_[r];
        const float scale = scales_[r];
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            const int32_t position = column + n * 8 + e % 2;
            const bool inside = position >= row.span.begin && position < row.span.end;
            s_[b][n][e] = transformed(s_[b][n][e], row, scale, position, inside);
          }
        }
      }
    }
  }

  FLASHBSR_DEVICE float transformed(float raw, const PrefillRow& row, float scale, int32_t position,
                                    bool inside) const {
    float x = transforms_ ? raw * scale : raw;
    if constexpr (kHasHooks<Variant>) {
      const LogitsAt<ThreadMath> at{
          .request = &task_->request,
          .q_token = row.token,
          .q_position = task_->request.kv_len - task_->request.q_len + row.token,
          .q_head = row.q_head,
          .kv_head = task_->item.kv_head,
          .kv_first = position,
          .lanes = 1,
          .kv_position = position};
      if (variant_.transforms_logits()) {
        x = variant_.template logits_transform<ThreadMath>(x, at);
      }
      // Bits outside the span may not exist.
      if (inside && variant_.masks_logits()) {
        inside = variant_.template logits_mask<ThreadMath>(at);
      }
    }
    if constexpr (Variant::use_softmax) {
      return !inside ? -infinity() : transforms_ ? x * kLog2e : x;
    } else {
      constexpr float kUnit = kShift == 0.0f ? 1.0f : 32768.0f;  // 2^kShift
      return inside ? kUnit * variant_.template activation<ThreadMath>(x) : 0.0f;
    }
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

  const KernelArgs& args_;
  const Variant variant_;
  const PrefillRow* rows_;
  const float* scales_;
  const Task* task_;
  Visibility* const visible_;  ///< of this warp's rows, in shared memory
  const int32_t lane_;
  const int32_t first_row_;
  const Queries queries_;
  const uint32_t key_tile_;
  const uint32_t value_tile_;
  bool transforms_;
  float factor_[kBands][2];
  float s_[kBands][kTokenTiles][4];
};

}  // namespace flashbsr::sm80
