// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel of latent attention of few rows on Hopper: who of a block copies rows, who consumes
// them, where results go. docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/begin.h>
#include <flashbsr/kernel/own_merge.h>
#include <flashbsr/kernel/sm90a/latent_few.h>
#include <flashbsr/kernel/sm90a/row_loader.h>

namespace flashbsr::sm90a {

inline constexpr int kFewItemBarrier = 8;  ///< of all consumers, where they merge

/// What is left to do to a thread's columns of O, and their LSE in base 2.
struct FewEnds {
  float factor[4];
  float lse[4];
};

/// Both warpgroups' references and sums become one. Every consumer calls it.
template <class Traits>
FLASHBSR_DEVICE FewEnds end_few_rows(const KernelArgs& args, const Tile& tile,
                                     FewMainloop<Traits>& loop) {
  using Loop = FewMainloop<Traits>;
  const int32_t lane = Loop::lane();
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
  const bool split = tile.item.slot >= 0;
  const float v_scale = value_scale(args.params, tile.item.kv_head);
  FewEnds ends;
#pragma unroll
  for (int c = 0; c < Loop::kColumns; ++c) {
    const int32_t r = Loop::row_of(c);
    const auto number = [&](int32_t group, int32_t which) {
      return __uint_as_float(ptx::load_shared(loop.state_of(group, which, r)));
    };
    float base = number(0, 4), sum = 0.0f;
#pragma unroll
    for (int group = 1; group < Traits::kConsumers; ++group)
      base = ptx::min(base, number(group, 4));
#pragma unroll
    for (int group = 0; group < Traits::kConsumers; ++group) {
      float part = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) part += number(group, w);
      sum += part * ptx::exp2(base - number(group, 4));
    }
    ends.lse[c] = sum == 0.0f ? -infinity() : ptx::log2(sum) - base;
    float factor = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
    if (!split) {
      const int32_t row = min_of(r, tile.item.row_count - 1);
      const int32_t head = args.params.sinks ? RowName(args, tile.item, row).q_head : 0;
      const RowEnd end = end_row<true>(args.params, v_scale, head, sum, ends.lse[c]);
      factor = end.factor;
      ends.lse[c] = end.lse;
    }
    ends.factor[c] = factor * ptx::exp2(base - loop.base[c]);
  }
  return ends;
}

/// O of all warpgroups to the output, or to the partial state.
template <class Traits>
FLASHBSR_DEVICE void write_few_rows(const HopperArgs& args, const Shared<Traits>& shared,
                                    const Tile& tile, int32_t group, FewMainloop<Traits>& loop) {
  using Loop = FewMainloop<Traits>;
  constexpr int kDims = Traits::kHeadDimVo;
  static_assert(Traits::kRows * kDims * 4 <= Traits::kAllWeightBytes);
  const Params& p = args.base.params;
  const WorkItem& item = tile.item;
  const FewEnds ends = end_few_rows<Traits>(args.base, tile, loop);
  const bool split = item.slot >= 0;
  if (group == 0 && Loop::warp() == 0 && Loop::lane() < 4 && (split || p.lse)) {
#pragma unroll
    for (int c = 0; c < Loop::kColumns; ++c) {
      const int32_t r = Loop::row_of(c);
      if (r >= item.row_count) continue;
      if (split) {
        *partial_lse(p, item.slot, r) = ends.lse[c];
      } else {
        const RowName row(args.base, item, r);
        write_lse(p, static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head,
                  ends.lse[c]);
      }
    }
  }
  // Rows of floats; of those that the four lanes of a quad have at once dims lie 8 apart.
  float* const sums = reinterpret_cast<float*>(shared.memory + Traits::kWeightOffset);
  const auto place = [&](int32_t row, int32_t dim) {
    return sums + row * kDims + (dim ^ row / 2 % 4 * 8);
  };
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < Loop::kParts; ++i) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = k / 4 * 2 + k % 2;
        visit(*place(Loop::row_of(c), Loop::dim_of(i, k / 2 % 2)), loop.o[i][k] * ends.factor[c]);
      }
    }
  };
  if (group == 0) each([](float& at, float x) { at = x; });
#pragma unroll
  for (int next = 1; next < Traits::kConsumers; ++next) {
    loop.meet();
    if (group == next) each([](float& at, float x) { at += x; });
  }
  loop.meet();
  // Two warps have a row's halves.
  const int32_t warp = group * 4 + Loop::warp(), dim = warp % 2 * (kDims / 2) + Loop::lane() * 8;
#pragma unroll
  for (int i = 0; i < Traits::kRows; i += 2 * Traits::kConsumers) {
    const int32_t r = i + warp / 2;
    if (r >= item.row_count) break;
    const float* const from = place(r, dim);
    const float4 low = *reinterpret_cast<const float4*>(from),
                 high = *reinterpret_cast<const float4*>(from + 4);
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
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
  if (alone) own.begin(ptx::thread_index() - 128);
  if (!alone) merges.template begin<kWarps>(ptx::thread_index() - 128);
  for (uint32_t n = 0;; ++n) {
    shared.tile_pipeline.wait_full(Place::after(n));
    const int32_t stage = Place::after(n).stage;
    const Tile& tile = shared.tiles[stage];
    if (__shfl_sync(0xffffffffu, tile.count, 0) < 0) break;
    loop.run(tile, shared.spans + stage * Traits::kRows);
    if (alone && tile.item.slot >= 0) {
      const int32_t thread = ptx::thread_index() - 128, slot = tile.item.slot;
      const SplitTile merge = split_tile(args.base, tile.item.merge);
      const bool missing = own.some_missing(thread);
      write_few_rows<Traits>(args, shared, tile, group, loop);
      const bool any = ptx::named_barrier_any(kFewItemBarrier, 32 * kWarps, missing);
      return own.template merge<true>(merge, slot, any, thread);
    }
    write_few_rows<Traits>(args, shared, tile, group, loop);
    if (tile.item.slot >= 0 && ptx::thread_index() / 32 == 4) {
      merges.arrive_and_push_slices(tile.item.merge, tile.item.merge_count,
                                    ptx::thread_index() % 32);
    }
    __syncwarp();
    shared.tile_pipeline.release(Place::after(n));
  }
  if (alone) return own.skip(ptx::thread_index() - 128);
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
}

}  // namespace flashbsr::sm90a
