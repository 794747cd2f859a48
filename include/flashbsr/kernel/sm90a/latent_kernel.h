// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel of latent attention on Hopper: who of a block produces tiles, who consumes them, where
// their rows go. docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/own_merge.h>
#include <flashbsr/kernel/sm90a/cluster_merge.h>
#include <flashbsr/kernel/sm90a/kernel.h>
#include <flashbsr/kernel/sm90a/latent.h>
#include <flashbsr/kernel/sm90a/latent_widen.h>

namespace flashbsr::sm90a {

/// Every thread of both warpgroups calls it, with the dims that are its own.
template <class Traits>
FLASHBSR_DEVICE void write_latent_rows(const HopperArgs& args, const Tile& tile, int32_t group,
                                       const float (&o)[Traits::kOutputDims / 2],
                                       const RowStates& states) {
  const Params& p = args.base.params;
  const int32_t first = first_row(0), dims = group * Traits::kOutputDims;
  if (group == 0) write_states<Traits>(args.base, tile, first, states.lse);
  const bool split = tile.item.slot >= 0;
  detail::RowPair rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = first + 8 * h;
    const RowName row(args.base, tile.item, r);
    rows.factor[h] = states.factor[h];
    rows.out[h] =
        split ? reinterpret_cast<char*>(partial_out_row(p, tile.item.slot, r) + dims)
              : p.out.row(static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head) +
                    dims * dtype_size(p.out.dtype);
    if (r >= tile.item.row_count) rows.out[h] = nullptr;
  }
  // Rows have all dims: the number is known, and stores do not ask for it.
  constexpr int kDims = Traits::kOutputDims;
  const DType type = split ? DType::kF32 : p.out.dtype;
  if (type == DType::kF32) {
    detail::store_floats(rows, kDims, o);
  } else if (type == DType::kE4M3) {
    detail::store_bytes(rows, kDims, o);
  } else {
    detail::store_halves(rows, type, kDims, o);
  }
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void consume_latent(const HopperArgs& args, const Shared<Traits>& shared,
                                    int32_t group) {
  constexpr int kItemBarrier = 8;
  LatentMainloop<Traits, Variant> loop(args.base, shared, group);
  constexpr int kWarps = 4 * Traits::kConsumers;
  const MergeQueue<kMergeSlices> merges(args.base);
  const OwnMerges<kWarps, kItemBarrier> own(args.base);
  const bool alone = own.serve();
  if (args.cluster == 1 && alone) own.begin(ptx::thread_index() - 128);
  if (args.cluster == 1 && !alone) merges.template begin<kWarps>(ptx::thread_index() - 128);
  for (;; loop.advance()) {
    shared.tile_pipeline.wait_full(loop.item_place());
    const int32_t stage = loop.item_place().stage;
    const Tile& tile = shared.tiles[stage];
    if (__shfl_sync(0xffffffffu, tile.count, 0) < 0) break;
    loop.run(tile, shared.spans + stage * Traits::kRows);
    const RowStates states = row_states<Variant>(args.base, tile, first_row(0), loop, loop.sum);
    if (args.cluster > 1) {  // its only item
      return merge_in_cluster(args, shared, tile, group, loop, states);
    }
    if (alone && tile.item.slot >= 0) {
      const int32_t thread = ptx::thread_index() - 128, slot = tile.item.slot;
      const SplitTile merge = split_tile(args.base, tile.item.merge);
      const bool missing = own.some_missing(thread);
      write_latent_rows<Traits>(args, tile, group, loop.o, states);
      const bool any = ptx::named_barrier_any(kItemBarrier, 32 * kWarps, missing);
      return own.template merge<true>(merge, slot, any, thread);
    }
    write_latent_rows<Traits>(args, tile, group, loop.o, states);
    if (tile.item.slot >= 0) {
      ptx::named_barrier_sync(kItemBarrier, 128 * Traits::kConsumers);
      if (ptx::thread_index() / 32 == 4) {
        merges.arrive_and_push_slices(tile.item.merge, tile.item.merge_count,
                                      ptx::thread_index() % 32);
      }
    }
    __syncwarp();
    shared.tile_pipeline.release(loop.item_place());
  }
  if (alone) {
    if (args.cluster == 1) own.skip(ptx::thread_index() - 128);
    return;
  }
  ptx::named_barrier_sync(kItemBarrier, 128 * Traits::kConsumers);
  // A warp has a row of 512 dims, 8 states of it in flight.
  merges.template drain<true, kArch, kWarps, 4, 32>(ptx::thread_index() - 128);
}

/// The producer warpgroup beside wideners: one warp loads Q, two write tails, one schedules.
template <class Traits, class Variant>
FLASHBSR_DEVICE void produce_beside_wideners(const HopperArgs& args, const Shared<Traits>& shared,
                                             int32_t warp) {
  const int32_t lane = ptx::thread_index() % 32;
  if (warp == Shared<Traits>::kSchedulerWarp) {
    Scheduler<Traits, Variant, KvCopies::kRows>(args, shared, lane).run();
  } else if (warp == 0) {
    typename Shared<Traits>::QueryPipeline::Place at;
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared, [&](const Tile& tile) {
      if (tile.count == 0) return;
      shared.query_pipeline.wait_empty(at);
      if (lane == 0) {
        load_queries(args, shared, tile, shared.query_pipeline.full(0), at.stage);
      }
      at.advance();
    });
  } else {
    TailWriter<Traits>(args, shared, warp - 1).run();
  }
}

