// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One consumer warpgroup's 64 rows against an item's KV tiles, from the last to the first:
//
//   first    S(n-1) = Q K(n-1)                             | softmax
//   step j   S(j) = Q K(j); O += P(j+1) V(j+1)             | softmax of S(j) while P V runs
//   last     O += P(0) V(0)
//
// Warpgroups take turns to issue their products of a step, so that the softmax of one runs under
// the products of the others (ping-pong; FlashAttention-3, Shah et al., 2024). Every warpgroup
// takes n - 1 turns per item: tiles that none of its rows sees are passed over, not skipped.
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
class Mainloop {
 public:
  float o[Traits::kHeadDimVo / 2];  ///< as Scores::s, columns are dims
  float top[2];                     ///< of each row, before its factor: what exponents refer to
  float sum[2];                     ///< this thread's part of the denominators
  using Score = Scores<Traits, Variant>;
  static constexpr float kShift = Score::kShift;
  /// log2 of how far weights may grow before their reference follows. e4m3 ends at 448.
  static constexpr float kSlack = Traits::kWeightType == DType::kE4M3 ? 4.0f : 8.0f;
  Score scores;

  /// @param group  the warpgroup's number among the consumers, uniform
  FLASHBSR_DEVICE Mainloop(const KernelArgs& args, const Shared<Traits>& shared, int32_t group)
      : scores(args), shared_(shared), group_(group) {
    query_base_ = ptx::matrix_descriptor(shared.queries + group * 64 * 128, 1024, 16);
    key_base_ = ptx::matrix_descriptor(shared.keys, 1024, 16);
    value_base_ = ptx::matrix_descriptor(shared.values, 1024,
                                         Traits::kTransposesValues ? 16 : Traits::kKvTile * 128);
    // The last warpgroup opens the first one's turn.
    if (!Traits::kTransposesValues && group == Traits::kConsumers - 1)
      ptx::named_barrier_arrive(kTurn, 256);
  }

