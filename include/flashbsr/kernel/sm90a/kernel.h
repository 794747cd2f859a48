// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention on Hopper: a persistent block of one producer warpgroup and two or three consumers.
//
//   producer   warp 3: claims items, says what rows see   -> tile_pipeline
//              warps 0 and 1: Q and K, and V, by TMA      -> query_, key_, value_pipeline
//              warp 2: zeroes rows of V that the item does not own
//              or, where TMA does not serve, warps 0 and 1: K and V by cp.async; warp 2 makes
//              them visible to the products
//              or, for e4m3 K and V, or under RoPE, warp 0: all copies; warps 1 and 2 widen,
//              transpose or rotate
//   consumers  64 rows each: S = Q K^T, softmax, O += P V; then the rows, or the partial state; the
//              last part of a split tile merges it
//              in kernels for mixed batches those of some blocks have items of few rows before
//
// docs/kernels/sm90a.md draws the schedule.
#pragma once

#include <flashbsr/kernel/begin.h>
#include <flashbsr/kernel/sm90a/epilogue.h>
#include <flashbsr/kernel/sm90a/gather.h>
#include <flashbsr/kernel/sm90a/mainloop.h>
#include <flashbsr/kernel/sm90a/narrow.h>
#include <flashbsr/kernel/sm90a/rotate.h>
#include <flashbsr/kernel/sm90a/tma_loader.h>
#include <flashbsr/kernel/sm90a/traits.h>
#include <flashbsr/kernel/sm90a/transpose.h>
#include <flashbsr/kernel/sm90a/widen.h>

namespace flashbsr::sm90a {

/// The warp's number, uniform by a shuffle: the compiler keeps what follows from it in uniform
/// registers. Asked for anew: kept from the beginning of a kernel it may be spilled.
FLASHBSR_DEVICE int32_t uniform_warp() {
  return __shfl_sync(0xffffffffu, ptx::thread_index() / 32, 0);
}

/// Two loaders' work is done by one, or by two that gather; the other two, or the other one, have
/// halves of every tile, or all of it, to prepare.
template <class Traits, KvCopies kCopies>
FLASHBSR_DEVICE void produce_prepared(const HopperArgs& args, const Shared<Traits>& shared,
                                      int32_t lane) {
  const bool gather = gathers<kCopies>(args);
  const int32_t half = uniform_warp() - (gather ? Shared<Traits>::kGatherWarps : 1);
  const int32_t halves = gather ? 1 : 2;
  if (half >= 0) {
    if constexpr (Traits::kTransposesValues) {
      Transposer<Traits>(shared, half, halves, lane).run();
    } else if constexpr (Traits::kPreparesValues) {
      // Or a warpgroup of their own does.
      if (Traits::kSideWideners == 0) Widener<Traits>(shared, half, halves, gather, lane).run();
    } else {
      Rotator<Traits>(args, shared).run();
    }
  } else if (gather) {
    if constexpr (kCopies != KvCopies::kBoxes) {
      const uint32_t queries =
          Traits::kPreparesValues ? shared.query_pipeline.full(0) : shared.raw_queries;
      Gather<Traits>(args, shared, queries, uniform_warp()).run();
    }
  } else if constexpr (kCopies != KvCopies::kRows) {
    PairLoader<Traits>(args, shared, !Traits::kPreparesValues, lane).run();
  }
}

/// @tparam kPrepares  there is code for it; `prepares` says whether it is to be done
template <class Traits, class Variant, KvCopies kCopies, bool kPrepares>
FLASHBSR_DEVICE void produce(const HopperArgs& args, const Shared<Traits>& shared, bool prepares,
                             int32_t warp) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (warp == Shared<Traits>::kSchedulerWarp) {
    Scheduler<Traits, Variant, kCopies>(args, shared, lane).run();
    // Not before: blocks that decode are to be far from each other (narrow.h), and blocks that come
    // to SMs one by one are not: 300 us instead of 287 for 4 x 512 beside 60 decodes.
    if constexpr (Traits::kMixed) let_next_start<kArch>(args.base);
  } else if (prepares) {
    if constexpr (kPrepares) produce_prepared<Traits, kCopies>(args, shared, lane);
  } else if constexpr (!Traits::kPreparesValues) {
    if (gathers<kCopies>(args)) {
      if constexpr (kCopies != KvCopies::kBoxes) {
        if (warp < Shared<Traits>::kGatherWarps) {
          Gather<Traits>(args, shared, shared.query_pipeline.full(0), uniform_warp()).run();
        } else {
          Relay<Traits>(shared).run();
        }
      }
    } else if constexpr (kCopies != KvCopies::kRows) {
      if (warp == 0) {
        TmaLoader<Traits, true>(args, shared, lane).run();
      } else if (warp == 1) {
        TmaLoader<Traits, false>(args, shared, lane).run();
      } else {
        Cleaner<Traits>(shared).run();
      }
    }
  }
}

