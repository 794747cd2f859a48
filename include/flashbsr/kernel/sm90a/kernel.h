// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Attention on Hopper: a persistent block of one producer warpgroup and two or three consumers.
//
//   producer   warp 3: claims items           -> tile_pipeline
//              warp 0: Q, K and V by TMA      -> query_, key_, value_pipeline
//              warp 1: zeroes rows of V that the item does not own
//              or, where TMA does not serve, warps 0 to 2: K and V by cp.async
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

namespace flashbsr::sm90a {

template <class Traits>
FLASHBSR_DEVICE void produce(const HopperArgs& args, const Shared<Traits>& shared, char* memory,
                             int32_t warp) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (warp == Shared<Traits>::kSchedulerWarp) {
    if (lane == 0) schedule(args, shared);
  } else if (args.path == KvPath::kGather) {
    Gather<Traits>(args, shared, warp, lane).run();
  } else if (warp == 0) {
    TmaLoader<Traits>(args, shared, lane).run();
  } else if (warp == 1) {
    Cleaner<Traits>(shared, lane).run(memory);
  }
}

/// How the rows [first, end) of an item, described in `rows`, see its tiles. Uniform.
template <class Traits>
FLASHBSR_DEVICE TileRange tile_range(const KernelArgs& args, const Tile& tile, int32_t first) {
  const int32_t end = min_of(tile.item.row_count, first + 64);
  TileRange range{-1, 0, -1, 0};
  if (first < end && tile.count > 0) {
    // Spans move right from row to row, so the outer rows tell.
    const Span a = describe_row(args, tile.item, tile.request, first).span;
    const Span z = describe_row(args, tile.item, tile.request, end - 1).span;
    const int32_t begin = max_of(a.begin, tile.item.kv_begin);
    if (begin < z.end) {
      const int32_t start = tile.start;
      range.top = (z.end - 1 - start) / Traits::kKvTile;
      range.bottom = (begin - start) / Traits::kKvTile;
      range.whole_top = (a.end - start) / Traits::kKvTile - 1;
      range.whole_bottom =
          ceil_div(max_of(z.begin, tile.item.kv_begin) - start, Traits::kKvTile);
    }
  }
  // To uniform registers: whatever steers products must be there.
  range.top = __shfl_sync(0xffffffffu, range.top, 0);
  range.bottom = __shfl_sync(0xffffffffu, range.bottom, 0);
  range.whole_top = __shfl_sync(0xffffffffu, range.whole_top, 0);
  range.whole_bottom = __shfl_sync(0xffffffffu, range.whole_bottom, 0);
  return range;
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
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % 128, lane = thread % 32;
  const int32_t warp_row = group * 64 + thread / 32 * 16;
  PrefillRow* warp_rows = shared.rows + warp_row;
  const PrefillRow* rows = warp_rows + lane / 4;
  Mainloop<Traits, Variant> loop(args.base, shared, rows, group);
  for (typename Shared<Traits>::TilePipeline::Place at;; at.advance()) {
    shared.tile_pipeline.wait_full(at);
    Tile& tile = shared.tiles[at.stage];
    const int32_t count = __shfl_sync(0xffffffffu, tile.count, 0);
    if (count < 0) break;
    __syncwarp();
    if (lane < 16) {
      PrefillRow row = describe_row(args.base, tile.item, tile.request, warp_row + lane);
      // Tiles may begin before the item does.
      row.span.begin = max_of(row.span.begin, tile.item.kv_begin);
      row.span.end = max_of(row.span.end, row.span.begin);
      warp_rows[lane] = row;
    }
    __syncwarp();
    loop.run(tile, count, tile_range<Traits>(args.base, tile, group * 64));
    write_rows<Traits, Variant>(args.base, tile, rows, warp_row + lane / 4, loop);
    if (tile.item.slot >= 0) finish_split<Traits, Variant>(args.base, tile);
    __syncwarp();
    if (lane == 0) shared.tile_pipeline.release(at);
  }
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