  /// Computes the item's rows, whose spans are `spans`.
  FLASHBSR_DEVICE void run(const Tile& tile, const Span* spans) {
    const int32_t count = uniform(tile.count), start = uniform(tile.start);
    const TileRange& range = tile.ranges[group_];
    TileRange sight{uniform(range.top), uniform(range.bottom), uniform(range.whole_top),
                    uniform(range.whole_bottom)};
    wary_ = kTriesWithoutMaxima ? 0 : 3;
    patience_ = 4;
    top[0] = top[1] = kNothing;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDimVo / 2; ++i) o[i] = 0.0f;
    int32_t j = count - 1;
    if (j < 0) return;
    if (sight.top < sight.bottom) {
#pragma unroll 1
      for (; j >= 0; --j) pass(j > 0);
      release_held();
      done_with_queries();
      return;
    }
    const bool simple = all_of_group(scores.begin(tile, spans, first_row(group_)));
    if (!simple) sight.whole_top = sight.bottom - 1;
#pragma unroll 1
    for (; j > sight.top; --j) pass(true);
    first(start + j * Traits::kKvTile);
    release_held();
    --j;
    // Twice at most: tiles cut at the end, whole ones, and those that a window cuts.
    do {
#pragma unroll 1
      for (; j > sight.whole_top; --j) next<true>(start + j * Traits::kKvTile);
#pragma unroll 1
      for (; j >= sight.whole_bottom; --j) next<false>(start + j * Traits::kKvTile);
      sight.whole_top = sight.bottom - 1;
      sight.whole_bottom = count;
    } while (j >= sight.bottom);
    done_with_queries();
    if constexpr (Traits::kTransposesValues) {
      add_values();
      key_.advance();
    } else {
      last();
    }
#pragma unroll 1
    for (; j >= 0; --j) pass(true);
  }

  /// Where the item's Q was: free for its O. Stores may still read it when the next item begins, so
  /// it is held until then.
  FLASHBSR_DEVICE uint32_t queries() const { return queries_; }
  FLASHBSR_DEVICE void release_held() {
    if (held_ == 0) return;
    if (threadIdx.x % 32 == 0) {
      ptx::tma_store_wait_read();
      ptx::mbarrier_arrive(held_);
    }
    held_ = 0;
  }

 private:
  using Place = typename Shared<Traits>::KvPipeline::Place;
  static constexpr int kTurn = 1;  ///< named barrier of the first warpgroup's turn
  static constexpr int kVote = 4;  ///< of its threads' vote
  static constexpr int32_t kLongestPatience = 16;
  static constexpr int kWeightSteps = Traits::kKvTile * dtype_size(Traits::kWeightType) / 32;

  /// To a uniform register: whatever steers products must be in one, or the compiler moves their
  /// descriptors from vector registers at every step.
  FLASHBSR_DEVICE static int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

  /// Whether `x` is true in all threads of the warpgroup, uniform: its warps go the same way, or their
  /// products and votes do not meet.
  FLASHBSR_DEVICE bool all_of_group(bool x) const {
    const bool any_not = ptx::named_barrier_any(kVote + group_, 128, !x);
    return !__any_sync(0xffffffffu, any_not);
  }

  /// Descriptors of a step's operands, worked out before its waits.
  struct Operands {
    uint64_t query, key, value;
  };
  FLASHBSR_DEVICE Operands operands(const Place& key, const Place& value) const {
    using ptx::descriptor_step;
    return {query_base_ + query_.stage * descriptor_step(Traits::kQueryBytes),
            key_base_ + key.stage * descriptor_step(Traits::kKeyBytes),
            value_base_ + value.stage * descriptor_step(Traits::kValueBytes)};
  }

  FLASHBSR_DEVICE void multiply_keys(const Operands& at) {
    constexpr int kSteps = Traits::kHeadDimQk * dtype_size(Traits::kType) / 32;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t in_line = k % 4 * 32;
      ptx::wgmma_shared<Traits::kType>(
          scores.s, at.query + ptx::descriptor_step(k / 4 * Traits::kRows * 128 + in_line),
          at.key + ptx::descriptor_step(k / 4 * Traits::kKvTile * 128 + in_line), k > 0);
    }
    ptx::wgmma_commit();
  }

  FLASHBSR_DEVICE void multiply_values(const Operands& at) {
#pragma unroll
    for (int k = 0; k < Traits::kKvTile / 16; ++k) {
      ptx::wgmma_registers<Traits::kWeightType>(
          o, p_[k], at.value + ptx::descriptor_step(k * 16 * 128), true);
    }
    ptx::wgmma_commit();
  }

  FLASHBSR_DEVICE void pin_weights() {
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) ptx::pin(p_[k]);
  }

  FLASHBSR_DEVICE void first(int32_t begin) {
    const Operands at = operands(key_, value_);
    shared_.query_pipeline.wait_full(query_);
    shared_.key_pipeline.wait_full(key_);
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    multiply_keys(at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
    release(shared_.key_pipeline, key_);
    soften<true>(begin);
    pack();
  }

  template <bool kMasked>
  FLASHBSR_DEVICE void step(int32_t begin) {
    key_.advance();
    const Operands at = operands(key_, value_);
    shared_.key_pipeline.wait_full(key_);
    take_turn();
    ptx::pin(scores.s);
    ptx::pin(o);
    pin_weights();
    ptx::wgmma_fence();
    multiply_keys(at);
    shared_.value_pipeline.wait_full(value_);
    ptx::wgmma_fence();
    multiply_values(at);
    give_turn();
    ptx::wgmma_wait<1>();
    ptx::pin(scores.s);
    if constexpr (!kMasked && kTriesWithoutMaxima) {
      if (wary_ > 0) {
        --wary_;
      } else if (weigh_as_before()) {
        release(shared_.key_pipeline, key_);
        finish_values();
        pack();
        return;
      } else {
        become_wary();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        multiply_keys_again(at);
      }
    }
    release(shared_.key_pipeline, key_);
    const bool grew = soften<kMasked>(begin);
    finish_values();
    pack();
    if (Variant::use_softmax && grew) rescale();
  }

  /// After the products of P V: their registers and V are free.
  FLASHBSR_DEVICE void finish_values() {
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    pin_weights();
    release(shared_.value_pipeline, value_);
    value_.advance();
  }

  FLASHBSR_DEVICE void multiply_keys_again(const Operands& at) {
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    multiply_keys(at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
  }
  FLASHBSR_DEVICE void become_wary() {
    wary_ = patience_;
    patience_ = min_of(2 * patience_, kLongestPatience);
  }

  FLASHBSR_DEVICE void last() {
    const Operands at = operands(key_, value_);
    shared_.value_pipeline.wait_full(value_);
    ptx::pin(o);
    pin_weights();
    ptx::wgmma_fence();
    multiply_values(at);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    pin_weights();
    release(shared_.value_pipeline, value_);
    value_.advance();
    key_.advance();
  }

  template <bool kMasked>
  FLASHBSR_DEVICE void next(int32_t begin) {
    if constexpr (Traits::kTransposesValues) {
      short_step<kMasked>(begin);
    } else {
      step<kMasked>(begin);
    }
  }

  /// A step in products of e4m3: the sum of a tile's P V takes the registers of S, one after the
  /// other, and other warpgroups' products run meanwhile.
  template <bool kMasked>
  FLASHBSR_DEVICE void short_step(int32_t begin) {
    add_values();
    key_.advance();
    const Operands at = operands(key_, value_);
    shared_.key_pipeline.wait_full(key_);
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    multiply_keys(at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
    if constexpr (!kMasked) {
      if (wary_ > 0) {
        --wary_;
      } else if (soften_as_before()) {
        return release(shared_.key_pipeline, key_);
      } else {
        become_wary();
        multiply_keys_again(at);
      }
    }
    release(shared_.key_pipeline, key_);
    const bool grew = soften<kMasked>(begin);
    pack();
    if (grew) rescale();
  }

  /// Weights of a tile that all rows see all of, against the references as they are: without
  /// maxima, which take a tenth of the time. False: a weight of the warpgroup outgrew its type, or
  /// there was no reference; the tile's S is to be computed again.
  FLASHBSR_DEVICE bool soften_as_before() {
    float (&s)[4 * Score::kGroups] = scores.s;
    float base[2], more[2][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = kShift - top[h] * scores.factor[h];
#pragma unroll
    for (int i = 0; i < 4 * Score::kGroups; ++i) {
      const int h = i / 2 % 2;
      s[i] = ptx::exp2(__builtin_fmaf(s[i], scores.factor[h], base[h]));
      more[h][i % 2] += s[i];
    }
    pack();
    // A byte of 256 or above, NaN too, carries into its top bit.
    uint32_t outgrown = 0;
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) outgrown |= p_[k][i] + 0x08080808u;
    }
    if (!all_of_group(!(outgrown & 0x80808080u))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += more[h][0] + more[h][1];
    return true;
  }

  /// The same for weights of 16 bits, before they are packed: four of a thread's sums tell.
  FLASHBSR_DEVICE bool weigh_as_before() {
    float (&s)[4 * Score::kGroups] = scores.s;
    float base[2], more[2][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) base[h] = kShift - top[h] * scores.factor[h];
#pragma unroll
    for (int i = 0; i < 4 * Score::kGroups; ++i) {
      const int h = i / 2 % 2;
      s[i] = ptx::exp2(__fmaf_rn(s[i], scores.factor[h], base[h]));
      more[h][i % 2] += s[i];
    }
    bool outgrown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      more[h][0] += more[h][1];
      // NaN too, but not what lies in the place of a missing row.
      outgrown = outgrown || (scores.factor[h] > 0.0f && !(more[h][0] < kMostWeight));
    }
    if (!all_of_group(!outgrown)) return false;
    sum[0] += more[0][0];
    sum[1] += more[1][0];
    return true;
  }
  static constexpr float kMostWeight = 32768.0f;  ///< fp16 ends at 65504
  /// Two consumers' kernels have no registers for it.
  static constexpr bool kTriesWithoutMaxima =
      !kHasHooks<Variant> && Traits::kConsumers == 3 && dtype_size(Traits::kWeightType) == 2;

  /// O += P V through sums of one tile: products of e4m3 add up in 14 bits and truncate, so that
  /// what is lost grows with what is there.
  FLASHBSR_DEVICE void add_values() {
    const Operands at = operands(key_, value_);
    shared_.value_pipeline.wait_full(value_);
    float low[kPart], high[kPart];
    ptx::pin(low);
    ptx::pin(high);
    pin_weights();
    ptx::wgmma_fence();
    multiply_part(low, at.value);
    multiply_part(high, at.value + ptx::descriptor_step(kPart * 2 * 128));
    ptx::wgmma_wait<1>();
    ptx::pin(low);
#pragma unroll
    for (int i = 0; i < kPart; ++i) o[i] += low[i];
    ptx::wgmma_wait<0>();
    ptx::pin(high);
    pin_weights();
    release(shared_.value_pipeline, value_);
    value_.advance();
#pragma unroll
    for (int i = 0; i < kPart; ++i) o[kPart + i] += high[i];
  }
  static constexpr int kPart = Traits::kHeadDimVo / 4;  ///< registers of half the dims
  FLASHBSR_DEVICE void multiply_part(float (&sum_of_tile)[kPart], uint64_t value) {
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
      ptx::wgmma_registers<Traits::kWeightType>(sum_of_tile, p_[k],
                                                value + ptx::descriptor_step(k * 32), k > 0);
    }
    ptx::wgmma_commit();
  }

  FLASHBSR_DEVICE void pass(bool turn) {
    shared_.key_pipeline.wait_full(key_);
    release(shared_.key_pipeline, key_);
    key_.advance();
    if (turn && !Traits::kTransposesValues) {
      take_turn();
      give_turn();
    }
    shared_.value_pipeline.wait_full(value_);
    release(shared_.value_pipeline, value_);
    value_.advance();
  }

  FLASHBSR_DEVICE void take_turn() const { ptx::named_barrier_sync(kTurn + group_, 256); }
  FLASHBSR_DEVICE void give_turn() const {
    const int32_t next = group_ == Traits::kConsumers - 1 ? 0 : group_ + 1;
    ptx::named_barrier_arrive(kTurn + next, 256);
  }
  template <class Ring, class At>
  FLASHBSR_DEVICE static void release(const Ring& ring, const At& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
  }
  FLASHBSR_DEVICE void done_with_queries() {
    if constexpr (Traits::kStoreBoxes) {
      queries_ = shared_.queries + query_.stage * Traits::kQueryBytes;
      held_ = shared_.query_pipeline.empty(query_.stage);
    } else {
      release(shared_.query_pipeline, query_);
    }
    query_.advance();
  }

  /// S becomes weights, still in fp32. True: O must be rescaled by shrink_.
  template <bool kMasked>
  FLASHBSR_DEVICE bool soften(int32_t begin) {
    if constexpr (kMasked || kHasHooks<Variant>) scores.template transform<kMasked>(begin);
    if constexpr (!Variant::use_softmax) return false;
    float (&s)[4 * Score::kGroups] = scores.s;
    float new_top[2], factor[2], base[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = scores.factor[h];
      // Not 0: it meets infinities.
      if constexpr (kMasked) factor[h] = ptx::max(fabsf(factor[h]), 1e-30f);
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
    const bool grew = __any_sync(0xffffffffu, (new_top[0] - top[0]) * factor[0] > kSlack ||
                                                  (new_top[1] - top[1]) * factor[1] > kSlack);
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
          p_[k][i] = ptx::pack4_e4m3(s[0], s[1], s[4], s[5]);
        } else {
          const float* s = scores.s + 8 * k + 2 * i;
          p_[k][i] = ptx::pack2<Traits::kWeightType>(s[0], s[1]);
        }
      }
    }
  }

  FLASHBSR_DEVICE void rescale() {
#pragma unroll
    for (int i = 0; i < Traits::kHeadDimVo / 2; ++i) o[i] *= shrink_[i / 2 % 2];
  }

  const Shared<Traits>& shared_;
  const int32_t group_;
  uint64_t query_base_, key_base_, value_base_;
  Place key_, value_;
  typename Shared<Traits>::QueryPipeline::Place query_;
  uint32_t queries_ = 0;
  uint32_t held_ = 0;  ///< the barrier to arrive at; 0: none
  uint32_t p_[kWeightSteps][4];
  float shrink_[2];
  /// Tiles until soften_as_before is tried again, and how many after it fails the next time. The
  /// first ones of an item are where maxima grow.
  int32_t wary_, patience_;
};

}  // namespace flashbsr::sm90a
