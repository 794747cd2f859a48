// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Multi-head latent attention (DeepSeek-V2, 2024) on Hopper: K is a latent and a tail, V the same
// latent; a tile is read once and used twice. O of 64 rows and 512 dims is all the registers of two
// warpgroups: each has half of the dims, and both need the weights of every tile. So they take
// tiles in turn, and hand their weights over in shared memory, where the tile's tail was:
//
//   even   S(0) = Q K(0) | softmax | P(0) ->   | O += P(0) V(0)  O += P(1) V(1) | S(2) = ...
//   odd    S(1) = Q K(1) behind S(0)           | O += P(0) V(0)
//                                   softmax | P(1) -> | O += P(1) V(1)          | S(3) = ...
//
// One softmax runs under the products of the other tile, the other under P(0) V(0). References
// (softmax.h) go along with the weights: where one grew, both rescale. docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/sm90a/fit_queries.h>
#include <flashbsr/kernel/sm90a/softmax.h>

namespace flashbsr::sm90a {

/// One of the two warpgroups: all rows of an item, half of the dims.
template <class Traits, class Variant>
class LatentMainloop : public Softmax<Traits, Variant> {
  using Base = Softmax<Traits, Variant>;

 public:
  using Base::o, Base::p, Base::scores, Base::sum, Base::top;

  FLASHBSR_DEVICE LatentMainloop(const KernelArgs& args, const Shared<Traits>& shared,
                                 int32_t group)
      : Base(args),
        shared_(shared),
        group_(group),
        references_(shared.queries + Traits::kStateOffset),
        handed_(shared.queries + Traits::kHandOffset),
        query_(ptx::matrix_descriptor(shared.queries, 1024, 16)),
        key_(ptx::matrix_descriptor(shared.keys, 1024, 16)),
        tail_(ptx::matrix_descriptor(shared.values, 1024, 16)),
        value_(ptx::matrix_descriptor(
            shared.keys + group * (Traits::kOutputDims / 64) * Traits::kKvTile * 128, 1024,
            Traits::kKvTile * 128)) {}

  /// Computes the item's rows, whose spans are `spans`.
  FLASHBSR_DEVICE void run(const Tile& tile, const Span* spans) {
    const int32_t count = uniform(tile.count);
    Base::clear();
    if (count == 0) return;
    count_ = count;
    start_ = uniform(tile.start);
    bool simple = scores.begin(tile, spans, first_row(0));
    simple = scores.scaled_up() && !scores.scaled_by_head();
    whole_top_ = simple ? uniform(tile.ranges[0].whole_top) : -1;
    whole_bottom_ = uniform(tile.ranges[0].whole_bottom);
    shared_.query_pipeline.wait_full(query());
    if constexpr (Traits::kFitsQueries) fit();
    if (group_ == 0) {
      run_even();
    } else {
      run_odd();
    }
    steps_ ^= 2;
    add_sums();
  }

  /// Where the item is, and the next one.
  FLASHBSR_DEVICE auto item_place() const {
    return Shared<Traits>::TilePipeline::Place::after(steps_ >> 2);
  }
  FLASHBSR_DEVICE void advance() { steps_ += 4; }

 private:
  static_assert(Traits::kQueryStages == 1);
  using Place = typename Shared<Traits>::KvPipeline::Place;
  static constexpr int kTurn =
      4;  ///< a named barrier: the odd one's Q K comes behind the even one's
  static constexpr int kFitted = 5;  ///< another: both warpgroups have fitted their rows of Q
  static constexpr int kBoth = 256;  ///< threads
  /// Beside wideners S and weights at once would spill.
  static constexpr bool kKeepsReferences = !kHasHooks<Variant> && Traits::kWideners == 0;

  /// ptxas takes no product whose registers are more than the launch has: beside wideners a half.
  static constexpr int kProducts = Traits::kLaunchRegisters < Traits::kOutputDims / 2 + 32 ? 2 : 1;
  static constexpr int kProductFloats = Traits::kOutputDims / 2 / kProducts;

  /// Part `n` of O.
  FLASHBSR_DEVICE auto output(int n) -> float (&)[kProductFloats] {
    return reinterpret_cast<float (&)[kProductFloats]>(o[n * kProductFloats]);
  }
  /// To V of the 16 tokens of step `k` and the dims of part `n`.
  FLASHBSR_DEVICE static constexpr uint64_t value_step(int k, int n) {
    return ptx::descriptor_step(k * 16 * 128 + n * (kProductFloats / 32) * Traits::kKvTile * 128);
  }

