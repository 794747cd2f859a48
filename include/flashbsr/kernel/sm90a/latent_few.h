// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Latent attention of few rows on Hopper, 16 or fewer: the heads of a rank, or of 128 some in each
// item where requests are few and short. As rows of products they would leave three quarters of
// each empty. Here they are columns:
//
//   S^T = K Q^T     64 tokens x 16 heads, K from registers
//   O^T += V^T P^T  64 dims x 16 heads, eight times, V from registers
//
// A tile is read twice by ldmatrix, as rows and transposed; codes are widened on the way. Each of
// two warpgroups has O of all dims and takes every other tile, by references of its own: they
// meet at an item's end. Weights go through shared memory, 2 KB of a tile, as columns of the
// product. docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/sm90a/few_queries.h>
#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>
#include <flashbsr/ptx/wgmma.h>

namespace flashbsr::sm90a {

/// One of the warpgroups. A thread has heads 8 j + 2 (lane % 4) + e, which are its columns
/// 2 j + e; of S tokens lane / 4 + 8 h of its warp's 16; of O two dims of its warp's 16 in each 64.
/// Element 4 j + 2 h + e of a product, as wgmma has it.
template <class Traits>
class FewMainloop {
 public:
  static constexpr int kColumns = 4;
  static constexpr int kParts = Traits::kHeadDimVo / 64;  ///< of O: dims of a product
  /// log2 of what weights are multiplied by, to keep small ones in their type.
  static constexpr float kShift = 7.0f;
  /// Reference of a head that has seen nothing yet. Finite, so that no case needs a look at it.
  static constexpr float kNone = 1e30f;

  float o[kParts][8];
  float base[kColumns];  ///< of columns: weights are 2^(logit + base)
  float sum[kColumns];   ///< this thread's part of the denominators

  FLASHBSR_DEVICE FewMainloop(const KernelArgs& args, const Shared<Traits>& shared, int32_t group)
      : args_(args),
        shared_(shared),
        group_(group),
        weights_(shared.queries + Traits::kWeightOffset + group * (2 * Traits::kWeightBytes)),
        units_(shared.queries + Traits::kStateOffset) {}

  /// Computes this warpgroup's tiles of an item, whose rows see `spans`.
  FLASHBSR_DEVICE void run(const Tile& tile, const Span* spans) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int k = 0; k < 8; ++k) o[i][k] = 0.0f;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      base[c] = kNone;
      sum[c] = 0.0f;
    }
    const int32_t count = uniform(tile.count);
    if (count == 0) return;
    const typename Shared<Traits>::QueryPipeline::Place query{0, items_ & 1};
    shared_.query_pipeline.wait_full(query);
    if constexpr (Traits::kCodes) {
      fit_few_queries<Traits>(shared_.queries, units_, ptx::thread_index() - 128);
      meet();
      // Behind a wait alone ptxas takes what products ask for as values of each lane (49 R2UR).
      ptx::named_barrier_sync(1 + group_, 128);
    }
    begin(tile);
    const int32_t whole_top = uniform(tile.ranges[0].whole_top),
                  whole_bottom = uniform(tile.ranges[0].whole_bottom), start = uniform(tile.start);
