// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One warp's S = Q K^T in registers, and what masks, scales and hooks make of it.
#pragma once

#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/ptx/math.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/tile/fragments.h>
#include <flashbsr/tile/packed.h>
#include <flashbsr/tile/rope.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::sm80 {

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
class Scores {
 public:
  static constexpr int kRowsPerWarp = Traits::kRows / Traits::kRowWarps;
  static constexpr int kBands = kRowsPerWarp / 16;  ///< A operands that share each B operand
  static constexpr int kTokenTiles = Traits::kScoreTokens / 8;
  /// log2 of what weights are multiplied by.
  static constexpr float kShift = Traits::kCompute != DType::kF16 ? 0.0f
                                  : Variant::use_softmax          ? 7.0f
                                  : Variant::weights_at_most_one  ? 15.0f
                                                                  : 0.0f;

  static constexpr int kSteps = Traits::kHeadDim / 16;  ///< of a product

  FLASHBSR_DEVICE Scores(const KernelArgs& args, const BlockState& state, uint32_t query_tile,
                         int32_t thread)
      : lane_(static_cast<uint32_t>(thread) % 32),
        first_row_(first_row(static_cast<uint32_t>(thread) / 32)),
        key_tile_(query_tile + Traits::kKeyOffset),
        queries_(query_tile, first_row_, lane_),
        args_(args),
        variant_(args.params),
        rows_(state.rows),
        scales_(state.scales),
        token_scales_(state.token_scales),
        // With hooks by the index anew: nvcc 13.0 kept one number more than sm_90 has registers.
        visible_(state.visible +
                 static_cast<uint32_t>(kHasHooks<Variant> ? ptx::thread_index() : thread) / 32) {}

  FLASHBSR_DEVICE static int32_t first_row(int32_t warp) {
    return (Traits::kParts == 1 ? warp : warp % Traits::kRowWarps) * kRowsPerWarp;
  }
  FLASHBSR_DEVICE int32_t row_of(int band, int half) const {
    return first_row_ + band * 16 + half * 8 + lane_ / 4;
  }

