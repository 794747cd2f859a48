// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One consumer warpgroup's 64 rows against an item's KV tiles, from the last to the first:
//
//   first    S(n-1) = Q K(n-1)                             | softmax
//   step j   S(j) = Q K(j); O += P(j+1) V(j+1)             | softmax of S(j) while P V runs
//   last     O += P(0) V(0)
//
// Warpgroups take turns (products.h), every one n - 1 per item: tiles that none of its rows sees
// are passed over, not skipped.
#pragma once

#include <flashbsr/kernel/sm90a/long_sums.h>
#include <flashbsr/kernel/sm90a/products.h>
#include <flashbsr/kernel/sm90a/softmax.h>
#include <flashbsr/kernel/sm90a/split_queries.h>

namespace flashbsr::sm90a {

template <class Traits, class Variant>
class Mainloop : public Softmax<Traits, Variant> {
  using Base = Softmax<Traits, Variant>;

 public:
  using Base::o, Base::p, Base::scores;

  /// @param group  the warpgroup's number among the consumers, uniform
  FLASHBSR_DEVICE Mainloop(const KernelArgs& args, const Shared<Traits>& shared, int32_t group)
      : Base(args),
        shared_(shared),
        group_(group),
        products_(shared, group),
        sums_(shared, group) {}

  /// Computes the item's rows, whose spans are `spans`.
  FLASHBSR_DEVICE void run(const Tile& tile, const Span* spans) {
    const int32_t count = uniform(tile.count), start = uniform(tile.start);
    const TileRange& range = tile.ranges[group_];
    TileRange sight{uniform(range.top), uniform(range.bottom), uniform(range.whole_top),
                    uniform(range.whole_bottom)};
    wary_ = Traits::kTransposesValues ? 1 : Exponents<Variant>::kLongTiles;
    patience_ = Exponents<Variant>::kPatience;
    Base::clear();
    if constexpr (Traits::kLongSums) sums_.clear();
    int32_t j = count - 1;
    if (j < 0) return;
    if (sight.top < sight.bottom) {
#pragma unroll 1
      for (; j >= 0; --j) pass(j > 0);
      shared_.query_pipeline.wait_full(query());  // O may go there
      release_held();
      done_with_queries();
      return;
    }
    [[maybe_unused]] float unit[2];
    if constexpr (Traits::kSplitsQueries) {
      shared_.query_pipeline.wait_full(query());
      const int32_t warp = ptx::thread_index() % 128 / 32;
      split_queries<Traits>(
          shared_.queries + query().stage * Traits::kQueryBytes + (group_ * 4 + warp) * 16 * 128,
          kVote + group_, unit);
    }
    bool simple = scores.begin(tile, spans, first_row(group_));
    // A vote is 230 cycles, and only scales per head need it.
    simple = scores.scaled_by_head() ? all_of_group(simple) : scores.scaled_up();
    if constexpr (Traits::kSplitsQueries) scores.multiply(unit);
    if constexpr (Traits::kSumsTiles) {
      // Rows that are not there would have a say: then it is the long way always.
      if (!all_of_group(!Base::missing(0) && !Base::missing(1))) wary_ = 0x7fffffff;
    }
    if (!simple) sight.whole_top = sight.bottom - 1;
    if constexpr (kTriesWithoutMaxima) {
      if (!scores.exponents_pay()) wary_ = 0x7fffffff;
    }
#pragma unroll 1
    for (; j > sight.top; --j) pass(true);
    if constexpr (kPerLogit<Variant>) {
      run_alike(j, start, sight);
    } else if constexpr (kMasksByBits<Variant>) {
      run_shown(j, start, sight);
    } else {
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
      if constexpr (Traits::kSumsTiles) {
        add_values();
        key_.advance();
      } else {
        last();
      }
      if constexpr (Traits::kLongSums) sums_.add_to(o);
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
  static constexpr int kVote = 4;  ///< of its threads' vote
  static constexpr int32_t kLongestPatience = 16;
  /// Kernels of large heads have no registers for it.
  static constexpr bool kTriesWithoutMaxima =
      Exponents<Variant>::kExist && (Traits::kConsumers == 3 || Traits::kHeadDimVo <= 128) &&
      (dtype_size(Traits::kWeightType) == 2 || Traits::kLongSums);

  /// To a uniform register: whatever steers products must be in one, or the compiler moves their
  /// descriptors from vector registers at every step.
  FLASHBSR_DEVICE static int32_t uniform(int32_t x) { return __shfl_sync(0xffffffffu, x, 0); }

  /// Whether `x` is true in all threads of the warpgroup, uniform: its warps go the same way, or
  /// their products and votes do not meet.
  FLASHBSR_DEVICE bool all_of_group(bool x) const {
    const bool any_not = ptx::named_barrier_any(kVote + group_, 128, !x);
    return !__any_sync(0xffffffffu, any_not);
  }

  /// Whether all of the warpgroup's weights fit; then they count.
  FLASHBSR_DEVICE bool accepts(bool fits) {
    if (!all_of_group(fits)) return false;
    Base::accept();
    return true;
  }

  /// Tiles from `j` to the last in sight, the first, cut and whole ones, through one body: a text's
  /// hooks stand there once and not three times, which compiles in four fifths of the time.
  FLASHBSR_DEVICE void run_alike(int32_t& j, int32_t start, const TileRange& sight) {
    shared_.query_pipeline.wait_full(query());
    release_held();
    const int32_t first = j;
#pragma unroll 1
    for (; j >= sight.bottom; --j) {
      const int32_t begin = start + j * Traits::kKvTile;
      const bool begun = j != first, masked = j > sight.whole_top || j < sight.whole_bottom;
      multiply(begin, begun);
      release(shared_.key_pipeline, key_);
      const bool grew = Base::soften(begin, masked);
      scale_weights();
      finish_values(begun);
      Base::pack();
      if (Variant::use_softmax && grew) Base::rescale();
    }
    done_with_queries();
    last();
  }

  /// Tiles from `j` to the last in sight, runs of those that the mask shows something of.
  FLASHBSR_DEVICE void run_shown(int32_t& j, int32_t start, const TileRange& sight) {
#pragma unroll 1
    for (bool begun = false;; begun = true) {
#pragma unroll 1
      for (; j >= sight.bottom && !shows(key_); --j) pass(j > 0 || begun);
      if (j < sight.bottom) break;
      if (begun) {  // a run begins and ends without a turn
        products_.take_turn();
        products_.give_turn();
      }
      first(start + j * Traits::kKvTile);
      release_held();
      --j;
#pragma unroll 1
      for (; j >= sight.bottom && shows(after(key_)); --j) {
        if (j > sight.whole_top || j < sight.whole_bottom) {
          next<true>(start + j * Traits::kKvTile);
        } else {
          next<false>(start + j * Traits::kKvTile);
        }
      }
      last();
    }
    shared_.query_pipeline.wait_full(query());  // where nothing was shown: O may go there
    release_held();
    done_with_queries();
  }
  /// Whether the mask shows anything of the tile whose K is at `at`.
  FLASHBSR_DEVICE bool shows(const Place& at) {
    if (!scores.sorts()) return true;
    shared_.key_pipeline.wait_full(at);
    uint32_t kinds = 0;
    // Read by who hands the stage back, so that race detectors see that it is done.
    if (ptx::thread_index() % 32 == 0) kinds = ptx::load_shared(shared_.kinds + 4 * at.stage);
    const int32_t seen = uniform(static_cast<int32_t>(kinds)) >> group_;
    scores.set_cut(seen & kHides);
    return seen & kShows;
  }
  FLASHBSR_DEVICE static Place after(Place at) {
    at.advance();
    return at;
  }

  using Operands = typename Products<Traits>::Operands;
  FLASHBSR_DEVICE Operands operands() const {
    return products_.operands(query().stage, key_.stage, value_.stage);
  }

  FLASHBSR_DEVICE void first(int32_t begin) {
    scores.look_ahead(begin);
    const Operands at = operands();
    shared_.query_pipeline.wait_full(query());
    shared_.key_pipeline.wait_full(key_);
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    products_.multiply_keys(scores.s, at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
    find_scales();
    finish_keys(at);
    release(shared_.key_pipeline, key_);
    const bool grew = Base::soften(begin, true);
    scale_weights();
    Base::pack();
    if (kMasksByBits<Variant> && Variant::use_softmax && grew) Base::rescale();
  }

  /// S of the tile at `begin`, and O += P V of the one before on its way, if a tile has `begun` the
  /// item.
  FLASHBSR_DEVICE Operands multiply(int32_t begin, bool begun = true) {
    if (begun) key_.advance();
    scores.look_ahead(begin);
    const Operands at = operands();
    shared_.key_pipeline.wait_full(key_);
    if (begun) products_.take_turn();
    ptx::pin(scores.s);
    ptx::pin(o);
    Base::pin_weights();
    ptx::wgmma_fence();
    products_.multiply_keys(scores.s, at);
    constexpr int kFirst = Products<Traits>::kFirstSteps;
    if (begun) {
      shared_.value_pipeline.wait_full(value_);
      ptx::wgmma_fence();
      products_.template multiply_values<0, kFirst>(o, p, at.value, true);
      if constexpr (!Traits::kKeyHalves) products_.give_turn();
    } else {
      ptx::wgmma_fence();
      ptx::wgmma_commit();  // no products: the wait below means S either way
    }
    ptx::wgmma_wait<1>();
    ptx::pin(scores.s);
    find_scales();
    if constexpr (Traits::kKeyHalves) {
      multiply_second_half(at);
      if (begun) {
        products_.template multiply_values<kFirst>(o, p, at.value, true);
        products_.give_turn();
      } else {
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<1>();
      ptx::pin(scores.s);
    }
    return at;
  }

  /// Where the halves of K have scales of their own. While the first half takes its scales the
  /// tensor cores have a part of P V of the tile before; the turn ends behind all of it, or the
  /// second half would wait for the products of the others.
  FLASHBSR_DEVICE void multiply_second_half(const Operands& at) {
    if constexpr (Traits::kKeyHalves) {
      scores.scale_first_half();
      ptx::pin(scores.s);
      ptx::wgmma_fence();
      products_.template multiply_keys<1>(scores.s, at);
    }
  }
  /// The same, and its end.
  FLASHBSR_DEVICE void finish_keys(const Operands& at) {
    if constexpr (Traits::kKeyHalves) {
      multiply_second_half(at);
      ptx::wgmma_wait<0>();
      ptx::pin(scores.s);
    }
  }

  template <bool kMasked>
  FLASHBSR_DEVICE void step(int32_t begin) {
    [[maybe_unused]] const Operands at = multiply(begin);
    float slack = Base::kSlack;
    if constexpr (!kMasked && kTriesWithoutMaxima) {
      if (wary_ > 0) {
        --wary_;
      } else if (!scores.cut()) {
        if (accepts(Base::soften_as_before(begin))) {
          release(shared_.key_pipeline, key_);
          scale_weights();
          finish_values();
          Base::pack();
          if constexpr (Traits::kLongSums) sums_.count(o);
          return;
        }
        become_wary();
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        multiply_keys_again(at);
        // The references are the maxima then: a row of equal weights would fail for ever.
        if constexpr (Traits::kLongSums) slack = 0.0f;
      }
    }
    release(shared_.key_pipeline, key_);
    const bool grew = Base::soften(begin, kMasked, slack);
    scale_weights();
    finish_values();
    Base::pack();
    if (Variant::use_softmax && grew) rescale();
    if constexpr (Traits::kLongSums) sums_.count(o);
  }

  /// Those of the tile whose S are at hand came with its K.
  FLASHBSR_DEVICE void find_scales() {
    if constexpr (Traits::kTokenScales) {
      scores.token_scales =
          shared_.token_scales + key_.stage * Traits::kScaleBytes + ptx::thread_index() % 4 * 8;
    }
  }

  FLASHBSR_DEVICE void rescale() {
    Base::rescale();
    if constexpr (Traits::kLongSums) sums_.rescale(o, Base::shrink_);
  }

  /// After the products of P V: their registers and V are free.
  FLASHBSR_DEVICE void finish_values(bool begun = true) {
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    Base::pin_weights();
    if (begun) {
      release_values();
    }
  }

  FLASHBSR_DEVICE void multiply_keys_again(const Operands& at) {
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    products_.multiply_keys(scores.s, at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
    finish_keys(at);
  }
  FLASHBSR_DEVICE void become_wary() {
    wary_ = patience_;
    patience_ = min_of(2 * patience_, kLongestPatience);
  }

  FLASHBSR_DEVICE void last() {
    const Operands at = operands();
    shared_.value_pipeline.wait_full(value_);
    ptx::pin(o);
    Base::pin_weights();
    ptx::wgmma_fence();
    products_.multiply_values(o, p, at.value, true);
    ptx::wgmma_wait<0>();
    ptx::pin(o);
    Base::pin_weights();
    release_values();
    key_.advance();
  }

  template <bool kMasked>
  FLASHBSR_DEVICE void next(int32_t begin) {
    if constexpr (Traits::kSumsTiles) {
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
    scores.look_ahead(begin);
    const Operands at = operands();
    shared_.key_pipeline.wait_full(key_);
    ptx::pin(scores.s);
    ptx::wgmma_fence();
    products_.multiply_keys(scores.s, at);
    ptx::wgmma_wait<0>();
    ptx::pin(scores.s);
    if constexpr (!kMasked) {
      if (wary_ > 0) {
        --wary_;
      } else if (accepts(Base::soften_as_before(begin))) {
        return release(shared_.key_pipeline, key_);
      } else {
        become_wary();
        multiply_keys_again(at);
      }
    }
    release(shared_.key_pipeline, key_);
    const bool grew = Base::soften(begin, kMasked);
    Base::pack();
    if (grew) Base::rescale();
  }

  /// O += P V through sums of one tile: products of e4m3 add up in 14 bits and truncate, so that
  /// what is lost grows with what is there.
  FLASHBSR_DEVICE void add_values() {
    const Operands at = operands();
    shared_.value_pipeline.wait_full(value_);
    float low[kPart], high[kPart];
    ptx::pin(low);
    ptx::pin(high);
    Base::pin_weights();
    ptx::wgmma_fence();
    products_.multiply_values(low, p, at.value, false);
    products_.multiply_values(high, p, at.value + ptx::descriptor_step(kPart * 2 * 128), false);
    ptx::wgmma_wait<1>();
    ptx::pin(low);
#pragma unroll
    for (int i = 0; i < kPart; ++i) o[i] += low[i];
    ptx::wgmma_wait<0>();
    ptx::pin(high);
    Base::pin_weights();
    release_values();
#pragma unroll
    for (int i = 0; i < kPart; ++i) o[kPart + i] += high[i];
  }
  static constexpr int kPart = Traits::kHeadDimVo / 4;  ///< registers of half the dims

  FLASHBSR_DEVICE void pass(bool turn) {
    shared_.key_pipeline.wait_full(key_);
    release(shared_.key_pipeline, key_);
    release_scales();
    key_.advance();
    if (turn) {
      products_.take_turn();
      products_.give_turn();
    }
    shared_.value_pipeline.wait_full(value_);
    release_values();
  }

  template <class Ring, class At>
  FLASHBSR_DEVICE static void release(const Ring& ring, const At& at) {
    if (threadIdx.x % 32 == 0) ring.release(at);
  }
  FLASHBSR_DEVICE void release_values() {
    release(shared_.value_pipeline, value_);
    value_.advance();
  }
  FLASHBSR_DEVICE void scale_weights() {
    scores.scale_weights();
    release_scales();
  }
  /// By every lane, each of which has read them: race detectors see that.
  FLASHBSR_DEVICE void release_scales() const {
    if constexpr (Traits::kTokenScales) {
      ptx::mbarrier_arrive(shared_.scales_empty + 8 * key_.stage);
    }
  }
  FLASHBSR_DEVICE auto query() const { return Shared<Traits>::QueryPipeline::Place::after(items_); }
  FLASHBSR_DEVICE void done_with_queries() {
    if constexpr (Traits::kLongSums) queries_ = shared_.sums;
    if constexpr (Traits::kStoresInQueries) {
      queries_ = shared_.queries + query().stage * Traits::kQueryBytes;
      held_ = shared_.query_pipeline.empty(query().stage);
    } else {
      release(shared_.query_pipeline, query());
    }
    ++items_;
  }

  const Shared<Traits>& shared_;
  const int32_t group_;
  const Products<Traits> products_;
  Place key_, value_;
  uint32_t items_ = 0;  ///< whose Q is done with
  uint32_t queries_ = 0;
  uint32_t held_ = 0;  ///< the barrier to arrive at; 0: none
  LongSums<Traits> sums_;
  /// Tiles until maxima are left out again, and how many after it fails the next time. The
  /// first ones of an item are where maxima grow.
  int32_t wary_, patience_;
};

}  // namespace flashbsr::sm90a