/// After the stores of a partial state: what it completes is merged.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_split(const KernelArgs& args, const Tile& tile) {
  constexpr int kConsumerThreads = 128 * Traits::kConsumers;
  constexpr int kBarrier = 8;
  constexpr int kQuads = 2;  // 192 rows are many turns of the threads: half as many
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 128;
  const int32_t merge = tile.item.merge, count = tile.item.merge_count;
  // A merge of its own is contracted by all threads; of several, which requests that share KV have,
  // each warp has its own, at most 32. One way through the code for both: two would spill.
  const bool several = count > 1;
  const int32_t first = several ? thread / 32 : 0, step = several ? kConsumerThreads / 32 : 1;
  const int32_t threads = several ? 32 : kConsumerThreads, rank = thread % threads;
  ptx::named_barrier_sync(kBarrier, kConsumerThreads);
  if constexpr (Traits::kMixed) {
    if (several) {
      return MergeQueue<>(args).arrive_and_push(merge, count, thread, kConsumerThreads);
    }
  }
  const int32_t mine = first + rank * step;
  const bool last = rank < 32 && mine < count && arrive(args, merge + mine);
  uint32_t complete = several ? __ballot_sync(0xffffffffu, last)
                              : ptx::named_barrier_any(kBarrier, kConsumerThreads, last);
  if constexpr (Traits::kMixed) {
    if (complete && thread == 0) MergeQueue<>(args).place_own();
  }
#pragma unroll 1
  for (; complete; complete &= complete - 1) {
    const int32_t run = first + (__ffs(static_cast<int>(complete)) - 1) * step;
    merge_split_tile<Variant::use_softmax, kArch, kQuads>(args, merge + run, rank, threads);
  }
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void consume(const HopperArgs& args, const Shared<Traits>& shared, int32_t group) {
  Mainloop<Traits, Variant> loop(args.base, shared, group);
  using Place = typename Shared<Traits>::TilePipeline::Place;
  for (uint32_t n = 0;; ++n) {
    shared.tile_pipeline.wait_full(Place::after(n));
    const int32_t stage = Place::after(n).stage;
    const Tile& tile = shared.tiles[stage];
    if (__shfl_sync(0xffffffffu, tile.count, 0) < 0) break;
    loop.run(tile, shared.spans + stage * Traits::kRows);
    write_rows(args, tile, first_row(group), loop);
    if (tile.item.slot >= 0) finish_split<Traits, Variant>(args.base, tile);
    __syncwarp();
    // True of every thread. Without a condition the compiler moves what steers the main loop's
    // products to vector registers, and spills.
    if (ptx::thread_index() < Traits::kThreads) shared.tile_pipeline.release(Place::after(n));
  }
  loop.release_held();
  // O leaves from the memory of its sums, which is the next block's once this one has ended.
  if (Traits::kLongSums && threadIdx.x % 32 == 0) ptx::tma_store_wait_read();
}

