// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Narrow items beside wide ones: in kernels for mixed batches one warpgroup decodes, three warps
// stream and one prepares, contracts and writes (decode/kernel.h), while the others work on tiles
// of many rows. The tensor cores are the limit of the wide items, the memory that of the narrow
// ones: side by side they take as long as the longer of the two.
#pragma once

#include <flashbsr/kernel/decode/kernel.h>
#include <flashbsr/kernel/sm90a/box_ring.h>
#include <flashbsr/kernel/sm90a/traits.h>

namespace flashbsr::sm90a {

/// A warpgroup that follows a queue of narrow items: the block's, behind those of the wide workers.
template <class Traits, class Variant>
class Narrow {
  using Decode = typename Traits::Narrow;

 public:
  FLASHBSR_DEVICE Narrow(const HopperArgs& args, char* memory)
      : args_(args),
        shared_{memory + Traits::kNarrowOffset},
        queue_(static_cast<int>(gridDim.x + blockIdx.x)) {}

  /// One thread; a barrier of the block follows.
  FLASHBSR_DEVICE void init() const {
    begin_decode(args_.base, shared_, queue_);
    BoxRing<Decode>::init_barriers(shared_);
    ptx::mbarrier_init(shared_.wide_done(), 128 * Traits::kConsumers);
  }

  /// Every thread of the wide items, behind its last.
  FLASHBSR_DEVICE void leave_wide() const { ptx::mbarrier_arrive(shared_.wide_done()); }

  FLASHBSR_DEVICE void run() const {
    static_assert(MergeQueue::kWarps == Decode::kWarps + Decode::kEpilogueWarps);
    MergeQueue(args_.base).begin(ptx::thread_index() % 128);
    work();
    MergeQueue(args_.base)
        .template drain<Variant::use_softmax, kArch>(ptx::thread_index() % 128,
                                                     shared_.wide_done());
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
    } else if (args_.path == KvPath::kGather) {
      DecodeRing<Decode> ring(base, shared_.items(), shared_.ring(warp), shared_.rows(warp),
                              shared_.staged(), warp, lane);
      stream<Decode, Variant>(base, shared_, ring, begin, end, warp, lane);
    } else {
      BoxRing<Decode> ring(args_, shared_, warp, lane);
      stream<Decode, Variant>(base, shared_, ring, begin, end, warp, lane);
    }
  }

  const HopperArgs& args_;
  const DecodeShared<Decode> shared_;
  const int queue_;
};

}  // namespace flashbsr::sm90a
