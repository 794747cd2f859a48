// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Decode: attention of few packed rows per KV head (one new token of a GQA group, a verify step of
// a few tokens), bound by the memory that holds K and V. One block per SM works off its queue:
//
//   streaming warps   ring of K, V stages -> S = Q K^T -> softmax -> O += P V   (loader, mainloop)
//   epilogue warps    contract the warps' states -> output, or partial state -> merge   (epilogue)
//
// docs/kernels/decode.md has the figures behind each choice.
#pragma once

#include <flashbsr/kernel/decode/epilogue.h>

namespace flashbsr {

/// Items [first, first + count) of this block's queue, with what their requests add.
template <class Traits>
FLASHBSR_DEVICE void stage_items(const KernelArgs& args, DecodeItem* items, int first, int count) {
  for (int i = threadIdx.x; i < count; i += Traits::kThreads) {
    const WorkItem item = args.items[args.queue_items[first + i]];
    const Request request = args.requests[item.request];
    items[i] = {.kv_begin = item.kv_begin,
                .kv_end = item.kv_end,
                .kv_table = request.kv_begin,
                .kv_head = item.kv_head,
                .row_begin = item.row_begin,
                .row_count = item.row_count,
                .slot = item.slot,
                .merge = item.merge,
                .request = item.request,
                .q_begin = request.q_begin,
                .q_len = request.q_len,
                .kv_len = request.kv_len};
  }
}

/// A streaming warp's part of `count` items, whose first stages `ring` has begun to load.
template <class Traits, class Variant>
FLASHBSR_DEVICE void stream(const KernelArgs& args, const DecodeShared<Traits>& shared,
                            DecodeRing<Traits>& ring, int count, int done) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  DecodeMath<Traits, Variant> math(args, lane);
  DecodeQuery<Traits> query;
  DecodeState<Traits> state;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const DecodeItem& item = shared.items()[i];
    query.load(args, item, lane);
    math.begin(item, query);
    state.clear();
#pragma unroll 1
    for (int32_t position = item.kv_begin + warp * Traits::kKvTile; position < item.kv_end;
         position += Traits::kWarps * Traits::kKvTile) {
      math.step(item, query, ring, position, state);
    }
    leave_state(shared, state, item.row_count, warp, lane, done + i);
  }
}

template <class Traits, class Variant>
  requires AttentionVariant<Variant, ThreadMath>
FLASHBSR_DEVICE void decode(const KernelArgs& args) {
  extern __shared__ __align__(1024) char flashbsr_shared[];
  const DecodeShared<Traits> shared{flashbsr_shared};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // The plan is written by copies, which a dependent launch waits for: it may be read at once.
  if (args.overlap != Overlap::kNone) ptx::launch_dependents<Traits::kArch>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.full(), Traits::kWarps);
    ptx::mbarrier_init(shared.empty(), Traits::kEpilogueWarps);
  }
  const int begin = args.queue_indptr[blockIdx.x], end = args.queue_indptr[blockIdx.x + 1];
  DecodeRing<Traits> ring(args, shared.items(), shared.ring(warp), shared.offsets(warp), warp,
                          lane);
#pragma unroll 1
  for (int first = begin; first < end || first == begin; first += Traits::kItems) {
    const int count = min_of(Traits::kItems, end - first);
    if (first > begin) __syncthreads();  // everybody is done with the items before
    stage_items<Traits>(args, shared.items(), first, count);
    __syncthreads();
    const bool streams = warp < Traits::kWarps;
    if (streams) {
      ring.begin(count);
      if (first == begin && args.overlap == Overlap::kPrologue) ring.prefetch();
    }
    const bool early = args.overlap == Overlap::kKv && first == begin;
    if (first == begin && !(early && streams)) ptx::wait_for_prerequisites<Traits::kArch>();
    if (!streams) {
      epilogue<Traits>(args, shared, count, first - begin, threadIdx.x - 32 * Traits::kWarps);
      continue;
    }
#pragma unroll 1
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ring.produce_keys();
      ring.produce_values();
    }
    if (early) ptx::wait_for_prerequisites<Traits::kArch>();
    stream<Traits, Variant>(args, shared, ring, count, first - begin);
  }
}

}  // namespace flashbsr