  /// Once rows and scales of an item are in shared memory.
  FLASHBSR_DEVICE void begin(const Task& task) {
    task_ = &task;
    const int32_t end = min_of(task.item.row_count, first_row_ + kRowsPerWarp);
    if (lane_ == 0) {
      // What all see is that of the block, so that its warps take the same way and meet at the same
      // barriers; warps of few tiles at the diagonal compare for nothing.
      Visibility v{Visibility::of(rows_, first_row_, end).any,
                   Visibility::of(rows_, 0, task.item.row_count).all};
      if (variant_.masks_logits()) {
        v.all.end = min_of(v.all.end, variant_.mask_begin(task.request));
      }
      *visible_ = v;
    }
    __syncwarp();
    // The short way multiplies inside the exponent, after the maximum: only for positive scales.
    transforms_ = !Variant::use_softmax || variant_.transforms_logits();
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor_[b][h] = scales_[row_of(b, h)] * kLog2e;
        if (!(factor_[b][h] > 0.0f)) transforms_ = true;
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
  /// The first KV position that all rows of the block see.
  FLASHBSR_DEVICE int32_t whole_begin() const { return visible_->all.begin; }

  FLASHBSR_DEVICE TileSight sight(int32_t begin) const {
    const Visibility v = *visible_;
    return {v.sees(begin, begin + Traits::kKvTile), v.whole(begin, begin + Traits::kKvTile)};
  }

  /// S = Q K^T, for the tile of K at KV position `begin`, `tile` bytes from the first, whose scales
  /// are in `slot`. Calls between.step(n), n < kSteps, on the way.
  template <class Between>
  FLASHBSR_DEVICE void score(int32_t begin, uint32_t tile, uint32_t slot, Between&& between) {
    if constexpr (Traits::kTokenScales) slot_ = slot;
    clear();
    if constexpr (Traits::kPacked) {
      multiply_packed(tile, between);
    } else {
      multiply_queries(begin, tile, between);
    }
    if constexpr (Traits::kTokenScales && !Traits::kPacked) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const float2 scale = token_scales(8 * n);
#pragma unroll
        for (int b = 0; b < kBands; ++b) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s_[b][n][e] *= e % 2 ? scale.y : scale.x;
        }
      }
    }
  }

  /// S becomes logits (without softmax: weights), where it is not already. Tiles that a mask cuts
  /// are not whole.
  FLASHBSR_DEVICE void soften(int32_t begin, bool whole) {
    if (transforms_ || !whole) transform(begin);
  }

 protected:
  using Queries = QueryFragments<Traits::kHeadDim * 2>;
  using Keys = KeyFragments<Traits::kArch, Traits::kHeadDim, Traits::kKv>;

  /// Of the thread's two tokens of eight from `token` on, of the tile at hand: of K, or from
  /// kKvTile on of V.
  FLASHBSR_DEVICE float2 token_scales(int token) const {
    const float* const scales = scales_of(token + lane_ % 4 * 2);
    if constexpr (Traits::kScaleWords == 1) return *reinterpret_cast<const float2*>(scales);
    return {scales[0], scales[Traits::kScaleWords]};
  }
  FLASHBSR_DEVICE int value_groups() const { return args_.params.v_scales.dim; }
  FLASHBSR_DEVICE const float* scales_of(int32_t token) const {
    return token_scales_ + (slot_ * 2 * Traits::kKvTile + token) * Traits::kScaleWords;
  }

  /// This lane's addresses in a tile of K or V. Kernels with hooks, and those of packed codes with
  /// 128 rows, have no register to keep them in.
  template <class Operands>
  FLASHBSR_DEVICE Operands operands(uint32_t tile) const {
    if constexpr (kHasHooks<Variant> || Traits::kPacked || Traits::kValuePacked) {
      return Operands(tile, ptx::thread_index() % 32);
    } else {
      return Operands(tile, lane_);
    }
  }

  const int32_t lane_;
  const int32_t first_row_;
  const uint32_t key_tile_;
  bool transforms_;          ///< S goes the long way: factor_ is 1
  float factor_[kBands][2];  ///< from S to logits in base 2
  const Queries queries_;
  float s_[kBands][kTokenTiles][4];

 private:
  FLASHBSR_DEVICE void clear() {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[b][n][e] = 0.0f;
      }
    }
  }

  /// A chunk of 32 dims after the other, each with its scales.
  template <class Between>
  FLASHBSR_DEVICE void multiply_packed(uint32_t tile, Between&& between) {
    using Codes = PackedCodes<Traits::kArch, Traits::kHeadDim, Traits::kKv>;
    static_assert(Codes::kKeyUnit == Traits::kKeyUnit);
    between.begin();  // a thread has two copies or four
#pragma unroll
    for (int step = 0; step < kSteps; ++step) between.step(step);
    const auto keys = operands<PackedKeyFragments<Traits::kHeadDim>>(key_tile_ + tile);
    const int32_t lane = ptx::thread_index() % 32;
    const int groups = args_.params.k_scales.dim;
#pragma unroll
    for (int chunk = 0; chunk < kSteps / 2; ++chunk) {
      uint32_t a[2][kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        queries_.load(a[0][b], b * 16, 2 * chunk);
        queries_.load(a[1][b], b * 16, 2 * chunk + 1);
      }
      const int word = Codes::word_of(chunk, groups);
#pragma unroll
      for (int token = 0; token < Traits::kKvTile; token += 32) {
        uint32_t words[4];
        keys.load(words, token, chunk);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = token + 8 * i;
          uint32_t k[4];
          Codes::widen_key(words[i], scales_of(at + lane / 4)[word], chunk, lane, k);
          if constexpr (Codes::kByProducts) {
            const float* scales = scales_of(at + lane % 4 * 2) + word;
            const float scale[2] = {int4_scale(scales[0]), int4_scale(scales[Traits::kScaleWords])};
#pragma unroll
            for (int b = 0; b < kBands; ++b) {
              float sum[4] = {};
              multiply_chunk(sum, a[0][b], a[1][b], k);
#pragma unroll
              for (int e = 0; e < 4; ++e) s_[b][at / 8][e] += scale[e % 2] * sum[e];
            }
          } else {
#pragma unroll
            for (int b = 0; b < kBands; ++b) {
              multiply_chunk(s_[b][at / 8], a[0][b], a[1][b], k);
            }
          }
        }
      }
    }
  }
  FLASHBSR_DEVICE static void multiply_chunk(float (&s)[4], const uint32_t (&first)[4],
                                             const uint32_t (&second)[4], const uint32_t (&k)[4]) {
    mma_16x8x16<Traits::kArch, Traits::kKeyCompute>(s, first, k[0], k[1]);
    mma_16x8x16<Traits::kArch, Traits::kKeyCompute>(s, second, k[2], k[3]);
  }

  template <class Between>
  FLASHBSR_DEVICE void multiply_queries(int32_t begin, uint32_t tile, Between&& between) {
    if constexpr (Variant::takes_rope) {
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

  template <int kCount>
  FLASHBSR_DEVICE void multiply(const uint32_t (&a)[kBands][4], const uint32_t (&k)[kCount][2],
                                int first) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        mma_16x8x16<Traits::kArch, Traits::kKeyCompute>(s_[b][first + i], a[b], k[i][0], k[i][1]);
      }
    }
  }

  /// The same with every key turned to its position. Dims that turn together are in the same
  /// thread, two steps of the product.
  FLASHBSR_DEVICE void score_rotated(int32_t begin, uint32_t tile) {
    const Keys keys = operands<Keys>(key_tile_ + tile);
#pragma unroll 1
    for (int step = 0; step < kSteps / 2; ++step) {
      const PairedGroups steps(args_.params.rope, step, kSteps);
      uint32_t a[2][kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        queries_.load(a[0][b], b * 16, steps.first);
        queries_.load(a[1][b], b * 16, steps.second);
      }
      if (steps.turn) {
        add_steps<true>(a, keys, steps, step, begin);
      } else {
        add_steps<false>(a, keys, steps, step, begin);
      }
    }
  }

  template <bool kTurn>
  FLASHBSR_DEVICE void add_steps(const uint32_t (&a)[2][kBands][4], const Keys& keys,
                                 const PairedGroups& steps, int step, int32_t begin) {
    const int32_t lane = ptx::thread_index() % 32;
#pragma unroll
    for (int token = 0; token < Traits::kKvTile; token += Keys::kTokens) {
      uint32_t x[Keys::kTokens / 8][2], y[Keys::kTokens / 8][2];
      keys.load(x, token, steps.first);
      keys.load(y, token, steps.second);
#pragma unroll
      for (int i = 0; kTurn && i < Keys::kTokens / 8; ++i) {
        // Past the item's end keys are zeros, and the tables may end too.
        const int32_t position = min_of(begin + token + 8 * i + lane / 4, task_->item.kv_end - 1);
        const RopeRow angles(args_.params.rope, position, Traits::kHeadDim);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Zip{args_.params.rope}(x[i][half], y[i][half]);
          turn_pair(angles, Keys::column_of(step, half, lane), x[i][half], y[i][half]);
        }
      }
      multiply(a[0], x, token / 8);
      multiply(a[1], y, token / 8);
    }
  }

  FLASHBSR_DEVICE static void turn_pair(const RopeRow& angles, int column, uint32_t& x,
                                        uint32_t& y) {
    constexpr DType kType = Traits::kKeyCompute;
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
          .kv_position = position,
          .row_value = variant_.row_value(row.q_head)};
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

  const KernelArgs& args_;
  const Variant variant_;
  const PrefillRow* rows_;
  const float* scales_;
  const float* token_scales_;
  uint32_t slot_ = 0;  ///< of the tile's scales
  const Task* task_;
  Visibility* const
      visible_;  ///< what this warp's rows see, and all of the block, in shared memory
};

}  // namespace flashbsr::sm80
