// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel of latent attention of few rows on Hopper: who of a block copies rows, who consumes
// them, where results go. docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/begin.h>
#include <flashbsr/kernel/own_merge.h>
#include <flashbsr/kernel/sm90a/few_merge.h>
#include <flashbsr/kernel/sm90a/latent_few.h>
#include <flashbsr/kernel/sm90a/row_loader.h>

namespace flashbsr::sm90a {

inline constexpr int kFewItemBarrier = 8;  ///< of all consumers, where they merge

/// What is left to do to row lane() % 16: to its O `factor`, and its LSE. Both warpgroups'
/// references and sums become one. Every consumer calls it.
template <class Traits>
FLASHBSR_DEVICE RowEnd end_few_row(const KernelArgs& args, const WorkItem& item, int32_t group,
                                   FewMainloop<Traits>& loop) {
  using Loop = FewMainloop<Traits>;
  const int32_t lane = Loop::lane(), r = lane % Traits::kRows;
#pragma unroll
  for (int c = 0; c < Loop::kColumns; ++c) {
    float sum = loop.sum[c];
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane < 4) ptx::store_shared(loop.state(Loop::warp(), Loop::row_of(c)), float_bits(sum));
    if (lane < 4 && Loop::warp() == 0) {
      ptx::store_shared(loop.state(4, Loop::row_of(c)), float_bits(loop.base[c]));
    }
  }
  loop.meet();
  float part[Traits::kConsumers], base[Traits::kConsumers];
#pragma unroll
  for (int g = 0; g < Traits::kConsumers; ++g) {
    const auto number = [&](int32_t which) {
      return __uint_as_float(ptx::load_shared(loop.state_of(g, which, r)));
    };
    base[g] = number(4);
    part[g] = number(0) + number(1) + number(2) + number(3);
  }
  const float least = ptx::min(base[0], base[1]);
  const float sum = part[0] * ptx::exp2(least - base[0]) + part[1] * ptx::exp2(least - base[1]);
  RowEnd end{sum == 0.0f ? 0.0f : ptx::reciprocal(sum),
             sum == 0.0f ? -infinity() : ptx::log2(sum) - least};
  if (item.slot < 0) {
    const int32_t row = min_of(r, item.row_count - 1);
    const int32_t head = args.params.sinks ? RowName(args, item, row).q_head : 0;
    end = end_row<true>(args.params, value_scale(args.params, item.kv_head), head, sum, end.lse);
  }
  end.factor *= ptx::exp2(least - (group == 0 ? base[0] : base[1]));
  return end;
}

/// O of both warpgroups, times `factor` of this thread's row, as rows of floats in shared memory.
template <class Traits>
FLASHBSR_DEVICE void leave_few_rows(FewRows<Traits> rows, int32_t group, float factor,
                                    FewMainloop<Traits>& loop) {
  using Loop = FewMainloop<Traits>;
  constexpr int kHalf = Loop::kParts / 2;
  static_assert(Traits::kConsumers == 2);
  float factors[Loop::kColumns];
#pragma unroll
  for (int c = 0; c < Loop::kColumns; ++c) {
    factors[c] = __shfl_sync(0xffffffffu, factor, Loop::row_of(c));
  }
  // Eight numbers at a time of one half of the dims, or the other.
  const auto each = [&](int32_t half, const auto& visit) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      uint32_t at[8];
      float x[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = k / 4 * 2 + k % 2;
        x[k] = (half == 0 ? loop.o[i][k] : loop.o[kHalf + i][k]) * factors[c];
        at[k] = rows.at(Loop::row_of(c), half * (kHalf * 64) + Loop::dim_of(i, k / 2 % 2));
      }
      visit(at, x);
    }
  };
  const auto store = [](const uint32_t (&at)[8], const float (&x)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) ptx::store_shared(at[k], float_bits(x[k]));
  };
  // Each leaves the other a half, and adds the rest to what the other has left.
  each(1 - group, store);
  loop.meet();
  each(group, [&](const uint32_t (&at)[8], float (&x)[8]) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] += __uint_as_float(ptx::load_shared(at[k]));
    store(at, x);
  });
}