#pragma unroll 1
    for (int32_t i = group_; i < count; i += Traits::kConsumers) {
      const int32_t j = count - 1 - i;
      visit(Place::after(first_ + i), start + j * Traits::kKvTile,
            j > whole_top || j < whole_bottom ? spans : nullptr);
    }
    if (lane() == 0) shared_.query_pipeline.release(query);
    first_ += count;
    ++items_;
  }

  /// Packed row of the item that a column is.
  FLASHBSR_DEVICE static int32_t row_of(int column) {
    return column / 2 * 8 + lane() % 4 * 2 + column % 2;
  }
  /// Which dim element 4 j + 2 h + e of o[i] is: codes are loaded in pairs.
  FLASHBSR_DEVICE static int32_t dim_of(int i, int h) {
    const int32_t row = lane() / 4;
    return 64 * i + 16 * warp() + (Traits::kCodes ? 2 * row + h : row + 8 * h);
  }

  /// Shared address of a row's number of this warpgroup's: of each warp, then the reference.
  FLASHBSR_DEVICE uint32_t state(int32_t which, int32_t row) const {
    return state_of(group_, which, row);
  }
  FLASHBSR_DEVICE uint32_t state_of(int32_t group, int32_t which, int32_t row) const {
    return units_ + 4 * ((1 + group * 5 + which) * Traits::kRows + row);
  }
  /// All consumers come by, each thread by itself: a race detector counts named barriers, and those
  /// of a warpgroup (below) are others than the other's.
  FLASHBSR_DEVICE void meet() {
    const uint32_t barrier = shared_.queries + Traits::kMeetOffset;
    ptx::mbarrier_arrive(barrier);
    ptx::mbarrier_wait<kArch>(barrier, meetings_++ & 1);
  }
  FLASHBSR_DEVICE static int32_t warp() { return ptx::thread_index() % 128 / 32; }
  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }

 private:
  using Place = typename Shared<Traits>::KvPipeline::Place;
  /// Steps of depth of K or V that become fragments at once.
  static constexpr int kBatch = 8, kBatches = Traits::kHeadDimVo / 16 / kBatch;
  using Fragments = uint32_t[kBatch][4];
  static constexpr int kTailSteps = 4, kElementBytes = dtype_size(Traits::kKvType);
  static constexpr int kSpan = kBatch / 4;  ///< parts of O that a batch of V is of
  static constexpr int kSetBytes = Traits::kRows * Traits::kKvTile * 2;  ///< of weights
  static constexpr int kSums = Traits::kRowScales ? 3 : 2;               ///< of S
  /// What the weights of a thread may add up to: fp16 ends at 65504. With scales they stay finite
  /// below 16 of these, which is latents of 7168; the largest has all bits of fp16 from scales of
  /// 2^-21 on.
  static constexpr float kMost = Traits::kRowScales ? 4096.0f : 32768.0f;

  FLASHBSR_DEVICE static int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

  /// Factors from S to logits in base 2.
  FLASHBSR_DEVICE void begin(const Tile& tile) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int32_t r = row_of(c);
      live_[c] = r < tile.item.row_count;
      const int32_t head = RowName(args_, tile.item, live_[c] ? r : 0).q_head;
      factor_[c] = logit_scale(args_.params, head, tile.item.kv_head) * kLog2e;
      if constexpr (Traits::kCodes) {
        factor_[c] *= __uint_as_float(ptx::load_shared(units_ + 4 * r));
      }
    }
  }

  /// A tile at KV position `begin`.
  /// @param spans  of the rows, where some do not see all of it
  FLASHBSR_DEVICE void visit(const Place& at, int32_t begin, const Span* spans) {
    const uint32_t keys = shared_.keys + at.stage * Traits::kKeyBytes;
    shared_.key_pipeline.wait_full(at);
    Fragments a[2];
    float x[8];
    multiply_keys(a, keys, x);
    // The first of V are on their way to registers while weights are made.
#pragma unroll
    for (int b = 0; b < 2; ++b) load_values(a[b], keys, b);
    to_logits(x, begin, spans);
    float made[kColumns];
    const uint32_t weights = weights_ + (turn_++ & 1) * Traits::kWeightBytes;
    const bool fits = make(x, made, keys, weights);
    // By a shuffle: products behind a branch that lanes might take apart wait for each other.
    if (uniform(ptx::named_barrier_any(1 + group_, 128, !fits))) [[unlikely]] {
      raise(x);
      make(x, made, keys, weights);
      ptx::named_barrier_sync(1 + group_, 128);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] += made[c];
    multiply_values(a, keys, weights);
    __syncwarp();
    if (lane() == 0) shared_.key_pipeline.release(at);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kParts; ++i) ptx::pin(o[i]);
  }

  /// S^T = K Q^T. Fragments of the next products are made while those before are under way. Where
  /// each 128 dims of a token have a scale, sums of two of them are there at a time, and the
  /// tail's.
  FLASHBSR_DEVICE void multiply_keys(Fragments (&a)[2], uint32_t keys, float (&x)[8]) {
    float s[kSums][8];
    const uint64_t query = ptx::matrix_descriptor(shared_.queries, 1024, 16);
#pragma unroll
    for (int b = 0; b <= kBatches; ++b) {  // the tail is the last
      Fragments& now = a[b % 2];
      ptx::wgmma_wait<1>();  // of what had these fragments before
      if (b < kBatches) {
        load_keys(now, keys, b);
      } else {
        load_tails(now, keys);
      }
      if (Traits::kRowScales && b == kBatches / 2) {
        finish_sums(s);
        add_groups<0>(x, s, keys);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::pin(now[n]);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < (b < kBatches ? kBatch : kTailSteps); ++n) {
        const int i = b * kBatch + n;  // of all steps
        const uint64_t columns =
            query + ptx::descriptor_step(i / 4 * (Traits::kRows * 128) + i % 4 * 32);
        if (b < kBatches) {
          ptx::wgmma_registers_columns<Traits::kType>(s[Traits::kRowScales ? i / 8 % 2 : n % 2],
                                                      now[n], columns,
                                                      Traits::kRowScales ? i % 8 > 0 : i > 1);
        } else {
          ptx::wgmma_registers_columns<Traits::kTailType>(s[Traits::kRowScales ? 2 : n % 2], now[n],
                                                          columns, n > 0 || !Traits::kRowScales);
        }
      }
      ptx::wgmma_commit();
    }
    finish_sums(s);
    if constexpr (Traits::kRowScales) {
      add_groups<2>(x, s, keys);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = s[0][i] + s[1][i];
    }
  }
  FLASHBSR_DEVICE static void finish_sums(float (&s)[kSums][8]) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) ptx::pin(s[i]);
  }
  /// Sums of dims [128 kFirst, 128 kFirst + 256), by their scales, and the tail's behind the last.
  template <int kFirst>
  FLASHBSR_DEVICE void add_groups(float (&x)[8], const float (&s)[kSums][8], uint32_t keys) const {
    float2 scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = ptx::load_shared_pair(scales_of(keys, h) + kFirst * 4);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 by = scale[i / 2 % 2];
      const float before = kFirst == 0 ? 0.0f : x[i] + s[kSums - 1][i];
      x[i] = __fmaf_rn(s[1][i], by.y, __fmaf_rn(s[0][i], by.x, before));
    }
  }
  /// Shared address of those of this thread's token `h`.
  FLASHBSR_DEVICE static uint32_t scales_of(uint32_t keys, int h) {
    return keys + (16 * warp() + lane() / 4 + 8 * h) * Traits::kRowStride + Traits::kLatentBytes;
  }

  /// A lane's row of the warp's 16 tokens, and which 16 bytes of 32.
  FLASHBSR_DEVICE static uint32_t row_of_keys(uint32_t keys) {
    return keys + (16 * warp() + lane() % 16) * Traits::kRowStride + lane() / 16 * 16;
  }
  /// Batch `b` of their dims.
  FLASHBSR_DEVICE static void load_keys(Fragments& a, uint32_t keys, int b) {
    load_rows<kBatch, Traits::kCodes>(a, row_of_keys(keys) + b * kBatch * 16 * kElementBytes);
  }
  FLASHBSR_DEVICE static void load_tails(Fragments& a, uint32_t keys) {
    constexpr bool kCodes = Traits::kCodes && !Traits::kRowScales;  // those of packed rows are bf16
    load_rows<kTailSteps, kCodes>(a, row_of_keys(keys) + Traits::kTailOffset);
  }
  /// Along rows; of codes each load has two steps of depth.
  template <int kSteps, bool kCodes>
  FLASHBSR_DEVICE static void load_rows(Fragments& a, uint32_t from) {
    if constexpr (kCodes) {
#pragma unroll
      for (int n = 0; n < kSteps / 2; ++n) {
        uint32_t r[4];
        ptx::ldmatrix_x4(r, from + n * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t (&to)[4] = a[2 * n + i / 2];
          ptx::widen_bytes<kArch, Traits::kKvType, DType::kF16>(r[i], to[i % 2], to[2 + i % 2]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kSteps; ++n) ptx::ldmatrix_x4(a[n], from + n * 32);
    }
  }

  /// Batch `b` of the warp's 16 dims of each 64, four steps of tokens for each.
  FLASHBSR_DEVICE static void load_values(Fragments& a, uint32_t keys, int b) {
    if constexpr (Traits::kCodes) {
      load_value_codes(a, keys + lane() * Traits::kRowStride + 16 * warp() + b * kSpan * 64);
    } else {
      // Eight tokens and eight dims by eight lanes: dims first, then tokens.
      const uint32_t from = keys + (lane() / 16 * 8 + lane() % 8) * Traits::kRowStride +
                            lane() / 8 % 2 * 16 + 32 * warp() + b * kSpan * 128;
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {
        ptx::ldmatrix_x4_trans(a[n], from + n / 4 * 128 + n % 4 * (16 * Traits::kRowStride));
      }
    }
  }
  FLASHBSR_DEVICE static void load_value_codes(Fragments& a, uint32_t from) {
#pragma unroll
    for (int n = 0; n < kBatch / 2; ++n) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, from + n / 2 * 64 + n % 2 * (32 * Traits::kRowStride));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // [token 2t: dims d, d + 1][token 2t + 1: the same]
        uint32_t (&to)[4] = a[2 * n + i / 2];
        const uint32_t pairs = ptx::permute_bytes(r[i], 0, 0x3120);
        ptx::widen_bytes<kArch, Traits::kKvType, DType::kF16>(pairs, to[i % 2 * 2],
                                                              to[i % 2 * 2 + 1]);
      }
    }
  }

  /// S becomes logits in base 2; -infinity where a row does not see, or is not there.
  FLASHBSR_DEVICE void to_logits(float (&x)[8], int32_t begin, const Span* spans) const {
    const int32_t token = begin + 16 * warp() + lane() / 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& logit = x[c / 2 * 4 + 2 * h + c % 2];
        logit = live_[c] ? logit * factor_[c] : -infinity();
        if (!spans) continue;
        const Span seen = spans[row_of(c)];
        if (token + 8 * h < seen.begin || token + 8 * h >= seen.end) logit = -infinity();
      }
    }
  }

  /// Weights of the logits to shared memory, as columns of products. False: some do not fit.
  FLASHBSR_DEVICE bool make(const float (&x)[8], float (&made)[kColumns], uint32_t keys,
                            uint32_t weights) const {
    [[maybe_unused]] float scales[2][4];
    if constexpr (Traits::kRowScales) {
#pragma unroll
      for (int h = 0; h < 2; ++h) ptx::load_shared(scales_of(keys, h), scales[h]);
    }
    float w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = ptx::exp2(x[i] + base[i / 4 * 2 + i % 2]);
    bool fits = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      made[c] = w[c / 2 * 4 + c % 2] + w[c / 2 * 4 + 2 + c % 2];
      fits = fits && made[c] < kMost;
    }
    const int32_t head = lane() / 16 * 8 + lane() % 8, chunk = 2 * warp() + lane() / 8 % 2;
    const uint32_t to = weights + head * 128 + ((chunk ^ head & 7) << 4);