/// @tparam kCopies  one of them, where it is known: half of the producers' code
template <class Traits, class Variant, KvCopies kCopies = KvCopies::kEither>
FLASHBSR_DEVICE void attend(const HopperArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<Traits> shared(memory);
  constexpr bool kRotates = Traits::kRotates && Variant::takes_rope;
  const bool rotates = kRotates && args.base.params.rope.fine;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(args.k);
    ptx::prefetch_tensor_map(args.v);
    shared.init_barriers(gathers<kCopies>(args), rotates,
                         kMasksByBits<Variant> && args.base.params.custom_mask);
    ptx::fence_mbarrier_init();
    ptx::fence_async_proxy();
  }
  wait_for_plan<kArch>(args.base);
  if constexpr (Traits::kMixed) {
    // One of two kernels in a graph, whose plan has nothing for it. Those behind it wait for it
    // alone, and so it waits for those before it.
    if (args.base.header->num_items == 0) {
      let_next_start<kArch>(args.base);
      return ptx::wait_for_prerequisites<kArch>();
    }
  }
  const NarrowBlocks narrow = NarrowBlocks::of<Traits>(args.base);
  if constexpr (Traits::kMixed) {
    if (narrow.here && threadIdx.x >= 128 && threadIdx.x % 128 == 0) {
      const int group = static_cast<int>(threadIdx.x) / 128 - 1;
      Narrow<Traits, Variant, kCopies>(args, memory, narrow, group).init();
      ptx::fence_mbarrier_init();
      ptx::fence_async_proxy();
    }
  }
  // A plan that copies have written is there, a dependent launch waits for them: the scheduler and
  // who loads by TMA read it at once, and wait where they come to what kernels write.
  if constexpr (!Traits::kMixed) let_next_start<kArch>(args.base);
  __syncthreads();
  // In this order ptxas puts the producers' code first. The first 64 KB of a kernel are there when
  // it begins; what is beyond comes from memory, 450 instructions in 3.3 us (H200), and all wait
  // for the producers: 64 decodes that share 8192 tokens took 47 us the other way round, now 44.
  constexpr int kConsumersEnd = 128 * (1 + Traits::kConsumers);
  if (threadIdx.x >= 128 && (Traits::kSideWideners == 0 || threadIdx.x < kConsumersEnd)) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    ptx::wait_for_prerequisites<kArch>();
    const int32_t group = uniform_warp() / 4 - 1;
    if constexpr (Traits::kMixed) {
      MergeQueue<>(args.base).begin<4 * Traits::kConsumers>(ptx::thread_index() - 128);
      if (narrow.here) {
        Narrow<Traits, Variant, kCopies>(args, memory, narrow, group).run(shared.narrow_done);
      }
    }
    consume<Traits, Variant>(args, shared, group);
    if constexpr (Traits::kMixed) {
      constexpr int kBarrier = 8;
      ptx::named_barrier_sync(kBarrier, 128 * Traits::kConsumers);
      MergeQueue<>(args.base).drain<Variant::use_softmax, kArch, 4 * Traits::kConsumers>(
          ptx::thread_index() - 128);
    }
  } else if (Traits::kSideWideners > 0 && threadIdx.x >= kConsumersEnd) {
    if constexpr (Traits::kSideWideners > 0) {
      ptx::give_registers<Traits::kWidenerRegisters>();
      Widener<Traits>(shared, uniform_warp() - kConsumersEnd / 32, Traits::kSideWideners,
                      gathers<kCopies>(args), ptx::thread_index() % 32)
          .run();
    }
  } else {
    ptx::give_registers<Traits::kProducerRegisters>();
    constexpr bool kPrepares = Traits::kPreparesValues || kRotates;
    if (narrow.here) ptx::mbarrier_wait<kArch>(shared.narrow_done, 0);
    produce<Traits, Variant, kCopies, kPrepares>(args, shared, Traits::kPreparesValues || rotates,
                                                 uniform_warp());
  }
}

}  // namespace flashbsr::sm90a