  FLASHBSR_DEVICE static int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffu, x, 0); }
  FLASHBSR_DEVICE auto query() const {
    return typename Shared<Traits>::QueryPipeline::Place{0, steps_ >> 1 & 1};
  }

  /// Q becomes fp16, half of the rows by each warpgroup.
  FLASHBSR_DEVICE void fit() {
    const uint32_t units = shared_.queries + Traits::kFitOffset;
    fit_queries<Traits>(shared_.queries, units, group_);
    ptx::named_barrier_sync(kFitted, kBoth);
    float unit[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unit[h] = __uint_as_float(ptx::load_shared(units + 4 * (first_row(0) + 8 * h)));
    }
    scores.multiply(unit);
  }

  /// Tiles 0, 2, ... of an item, from its last one.
  FLASHBSR_DEVICE void run_even() {
#pragma unroll 1
    for (int32_t i = 0; i < count_; i += 2) {
      multiply_keys<0>(at_, begin_of(i), i + 1 < count_);
      if (i + 2 >= count_) release_queries();
      const bool grew = weigh(at_, i);
      hand_over();
      if (grew) Base::rescale();
      multiply_own(at_);
      finish_values(false);
      if (i + 1 == count_) return;
      if (follow()) Base::rescale();
      multiply_other(at_);
      finish_values(true);
    }
  }

  /// Tiles 1, 3, ...
  FLASHBSR_DEVICE void run_odd() {
#pragma unroll 1
    for (int32_t i = 1; i < count_; i += 2) {
      Place own = at_;
      own.advance();
      ptx::named_barrier_sync(kTurn, kBoth);
      multiply_keys<Traits::kTurnsParts>(own, begin_of(i));
      if (i + 2 >= count_) release_queries();
      if (follow()) Base::rescale();
      multiply_other(at_);
      const bool grew = weigh(own, i);
      finish_values(true);  // the product is done by now, and the next tile waits for the room
      hand_over();
      if (grew) Base::rescale();
      multiply_own(at_);
      finish_values(false);
    }
    if (count_ == 1) release_queries();
    if (count_ % 2 == 0) return;
    if (follow()) Base::rescale();
    multiply_other(at_);
    finish_values(true);
  }

  FLASHBSR_DEVICE int32_t tile_of(int32_t i) const { return count_ - 1 - i; }
  FLASHBSR_DEVICE int32_t begin_of(int32_t i) const {
    return start_ + tile_of(i) * Traits::kKvTile;
  }
  FLASHBSR_DEVICE bool masked(int32_t i) const {
    return tile_of(i) > whole_top_ || tile_of(i) < whole_bottom_;
  }

  /// S = Q K^T of the tile at `at`, at KV position `begin`.
  /// @tparam kFirst  the half of the dims to begin with, which comes first: nth_part()
  /// @param gives    lets the other warpgroup begin with its products
  template <int kFirst>
  FLASHBSR_DEVICE void multiply_keys(const Place& at, int32_t begin, bool gives = false) {
    using ptx::descriptor_step;
    const uint64_t key = key_ + at.stage * descriptor_step(Traits::kKeyBytes);
    const uint64_t tail = tail_ + at.stage * descriptor_step(Traits::kValueBytes);
    constexpr int kColumns = Traits::kLandingColumnsQk;
    shared_.key_pipeline.wait_full(half(at, kFirst));
    look_ahead(half(at, kFirst).stage, begin);
    ptx::pin(scores.s);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < 4 * kColumns; ++n) {
      if (n == 2 * kColumns) {
        shared_.key_pipeline.wait_full(half(at, 1 - kFirst));
        ptx::wgmma_fence();
      }
      const int i = (n + 2 * kColumns * kFirst) % (4 * kColumns);
      const uint32_t step = i % 4 * 32;
      ptx::wgmma_shared<Traits::kType>(
          scores.s, query_ + descriptor_step(i / 4 * Traits::kRows * 128 + step),
          key + descriptor_step(i / 4 * Traits::kKvTile * 128 + step), n > 0);
    }
    shared_.value_pipeline.wait_full(at);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::wgmma_shared<Traits::kTailType>(
          scores.s, query_ + descriptor_step(kColumns * Traits::kRows * 128 + i * 32),
          tail + descriptor_step(i * 32), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (gives) ptx::named_barrier_arrive(kTurn, kBoth);
    ptx::pin(scores.s);
  }

  /// What a mask says of the tile.
  FLASHBSR_DEVICE void look_ahead(int32_t stage, int32_t begin) {
    if constexpr (kMasksByBits<Variant>) {
      if (scores.sorts()) {
        uint32_t kinds = 0;
        if (ptx::thread_index() % 32 == 0) kinds = ptx::load_shared(shared_.kinds + 4 * stage);
        scores.set_cut(uniform(static_cast<int32_t>(kinds)) & kHides);
      }
    }
    scores.look_ahead(begin);
  }

  /// O += P V with this warpgroup's weights, of its own tile.
  FLASHBSR_DEVICE void multiply_own(const Place& at) {
    const uint64_t value = value_ + at.stage * ptx::descriptor_step(Traits::kKeyBytes);
    ptx::pin(o);
    Base::pin_weights();
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Base::kWeightSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        ptx::wgmma_registers<Traits::kType>(output(n), p[k], value + value_step(k, n), true);
      }
    }
    ptx::wgmma_commit();
  }

  /// O += P V with the other's, which it has handed over.
  FLASHBSR_DEVICE void multiply_other(const Place& at) {
    using ptx::descriptor_step;
    const uint64_t value = value_ + at.stage * descriptor_step(Traits::kKeyBytes);
    const uint64_t weights = tail_ + at.stage * descriptor_step(Traits::kValueBytes);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Base::kWeightSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        ptx::wgmma_shared_rows<Traits::kType>(output(n), weights + descriptor_step(k * 32),
                                              value + value_step(k, n), true);
      }
    }
    ptx::wgmma_commit();
  }

  /// S of tile `i` becomes weights, packed, here and where the tile's tail was. True: O must be
  /// rescaled by shrink_. Where rows see all of it their references stay, if the weights of a warp
  /// allow it: the other warpgroup waits for maxima, too, and long calls are 3 % shorter without.
  FLASHBSR_DEVICE bool weigh(const Place& at, int32_t i) {
    const int32_t lane = ptx::thread_index() % 32, warp = ptx::thread_index() % 128 / 32;
    const int32_t row = lane % 16, high = lane / 16;
    const uint32_t base = shared_.values + at.stage * Traits::kValueBytes + (warp * 16 + row) * 128;
    const auto write = [&](int k) {
      ptx::stmatrix_x4(base + (((2 * k + high) ^ (row & 7)) << 4), p[k]);
    };
    if constexpr (kKeepsReferences) {
      if (i > 0 && !masked(i)) {
        if (__all_sync(0xffffffffu, Base::pack_as_before(write))) {
          Base::accept();
          return false;
        }
      }
    }
    const bool grew = Base::soften(begin_of(i), masked(i));
    Base::pack();
#pragma unroll
    for (int k = 0; k < Base::kWeightSteps; ++k) write(k);
    return grew;
  }

  /// The other may read the weights, and what they refer to. Every thread says that it has written:
  /// race detectors see no further, nor that far through named barriers.
  FLASHBSR_DEVICE void hand_over() {
    __syncwarp();  // all lanes have read the other's
    if (ptx::thread_index() % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::store_shared(references_ + 4 * (first_row(0) + 8 * h), __float_as_uint(top[h]));
      }
    }
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(handed_ + 8 * group_);
  }

  /// Waits for the other's weights and takes their references. True: O must be rescaled by shrink_.
  FLASHBSR_DEVICE bool follow() {
    // No __syncwarp here: behind one, ptxas takes the products' descriptors for values of each
    // lane, 60 R2UR between their instructions. The vote below brings the lanes together.
    ptx::mbarrier_wait<kArch>(handed_ + 8 * (1 - group_), steps_ & 1);
    steps_ ^= 1;
    bool grew = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float higher =
          __uint_as_float(ptx::load_shared(references_ + 4 * (first_row(0) + 8 * h)));
      const float unit = ptx::max(fabsf(scores.factor[h]), 1e-30f);
      grew = grew || higher != top[h];
      this->shrink_[h] = ptx::exp2((top[h] - higher) * unit);
      top[h] = higher;
    }
    grew = __any_sync(0xffffffffu, grew);
    if (grew) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] *= this->shrink_[h];
    }
    return grew;
  }

  /// Denominators: a quad's parts, and the other warpgroup's. Afterwards every thread has them.
  FLASHBSR_DEVICE void add_sums() {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], lanes);
    }
    // In turn, so that the next item's do not overwrite what the other still reads.
    const uint32_t sums = references_ + 4 * Traits::kRows * (1 + (steps_ & 2));
    const auto place = [&](int32_t group, int h) {
      return sums + 4 * (group * Traits::kRows + first_row(0) + 8 * h);
    };
    if (ptx::thread_index() % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) ptx::store_shared(place(group_, h), __float_as_uint(sum[h]));
    }
    const uint32_t added = handed_ + 16;
    ptx::mbarrier_arrive(added);
    ptx::mbarrier_wait<kArch>(added, (steps_ >> 1 & 1) ^ 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = __uint_as_float(ptx::load_shared(place(0, h))) +
               __uint_as_float(ptx::load_shared(place(1, h)));
    }
  }

  /// A tile's half of the latent dims.
  FLASHBSR_DEVICE static auto half(const Place& at, int32_t part) {
    return typename Shared<Traits>::KeyPipeline::Place{2 * at.stage + part, at.parity};
  }

  /// After the products of P V of a tile: nobody reads this half of it any more, nor the weights if
  /// they were the `other`'s.
  FLASHBSR_DEVICE void finish_values(bool other) {
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    Base::pin_weights();
    if (threadIdx.x % 32 == 0) {
      shared_.key_pipeline.release(half(at_, group_));
      if (other) shared_.value_pipeline.release(at_);
    }
    at_.advance();
  }
  FLASHBSR_DEVICE void release_queries() {
    if (threadIdx.x % 32 == 0) shared_.query_pipeline.release(query());
  }

  const Shared<Traits>& shared_;
  const int32_t group_;
  const uint32_t references_, handed_;
  const uint64_t query_, key_, tail_, value_;
  Place at_;
  /// In one register. Bit 0: parity of what was taken of the other's; bit 1: of items with tiles;
  /// above: items.
  uint32_t steps_ = 0;
  int32_t count_, start_, whole_top_, whole_bottom_;
};

}  // namespace flashbsr::sm90a
