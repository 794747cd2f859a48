// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention on Hopper: a persistent block of one producer warpgroup and two or three consumers.
//
//   producer   warp 3: claims items, says what rows see   -> tile_pipeline
//              warps 0 and 1: Q and K, and V, by TMA      -> query_, key_, value_pipeline
//              warp 2: zeroes rows of V that the item does not own
//              or, where TMA does not serve, warps 0 to 2: K and V by cp.async
//              or, for e4m3 K and V, warp 0: all copies; warps 1 and 2 widen or transpose
//   consumers  64 rows each: S = Q K^T, softmax, O += P V; then the rows, or the partial state; the
//              last part of a split tile merges it
//
// docs/kernels/sm90a.md draws the schedule.
#pragma once

#include <flashbsr/kernel/sm90a/epilogue.h>
#include <flashbsr/kernel/sm90a/gather.h>
#include <flashbsr/kernel/sm90a/mainloop.h>
#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/kernel/sm90a/traits.h>
#include <flashbsr/kernel/sm90a/transpose.h>
#include <flashbsr/kernel/sm90a/widen.h>

namespace flashbsr::sm90a {

template <class Traits>
FLASHBSR_DEVICE void produce(const HopperArgs& args, const Shared<Traits>& shared, char* memory,
                             int32_t warp) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (warp == Shared<Traits>::kSchedulerWarp) {
    Scheduler<Traits>(args, shared, lane).run();
  } else if constexpr (Traits::kPreparesValues) {
    // Halves of every tile, one each, or one warp both.
    const bool gather = args.path == KvPath::kGather;
    const int32_t copiers = gather ? Shared<Traits>::kGatherWarps : 1;
    const int32_t half = warp - copiers, halves = gather ? 1 : 2;
    if (half >= 0) {
      if constexpr (Traits::kTransposesValues) {
        Transposer<Traits>(shared, half, halves, lane).run();
      } else {
        Widener<Traits>(shared, half, halves, lane).run(memory);
      }
    } else if (gather) {
      Gather<Traits>(args, shared, warp, lane).run();
    } else {
      PairLoader<Traits>(args, shared, lane).run();
    }
  } else if (args.path == KvPath::kGather) {
    Gather<Traits>(args, shared, warp, lane).run();
  } else if (warp == 0) {
    TmaLoader<Traits, true>(args, shared, lane).run();
  } else if (warp == 1) {
    TmaLoader<Traits, false>(args, shared, lane).run();
  } else {
    Cleaner<Traits>(shared, lane).run(memory);
  }
}

/// After the stores of a partial state: the last block to arrive merges the split tile.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_split(const KernelArgs& args, Tile& tile) {
  constexpr int kConsumerThreads = 128 * Traits::kConsumers;
  constexpr int kBarrier = 8;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) - 128;
  ptx::named_barrier_sync(kBarrier, kConsumerThreads);
  if (thread == 0) tile.merges = arrive(args, tile.item.merge);
  ptx::named_barrier_sync(kBarrier, kConsumerThreads);
  if (tile.merges) {
    merge_split_tile<Variant::use_softmax, kArch>(args, tile.item.merge, thread, kConsumerThreads);
  }
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void consume(const HopperArgs& args, const Shared<Traits>& shared, int32_t group) {
  Mainloop<Traits, Variant> loop(args.base, shared, group);
  for (typename Shared<Traits>::TilePipeline::Place at;; at.advance()) {
    shared.tile_pipeline.wait_full(at);
    Tile& tile = shared.tiles[at.stage];
    if (__shfl_sync(0xffffffffu, tile.count, 0) < 0) break;
    loop.run(tile, shared.spans + at.stage * Traits::kRows);
    write_rows(args, tile, first_row(group), loop);
    if (tile.item.slot >= 0) finish_split<Traits, Variant>(args.base, tile);
    __syncwarp();
    // True of every thread. Without a condition the compiler moves what steers the main loop's
    // products to vector registers, and spills.
    if (ptx::thread_index() < Traits::kThreads) shared.tile_pipeline.release(at);
  }
  loop.release_held();
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void attend(const HopperArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const Shared<Traits> shared(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(args.k);
    ptx::prefetch_tensor_map(args.v);
    shared.init_barriers(args.path == KvPath::kGather);
    ptx::fence_mbarrier_init();
    ptx::fence_async_proxy();
  }
  __syncthreads();
  ptx::wait_for_prerequisites<kArch>();
  // Uniform by a shuffle: the compiler keeps what follows from it in uniform registers.
  const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x) / 32, 0);
  if (warp < 4) {
    ptx::give_registers<Traits::kProducerRegisters>();
    produce(args, shared, memory, warp);
  } else {
    ptx::take_registers<Traits::kConsumerRegisters>();
    consume<Traits, Variant>(args, shared, warp / 4 - 1);
  }
}

}  // namespace flashbsr::sm90a
