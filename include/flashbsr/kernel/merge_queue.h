// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges for whoever is idle. Where requests share KV, the part that finishes last completes the
// merges of all of them at once: 64 requests that share 8192 tokens left 512 merges to 16 blocks,
// 28 of 68 us (H200), while 116 had nothing to do. Instead, a complete merge takes the next place
// of a list in global memory, and every warp that has no items left takes tickets: the place that
// it looks at, until tickets are beyond the last merge.
//
//   counters  [1 + max_merges: items claimed, arrivals][MergeQueueWord ...][list]
//
// Merges of wide rows have a place for each of kMergeSlices warps: 64 rows of 512 dims in 4 states
// took one block 9 us (H200).
//
// Warps wait for other blocks only once all have begun, so that no block waits for one that has no
// SM yet. Where some have not when a block's own items are done, its last warp takes what is there,
// and all leave: a block looks into the list after everything that it completes, and nothing is
// left behind.
// Merges contract states in the plan's order: who does it does not change a bit.
#pragma once

#include <flashbsr/kernel/finish.h>

namespace flashbsr {

/// @tparam kSlices  places of a merge
template <int kSlices = 1>
class MergeQueue {
 public:
  FLASHBSR_DEVICE explicit MergeQueue(const KernelArgs& args) : args_(args) {}

  /// Before a block's first item. Thread `thread` of the kWarps warps that will drain().
  template <int kWarps>
  FLASHBSR_DEVICE void begin(int32_t thread) const {
    // By a thread that says later that it has left, or the word might be reset before.
    if (thread == 32 * (kWarps - 1) && merges() > 0) atomicAdd(word(MergeQueueWord::kBegun), 1);
  }

  /// After a barrier behind the stores of a state of merges [first, first + count): thread `thread`
  /// of `threads`. Those that it completes go to the list.
  FLASHBSR_DEVICE void arrive_and_push(int32_t first, int32_t count, int32_t thread,
                                       int32_t threads) const {
#pragma unroll 1
    for (int32_t i = thread; i < count; i += threads) {
      if (arrive(args_, first + i)) place(first + i + 1);
    }
  }

  /// The same by one warp, which fills all places of a merge.
  FLASHBSR_DEVICE void arrive_and_push_slices(int32_t first, int32_t count, int32_t lane) const {
#pragma unroll 1
    for (int32_t base = 0; base < count; base += 32) {
      uint32_t complete =
          __ballot_sync(~0u, base + lane < count && arrive(args_, first + base + lane));
#pragma unroll 1
      for (; complete; complete &= complete - 1) {
        const int32_t merge = first + base + __ffs(static_cast<int>(complete)) - 1;
        int32_t at = 0;
        if (lane == 0) at = atomicAdd(word(MergeQueueWord::kPlaced), kSlices);
        at = __shfl_sync(~0u, at, 0);
        for (int32_t i = lane; i < kSlices; i += 32) {
          ptx::store_release(word(MergeQueueWord::kList) + at + i, merge * kSlices + i + 1);
        }
      }
    }
  }

  /// A merge that the caller makes takes a place, too. One thread.
  FLASHBSR_DEVICE void place_own() const { place(kMade); }

  /// The last that a block does, behind a barrier after its items: merges until all are made.
  /// Thread `thread` of kWarps warps.
  /// @tparam kQuads, kLoads  as merge_split_tile has them: 16 lanes have a row of 128 dims with two
  ///                         quads, and 9 states of it in flight
  template <bool kSoftmax, int kArch, int kWarps, int kQuads = 2, int kLoads = 18>
  FLASHBSR_DEVICE void drain(int32_t thread) const {
    if (merges() == 0) return;
    const int32_t lane = thread % 32;
    const bool waits = all_begun();
#pragma unroll 1
    for (;;) {
      int32_t entry = -1;
      if (lane == 0 && waits) entry = next();
      // One warp of a block: all would stand in each other's way, 392 us instead of 52.
      if (thread == 32 * (kWarps - 1) && !waits) entry = next_if_any();
      entry = __shfl_sync(~0u, entry, 0);
      if (entry < 0) break;
      merge_split_tile<kSoftmax, kArch, kQuads, kLoads>(args_, entry / kSlices,
                                                        entry % kSlices * 32 + lane, 32 * kSlices);
    }
    if (lane > 0) return;
    const int32_t finished = ptx::atomic_add_acq_rel(word(MergeQueueWord::kFinished), 1);
    if (finished < kWarps * static_cast<int32_t>(gridDim.x) - 1) return;
    // As it was found, for the next run.
    for (int32_t i = 0; i < static_cast<int32_t>(MergeQueueWord::kList); ++i) {
      word(MergeQueueWord::kBegun)[i] = 0;
    }
  }

 private:
  FLASHBSR_DEVICE int32_t* word(MergeQueueWord which) const {
    return args_.counters + num_arrival_counters(*args_.header) + static_cast<int32_t>(which);
  }
  FLASHBSR_DEVICE int32_t merges() const { return args_.header->num_merges * kSlices; }
  FLASHBSR_DEVICE bool all_begun() const {
    return ptx::load_acquire(word(MergeQueueWord::kBegun)) == static_cast<int32_t>(gridDim.x);
  }

  static constexpr int32_t kMade = -1;  ///< in the list; otherwise slice + 1, or 0: nothing yet

  FLASHBSR_DEVICE void place(int32_t entry) const {
    const int32_t at = atomicAdd(word(MergeQueueWord::kPlaced), 1);
    ptx::store_release(word(MergeQueueWord::kList) + at, entry);
  }

  /// The entry at place `at`, as soon as it is there.
  FLASHBSR_DEVICE int32_t take(int32_t at) const {
    int32_t* const place = word(MergeQueueWord::kList) + at;
    int32_t entry;
    do {
      entry = ptx::load_acquire(place);
    } while (entry == 0);
    *place = 0;
    return entry;
  }
  /// The next merge to make, or slice of one; -1: there are no more.
  FLASHBSR_DEVICE int32_t next() const {
    for (;;) {
      const int32_t at = atomicAdd(word(MergeQueueWord::kTaken), 1);
      if (at >= merges()) return -1;
      const int32_t entry = take(at);
      if (entry != kMade) return entry - 1;
    }
  }
  /// The same of those that have a place.
  FLASHBSR_DEVICE int32_t next_if_any() const {
    int32_t* const taken = word(MergeQueueWord::kTaken);
    for (;;) {
      const int32_t at = ptx::load_acquire(taken);
      if (at >= ptx::load_acquire(word(MergeQueueWord::kPlaced))) return -1;
      if (atomicCAS(taken, at, at + 1) != at) continue;
      const int32_t entry = take(at);
      if (entry != kMade) return entry - 1;
    }
  }

  const KernelArgs& args_;
};

}  // namespace flashbsr
