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

/// @tparam kWarps  that call it, in every block
template <int kWarps>
class OwnMerges {
 public:
  FLASHBSR_DEVICE explicit OwnMerges(const KernelArgs& args) : args_(args) {}

  /// Whether they are the merges of this plan. Parts that requests share are of many merges.
  FLASHBSR_DEVICE bool serve() const {
    const PlanHeader& h = *args_.header;
    return h.num_items <= static_cast<int32_t>(gridDim.x) && h.num_shared == 0;
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
    const int32_t lane = thread % 32, parts = tile.merge.state_count;
    const int32_t part = (slot - tile.merge.slot) / max_of(tile.merge.row_count, 1);
    int32_t* const arrived = args_.counters + 1 + tile.index;
    int32_t last = 0;
    if (thread == 0) {
      if (missing) atomicOr(left(tile.index, part), 1 << part % 32);
      last = ptx::atomic_add_acq_rel(arrived, 1) == parts - 1;
    }
    if (!missing) {
      if (lane == 0) {
        while (ptx::load_acquire(arrived) < parts) {
        }
      }
      __syncwarp();
      contract<kSoftmax>(tile, part, thread);
    }
    if (thread < 32 && __shfl_sync(~0u, last, 0)) take_left<kSoftmax>(tile, lane);
    leave(thread);
  }

  /// Of blocks without a part, too: who leaves last makes all as it was found, for the next run.
  FLASHBSR_DEVICE void leave(int32_t thread) const {
    if (thread % 32 != 0 || merges() == 0) return;
    const int32_t before = ptx::atomic_add_acq_rel(word(MergeQueueWord::kFinished), 1);
    if (before < kWarps * static_cast<int32_t>(gridDim.x) - 1) return;
    for (int32_t i = 0; i < merges(); ++i) args_.counters[1 + i] = 0;
    *word(MergeQueueWord::kBegun) = *word(MergeQueueWord::kFinished) = 0;
  }

 private:
  FLASHBSR_DEVICE int32_t* word(MergeQueueWord which) const {
    return args_.counters + num_arrival_counters(*args_.header) + static_cast<int32_t>(which);
  }
  FLASHBSR_DEVICE int32_t merges() const { return args_.header->num_merges; }
  /// The word with a part's bit: a merge has kMergeSlices of them, for 1024 parts.
  FLASHBSR_DEVICE int32_t* left(int32_t merge, int32_t part) const {
    return word(MergeQueueWord::kList) + merge * kMergeSlices + part / 32;
  }

  /// The share of a part: every so many rows, or dims of one. Few states are read with many loads
  /// for each, many with one: either way 16 or more are under way.
  template <bool kSoftmax>
  FLASHBSR_DEVICE void contract(const SplitTile& tile, int32_t part, int32_t thread) const {
    const StoreOutput<kArch> store{args_.params};
    const int32_t parts = tile.merge.state_count, at = part * 32 * kWarps + thread;
    if (parts <= 8) {
      contract_split_tile<kSoftmax, 4, 32>(args_, tile, at, parts * 32 * kWarps, store);
    } else {
      contract_split_tile<kSoftmax, 1, 16>(args_, tile, at, parts * 32 * kWarps, store);
    }
  }

  /// By one warp, seldom.
  template <bool kSoftmax>
  FLASHBSR_DEVICE void take_left(const SplitTile& tile, int32_t lane) const {
    for (int32_t first = 0; first < tile.merge.state_count; first += 32) {
      int32_t* const bits = left(tile.index, first);
      uint32_t parts = static_cast<uint32_t>(ptx::load_relaxed(bits));
      __syncwarp();
      if (parts != 0 && lane == 0) *bits = 0;
      for (; parts != 0; parts &= parts - 1) {
        const int32_t part = first + __ffs(static_cast<int>(parts)) - 1;
        for (int32_t warp = 0; warp < kWarps; ++warp) {
          contract<kSoftmax>(tile, part, 32 * warp + lane);
        }
      }
    }
  }

  static constexpr int kArch = 90;
  const KernelArgs& args_;
};

}  // namespace flashbsr