/// An item's rows to the output, or to the partial state, or merged within the cluster. It is
/// little code, most of it in loops: a small batch comes here once, and 32 KB of code in a row took
/// 4.4 us of 14.
template <class Traits>
FLASHBSR_DEVICE void write_few_rows(const HopperArgs& args, const Shared<Traits>& shared,
                                    const Tile& tile, int32_t group, FewMainloop<Traits>& loop) {
  using Loop = FewMainloop<Traits>;
  constexpr int kDims = Traits::kHeadDimVo;
  const Params& p = args.base.params;
  const WorkItem& item = tile.item;
  const bool split = item.slot >= 0;
  const RowEnd end = end_few_row<Traits>(args.base, item, group, loop);
  const FewRows<Traits> rows(shared);
  leave_few_rows<Traits>(rows, group, end.factor, loop);
  const int32_t r = ptx::thread_index() - 128;  // the first warp has all rows
  if (args.cluster > 1) {
    const FewMerge<Traits> merge(args, shared, tile);
    if (r < Traits::kRows) merge.leave_lse(r, end.lse);
    return merge.run([&] { loop.meet(); });
  }
  if (r < item.row_count) {
    if (split) {
      *partial_lse(p, item.slot, r) = end.lse;
    } else {
      const RowName row(args.base, item, r);
      write_lse(p, static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head, end.lse);
    }
  }
  loop.meet();
  // Two warps have a row's halves.
  const int32_t warp = group * 4 + Loop::warp(), dim = warp % 2 * (kDims / 2) + Loop::lane() * 8;
#pragma unroll 1
  for (int32_t r = warp / 2; r < item.row_count; r += 2 * Traits::kConsumers) {
    float low[4], high[4];
    ptx::load_shared(rows.at(r, dim), low);
    ptx::load_shared(rows.at(r, dim + 4), high);
    const float x[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
    const RowName row(args.base, item, r);
    char* const out =
        split ? reinterpret_cast<char*>(partial_out_row(p, item.slot, r))
              : p.out.row(static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head);
    store_values<kArch>(out, split ? DType::kF32 : p.out.dtype, dim, p.v.dim, x);
  }
  loop.meet();
}

template <class Traits>
FLASHBSR_DEVICE void consume_few_rows(const HopperArgs& args, const Shared<Traits>& shared,
                                      int32_t group) {
  constexpr int kWarps = 4 * Traits::kConsumers;
  using Place = typename Shared<Traits>::TilePipeline::Place;
  FewMainloop<Traits> loop(args.base, shared, group);
  const MergeQueue<kMergeSlices> merges(args.base);
  const OwnMerges<kWarps, kFewItemBarrier> own(args.base);
  const bool alone = own.serve();
  if (args.cluster == 1 && alone) own.begin(ptx::thread_index() - 128);
  if (args.cluster == 1 && !alone) merges.template begin<kWarps>(ptx::thread_index() - 128);
  for (uint32_t n = 0;; ++n) {
    shared.tile_pipeline.wait_full(Place::after(n));
    const int32_t stage = Place::after(n).stage;
    const Tile& tile = shared.tiles[stage];
    if (__shfl_sync(0xffffffffu, tile.count, 0) < 0) break;
    loop.run(tile, shared.spans + stage * Traits::kRows);
    const bool merges_here = args.cluster == 1 && alone && tile.item.slot >= 0;
    SplitTile merge;
    bool missing = false;
    if (merges_here) {
      merge = split_tile(args.base, tile.item.merge);
      missing = own.some_missing(ptx::thread_index() - 128);
    }
    write_few_rows<Traits>(args, shared, tile, group, loop);
    if (args.cluster > 1) return;  // it was the block's only item
    if (merges_here) {
      const bool any = ptx::named_barrier_any(kFewItemBarrier, 32 * kWarps, missing);
      return own.template merge<true>(merge, tile.item.slot, any, ptx::thread_index() - 128);
    }
    if (tile.item.slot >= 0 && ptx::thread_index() / 32 == 4) {
      merges.arrive_and_push_slices(tile.item.merge, tile.item.merge_count,
                                    ptx::thread_index() % 32);
    }
    __syncwarp();
    shared.tile_pipeline.release(Place::after(n));
  }
  if (alone) {
    if (args.cluster == 1) own.skip(ptx::thread_index() - 128);
    return;
  }
  ptx::named_barrier_sync(kFewItemBarrier, 32 * kWarps);
  // A warp has a row of 512 dims, 8 states of it in flight.
  merges.template drain<true, kArch, kWarps, 4, 32>(ptx::thread_index() - 128);
}

/// Rows come one by one, whatever pages are.
template <class Traits, class Variant, KvCopies kCopies>
FLASHBSR_DEVICE void attend_few_latents(const HopperArgs& args) {
  static_assert(Variant::use_softmax);
  static_assert(kCopies == KvCopies::kRows);
  extern __shared__ __align__(1024) char memory[];
  const Shared<Traits> shared(memory);
  touch_parameters(args.base);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(args.q);
    shared.init_barriers(true, false, false);
    ptx::mbarrier_init(shared.queries + Traits::kMeetOffset, 128 * Traits::kConsumers);
    ptx::fence_mbarrier_init();
    ptx::fence_async_proxy();
  }
  wait_for_plan<kArch>(args.base);
  let_next_start<kArch>(args.base);
  __syncthreads();
  const int32_t warp = __shfl_sync(0xffffffffu, ptx::thread_index() / 32, 0);
  if (threadIdx.x >= 128) {
    ptx::take_registers<Traits::kConsumerRegisters>();
    ptx::wait_for_prerequisites<kArch>();
    return consume_few_rows<Traits>(args, shared, warp / 4 - 1);
  }
  ptx::give_registers<Traits::kProducerRegisters>();
  if (warp == Shared<Traits>::kSchedulerWarp) {
    Scheduler<Traits, Variant, kCopies>(args, shared, ptx::thread_index() % 32).run();
  } else {
    RowLoader<Traits>(args, shared, warp).run();
  }
  __syncwarp();
  if (args.cluster > 1) ptx::cluster_sync();  // the merge's first
}

}  // namespace flashbsr::sm90a