/// @tparam kCopies  rows, where there are wideners
template <class Traits, class Variant, KvCopies kCopies = KvCopies::kEither>
FLASHBSR_DEVICE void attend_latent(const HopperArgs& args) {
  static_assert(Variant::use_softmax);
  static_assert(Traits::kWideners == 0 || kCopies == KvCopies::kRows);
  constexpr int kConsumersEnd = 128 * (1 + Traits::kConsumers);
  extern __shared__ __align__(1024) char memory[];
  const Shared<Traits> shared(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(args.k);
    ptx::prefetch_tensor_map(args.v);
    shared.init_barriers(gathers<kCopies>(args), false,
                         kMasksByBits<Variant> && args.base.params.custom_mask);
    const uint32_t handed = shared.queries + Traits::kHandOffset;
    ptx::mbarrier_init(handed, 128);
    ptx::mbarrier_init(handed + 8, 128);
    ptx::mbarrier_init(handed + 16, 256);
    ptx::fence_mbarrier_init();
    ptx::fence_async_proxy();
  }
  wait_for_plan<kArch>(args.base);
  let_next_start<kArch>(args.base);
  __syncthreads();
  if (threadIdx.x >= 128 && threadIdx.x < kConsumersEnd) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    ptx::wait_for_prerequisites<kArch>();
    consume_latent<Traits, Variant>(args, shared, uniform_warp() / 4 - 1);
    return;
  }
  if (threadIdx.x < 128) {
    ptx::give_registers<Traits::kProducerRegisters>();
    if constexpr (Traits::kWideners > 0) {
      produce_beside_wideners<Traits, Variant>(args, shared, uniform_warp());
    } else {
      produce<Traits, Variant, kCopies, false>(args, shared, false, uniform_warp());
    }
  } else if constexpr (Traits::kWideners > 0) {
    ptx::give_registers<Traits::kWidenerRegisters>();
    LatentWidener<Traits>(args, shared, uniform_warp() - kConsumersEnd / 32).run();
  }
  // The merge overwrites what the producers have written. The consumers have waited for all of
  // it, but a race detector sees that of one lane of each warp.
  __syncwarp();
  if (args.cluster > 1) ptx::cluster_sync();
}

}  // namespace flashbsr::sm90a
