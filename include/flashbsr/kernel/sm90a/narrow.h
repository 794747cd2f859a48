// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Narrow items before wide ones: in kernels for mixed batches the consumers of some blocks
// decode, each with a queue and memory of its own, three warps that stream and one that prepares,
// contracts and writes (decode/kernel.h). Other blocks work on tiles of many rows meanwhile, and
// get help when the narrow items are done. The tensor cores are the limit of the wide items, the
// memory that of the narrow ones.
#pragma once

#include <flashbsr/kernel/decode/kernel.h>
#include <flashbsr/kernel/sm90a/box_ring.h>
#include <flashbsr/kernel/sm90a/traits.h>

namespace flashbsr::sm90a {

/// Blocks that have narrow items, a queue for each of their consumers, evenly among the others:
/// neighbours are SMs of one GPC, which together get 1.1 TB/s (H200), 70 GB/s each where they could
/// have 97.
struct NarrowBlocks {
  int32_t count;
  int32_t before;  ///< this block
  bool here;

  template <class Traits>
  FLASHBSR_DEVICE static NarrowBlocks of(const KernelArgs& args) {
    if constexpr (!Traits::kMixed) return {};
    const int32_t block = static_cast<int32_t>(blockIdx.x), all = static_cast<int32_t>(gridDim.x);
    const int32_t count = args.header->num_narrow_blocks;
    const int32_t before = block * count / all;
    return {count, before, (block + 1) * count / all > before};
  }
};

/// A warpgroup that follows a queue of narrow items, behind those of the wide workers.
/// @tparam kCopies  kRows where TMA does not serve. Code for both would be 50 KB more, and what
///                  comes after it late (kernel.h).
template <class Traits, class Variant, KvCopies kCopies>
class Narrow {
  using Decode = typename Traits::Narrow;

 public:
  /// @param group  the warpgroup's number among the consumers
  FLASHBSR_DEVICE Narrow(const HopperArgs& args, char* memory, const NarrowBlocks& blocks,
                         int group)
      : args_(args),
        shared_{memory + group * Traits::kNarrowBytes, group},
        queue_(static_cast<int>(gridDim.x) - blocks.count + blocks.before * Traits::kConsumers +
               group) {}

  /// One thread; a barrier of the block follows.
  FLASHBSR_DEVICE void init() const {
    begin_decode(args_.base, shared_, queue_);
    BoxRing<Decode>::init_barriers(shared_);
  }

  /// All of the warpgroup's threads. Their memory is free for wide items when all have arrived at
  /// `done`.
  FLASHBSR_DEVICE void run(uint32_t done) const {
    work();
    ptx::named_barrier_sync(shared_.all_barrier(), Decode::kThreads);
    if (ptx::thread_index() % 128 == 0) invalidate();
    ptx::fence_async_proxy();
    ptx::mbarrier_arrive(done);
  }

 private:
  FLASHBSR_DEVICE void work() const {
    const KernelArgs& base = args_.base;
    // Asked for anew: kept from the beginning of the kernel they would be spilled.
    const int thread = ptx::thread_index(), lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32 % 4, 0);
    const int begin = base.queue_indptr[queue_], end = base.queue_indptr[queue_ + 1];
    if (begin == end) return;
    if (warp >= Decode::kWarps) {
      epilogue<Decode, Variant>(base, shared_, begin, end, lane);
    } else if constexpr (kCopies == KvCopies::kRows) {
      DecodeRing<Decode> ring(base, shared_.items(), shared_.ring(warp), shared_.rows(warp),
                              shared_.staged(), warp, lane);
      stream<Decode, Variant>(base, shared_, ring, begin, end, warp, lane);
    } else {
      static_assert(kCopies == KvCopies::kBoxes);
      BoxRing<Decode> ring(args_, shared_, warp, lane);
      stream<Decode, Variant>(base, shared_, ring, begin, end, warp, lane);
    }
  }

  /// Its barriers' memory may hold other things.
  FLASHBSR_DEVICE void invalidate() const {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::mbarrier_invalidate(shared_.empty() + 8 * i);
    BoxRing<Decode>::invalidate_barriers(shared_);
  }

  const HopperArgs& args_;
  const DecodeShared<Decode> shared_;
  const int queue_;
};

}  // namespace flashbsr::sm90a
