// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges where every block has one item at most, as in small batches of latent attention: the
// blocks that have a tile's parts wait for each other and each merges its share of the rows.
// Nothing is handed out, so that it takes three ways to L2 behind the stores of the states: arrive,
// see that all have arrived, load. MergeQueue, which serves any number of items, takes seven.
//
//   counters  [1 + max_merges: items claimed, arrivals][MergeQueueWord ...][shares left ...]
//
// A block waits for others only if all have begun, so that none waits for one that has no SM yet.
// One that finds some missing leaves its share, and says so before it arrives: the last to arrive
// takes what was left. Shares are the same whoever takes them, and so are the bits.
#pragma once

#include <flashbsr/kernel/finish.h>

namespace flashbsr {

/// @tparam kWarps    that call it, in every block
/// @tparam kBarrier  their named barrier
template <int kWarps, int kBarrier>
class OwnMerges {
 public:
  FLASHBSR_DEVICE explicit OwnMerges(const KernelArgs& args) : args_(args) {}

  /// Whether they are the merges of this plan. Parts that requests share are of many merges. And
  /// fixed splits promise that a request's bits do not depend on how many items others have.
  FLASHBSR_DEVICE bool serve() const {
    const PlanHeader& h = *args_.header;
    return h.num_items <= static_cast<int32_t>(gridDim.x) && h.num_shared == 0 &&
           h.policy != kPolicyFixed;
  }

  /// Before the block's item.
  FLASHBSR_DEVICE void begin(int32_t thread) const {
    if (thread == 0 && merges() > 0) atomicAdd(word(MergeQueueWord::kBegun), 1);
  }

  /// In one thread: whether some block is yet to begin. Asked for before the stores of a state, and
  /// told to all by the barrier behind them.
  FLASHBSR_DEVICE bool some_missing(int32_t thread) const {
    return thread == 0 &&
           ptx::load_relaxed(word(MergeQueueWord::kBegun)) != static_cast<int32_t>(gridDim.x);
  }

  /// Behind that barrier, the last that a block does.
  /// @param tile  split_tile() of the item's merge, which takes two loads
  template <bool kSoftmax>
  FLASHBSR_DEVICE void merge(const SplitTile& tile, int32_t slot, bool missing,
                             int32_t thread) const {
    const int32_t parts = tile.merge.state_count;
    const int32_t part = (slot - tile.merge.slot) / max_of(tile.merge.row_count, 1);
    int32_t* const arrived = args_.counters + 1 + tile.index;
    bool last = false;
    if (thread == 0) {
      if (missing) atomicOr(left(tile.index, part), 1 << part % 32);
      last = ptx::atomic_add_acq_rel(arrived, 1) == parts - 1;
      // One thread of a block: when each warp asked, 1024 did so at once, and arrivals waited.
      while (!missing && ptx::load_acquire(arrived) < parts) {
      }
    }
    last = ptx::named_barrier_any(kBarrier, kThreads, last) && thread < 32;  // a warp
    const int32_t before = leave(thread);  // whose answer comes while states are read
    LeftShares shares{.thread = thread};
    if (last && 32 * thread < parts) {
      int32_t* const word = left(tile.index, 32 * thread);
      shares.bits = ptx::load_relaxed(word);
      *word = 0;  // for the next run, whatever it was: nobody waits for the load
    }
    int32_t at = missing ? kNone : part * kThreads + thread;
#pragma unroll 1
    for (;;) {
      if (at != kNone) contract<kSoftmax>(tile, at);
      if (!last || !shares.next(at)) break;
    }
    clean_up(before);
  }

  /// Of a block without a part.
  FLASHBSR_DEVICE void skip(int32_t thread) const {
    if (merges() > 0) clean_up(leave(thread));
  }

 private:
  /// Counts a block that looks at no arrivals any more. How many were before it, in one thread.
  FLASHBSR_DEVICE int32_t leave(int32_t thread) const {
    return thread == 0 ? atomicAdd(word(MergeQueueWord::kFinished), 1) : 0;
  }
  /// By the last one: all as it was found, for the next run.
  FLASHBSR_DEVICE void clean_up(int32_t before) const {
    if (before < static_cast<int32_t>(gridDim.x) - 1) return;
    for (int32_t i = 0; i < merges(); ++i) args_.counters[1 + i] = 0;
    *word(MergeQueueWord::kBegun) = *word(MergeQueueWord::kFinished) = 0;
  }

  FLASHBSR_DEVICE int32_t* word(MergeQueueWord which) const {
    return args_.counters + num_arrival_counters(*args_.header) + static_cast<int32_t>(which);
  }
  FLASHBSR_DEVICE int32_t merges() const { return args_.header->num_merges; }
  /// The word with a part's bit: a merge has kMergeSlices of them, one for each lane.
  FLASHBSR_DEVICE int32_t* left(int32_t merge, int32_t part) const {
    return word(MergeQueueWord::kList) + merge * kMergeSlices + part / 32;
  }

  /// What thread `at` of all that a merge has contracts: of few states many dims, so that all is
  /// under way at once, of many a few.
  template <bool kSoftmax>
  FLASHBSR_DEVICE void contract(const SplitTile& tile, int32_t at) const {
    const StoreOutput<kArch> store{args_.params};
    const int32_t parts = tile.merge.state_count, all = parts * kThreads;
    if (parts <= 4) {
      contract_split_tile<kSoftmax, 8, 32>(args_, tile, at, all, store);
    } else if (parts <= 8) {
      contract_split_tile<kSoftmax, 4, 32>(args_, tile, at, all, store);
    } else {
      contract_split_tile<kSoftmax, 1, 16>(args_, tile, at, all, store);
    }
  }

  /// Shares that blocks have left, for one warp. Seldom any: a lane has the bits of 32, by one load
  /// for all.
  struct LeftShares {
    int32_t thread;  ///< lane
    uint32_t bits = 0;
    bool taking = false;

    /// What the lane contracts after `at`; false: there is no more.
    FLASHBSR_DEVICE bool next(int32_t& at) {
      if (taking && at % kThreads + 32 < kThreads) {
        at += 32;
        return true;
      }
      const uint32_t some = __ballot_sync(~0u, bits != 0);
      if (some == 0) return false;
      const int32_t lane = __ffs(static_cast<int>(some)) - 1;
      const int32_t bit = __ffs(static_cast<int>(__shfl_sync(~0u, bits, lane))) - 1;
      if (thread == lane) bits &= bits - 1;
      at = (32 * lane + bit) * kThreads + thread;
      return taking = true;
    }
  };

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int32_t kNone = -1;
  static constexpr int kArch = 90;
  const KernelArgs& args_;
};

}  // namespace flashbsr