#pragma unroll
    for (int g = 0; g < Traits::kWeightSets; ++g) {
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = Traits::kRowScales ? scales[i % 2][g] : 1.0f;
        p[i] = ptx::pack2<Traits::kType>(w[2 * i] * by, w[2 * i + 1] * by);
      }
      ptx::stmatrix_x4_trans(to + g * kSetBytes, p);
    }
    ptx::fence_async_proxy();
    return fits;
  }

  /// References that the tile's weights fit. Seldom but in an item's first tile.
  FLASHBSR_DEVICE void raise(const float (&x)[8]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = ptx::max(x[c / 2 * 4 + c % 2], x[c / 2 * 4 + 2 + c % 2]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        top = ptx::max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
      }
      if (lane() < 4) ptx::store_shared(state(warp(), row_of(c)), __float_as_uint(top));
    }
    ptx::named_barrier_sync(1 + group_, 128);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float top = -infinity();
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        top = ptx::max(top, __uint_as_float(ptx::load_shared(state(w, row_of(c)))));
      }
      const float lower = ptx::min(base[c], kShift - top);
      const float shrink = ptx::exp2(lower - base[c]);
      base[c] = lower;
      sum[c] *= shrink;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        o[i][c / 2 * 4 + c % 2] *= shrink;
        o[i][c / 2 * 4 + 2 + c % 2] *= shrink;
      }
    }
  }

  /// O^T += V^T P^T. The first two batches of V are in registers.
  FLASHBSR_DEVICE void multiply_values(Fragments (&a)[2], uint32_t keys, uint32_t weights) {
    const uint64_t columns = ptx::matrix_descriptor(weights, 1024, 16);
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      Fragments& now = a[b % 2];
      if (b > 1) {
        ptx::wgmma_wait<1>();
        load_values(now, keys, b);
      }
#pragma unroll
      for (int n = 0; n < kBatch; ++n) ptx::pin(now[n]);
#pragma unroll
      for (int n = 0; n < kSpan; ++n) ptx::pin(o[b * kSpan + n]);
      ptx::wgmma_fence();
#pragma unroll
      for (int n = 0; n < kBatch; ++n) {  // sums by turns: a product waits for that before it
        const int part = b * kSpan + n % kSpan, step = n / kSpan;
        const int set = Traits::kRowScales ? part / 2 : 0;
        ptx::wgmma_registers_columns<Traits::kType>(
            o[part], now[n % kSpan * 4 + step],
            columns + ptx::descriptor_step(set * kSetBytes + step * 32), true);
      }
      ptx::wgmma_commit();
    }
  }

  const KernelArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t group_;
  const uint32_t weights_, units_;
  uint32_t first_ = 0, items_ = 0;  ///< tiles, and items with tiles, before this one
  uint32_t meetings_ = 0;
  uint32_t turn_ = 0;  ///< which of two places the next weights take: others read the last
  float factor_[kColumns];
  bool live_[kColumns];
};

}  // namespace flashbsr::sm90a
