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

#include <flashbsr/kernel/begin.h>
#include <flashbsr/kernel/decode/epilogue.h>
#include <flashbsr/kernel/decode/packed_loader.h>
#include <flashbsr/kernel/decode/pair_boxes.h>

namespace flashbsr {

FLASHBSR_DEVICE DecodeItem decode_item(const WorkItem& item, const Request& request) {
  return {.kv_begin = item.kv_begin,
          .kv_end = item.kv_end,
          .kv_table = request.kv_begin,
          .kv_head = item.kv_head,
          .merge_count = item.merge_count,
          .row_begin = item.row_begin,
          .row_count = item.row_count,
          .slot = item.slot,
          .merge = item.merge,
          .request = item.request,
          .q_begin = request.shared() ? ~request.q_begin : request.q_begin,
          .q_len = request.q_len,
          .kv_len = request.kv_len};
}

/// Puts items [known, count) of this block's queue from `first` on into shared memory, with what
/// their requests add; thread `thread` of the epilogue warps.
template <class Traits>
FLASHBSR_DEVICE void stage_items(const KernelArgs& args, const DecodeShared<Traits>& shared,
                                 int first, int known, int count, int thread) {
  for (int i = known + thread; i < count; i += 32 * Traits::kEpilogueWarps) {
    const WorkItem item = args.items[args.queue_items[first + i]];
    shared.items()[i] = decode_item(item, args.requests[item.request]);
  }
  ptx::mbarrier_arrive(shared.staged());
}

/// A streaming warp's part of the queue [begin, end).
template <class Traits, class Variant, class Ring>
FLASHBSR_DEVICE void stream(const KernelArgs& args, const DecodeShared<Traits>& shared, Ring& ring,
                            int begin, int end, int warp, int lane) {
  DecodeMath<Traits, Variant> math(args, lane);
  DecodeQuery<Traits> query;
  DecodeState<Traits> state;
  const auto length = [&] {
    if constexpr (Traits::kPacked) return *shared.length();
    return end - begin;
  };
  // One counter: beside wide items there is no register for two.
#pragma unroll 1
  for (int turn = 0; turn * Traits::kItems < length(); ++turn) {
    const int done = turn * Traits::kItems, count = min_of(Traits::kItems, length() - done);
    // Beside boxes of packed codes there is no register for their number.
    const auto is_one = [&](int i) {
      return i < (Traits::kBoxes ? min_of(Traits::kItems, length() - done) : count);
    };
    // Nobody needs the items before.
    if (turn > 0) ptx::named_barrier_sync(shared.all_barrier(), Traits::kThreads);
    ring.begin(count, turn == 0 ? 1 : 0, turn, turn == 0 && args.overlap == Overlap::kPrologue);
    const bool early = args.overlap == Overlap::kKv;
    if (turn == 0 && !early) ptx::wait_for_prerequisites<Traits::kArch>();
#pragma unroll 1
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ring.produce_keys();
      ring.produce_values();
    }
    if (turn == 0 && early) ptx::wait_for_prerequisites<Traits::kArch>();
#pragma unroll 1
    for (int i = 0; is_one(i); ++i) {
      const DecodeItem& item = shared.items()[i];
      const int number = done + i;
      ptx::mbarrier_wait<Traits::kArch>(shared.ready_barrier(number & 1), number >> 1 & 1);
      query.read(shared.ready(number & 1), lane);
      math.begin(item, shared.ready(number & 1));
      state.clear();
      const int32_t kv_end = item.kv_end;
#pragma unroll 1
      for (int32_t position = ring.first_position(item); position < kv_end;
           position += Traits::kWarps * Traits::kKvTile) {
        math.step(item, query, ring, position, state);
      }
      leave_state(shared, state, item.row_count, warp, lane, number);
    }
  }
}

/// What is left to do for an item when its states have been left.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_and_merge(const KernelArgs& args, const DecodeShared<Traits>& shared,
                                      const DecodeItem& item, int thread) {
  SplitTile tile{};
  if (item.slot >= 0) tile = {item.merge, args.merges[item.merge], item.q_begin};
  __syncwarp();
  ptx::named_barrier_sync(shared.states_barrier(), Traits::kThreads);
  finish_item<Traits, Variant>(args, shared, item, thread);
  merge_if_last<Traits, Variant>(args, shared, item, tile, thread);
}

/// The epilogue warps' part; thread `thread` of them.
template <class Traits, class Variant>
FLASHBSR_DEVICE void epilogue(const KernelArgs& args, const DecodeShared<Traits>& shared, int begin,
                              int end, int thread) {
  const PlanHeader header = *args.header;  // what is used of it, in registers
#pragma unroll 1
  for (int first = begin, turn = 0; first < end; first += Traits::kItems, ++turn) {
    const int count = min_of(Traits::kItems, end - first);
    if (turn > 0) ptx::named_barrier_sync(shared.all_barrier(), Traits::kThreads);
    stage_items(args, shared, first, turn == 0 ? 1 : 0, count, thread);
    ptx::mbarrier_wait<Traits::kArch>(shared.staged(), turn & 1);
    if (turn == 0) ptx::wait_for_prerequisites<Traits::kArch>();
    // Two items are ready at any time; an item's place is free when its states have been left. What
    // prepares them is once in the code: three times, it was 8 KB more to be fetched when a
    // kernel begins. Queries come while states are waited for: 64 requests of 128 tokens take 11.4
    // us, behind them 12.1 (H200).
    constexpr int kAhead = 2;
#pragma unroll 1
    for (int i = -kAhead; i < count; ++i) {
      const int next = i + kAhead;
      const bool prepares = thread < 32 && next < count;
      const bool loads = prepares && !shared.items()[next].empty();
      DecodeQuery<Traits> query;
      float scale[DecodeQuery<Traits>::kTiles];
      const auto load = [&] {
        if (!loads) return;
        query.template load<kDecodeRotates<Traits, Variant>>(args, shared.items()[next], thread,
                                                             scale);
      };
      // Beside packed codes there are no registers for it: NVRTC 12.8 spills 8 bytes.
      if constexpr (!Traits::kPacked) load();
      if (i >= 0) finish_and_merge<Traits, Variant>(args, shared, shared.items()[i], thread);
      if constexpr (Traits::kPacked) load();
      const int parity = (first - begin + next) & 1;
      if (loads) {
        query.leave(args, header, shared.items()[next], thread, scale, shared.ready(parity));
      }
      if (prepares) ptx::mbarrier_arrive(shared.ready_barrier(parity));
    }
  }
}

/// The first item of queue `queue`, and the barriers. One thread; a fence or a barrier of the block
/// follows.
template <class Traits>
FLASHBSR_DEVICE void begin_decode(const KernelArgs& args, const DecodeShared<Traits>& shared,
                                  int queue) {
  const WorkerStart start = args.starts[queue];
  shared.items()[0] = decode_item(start.item, start.request);
  if constexpr (Traits::kPacked) {
    *shared.length() = args.queue_indptr[queue + 1] - args.queue_indptr[queue];
  }
  ptx::mbarrier_init(shared.empty(), 32 * Traits::kEpilogueWarps);
  ptx::mbarrier_init(shared.staged(), 32 * Traits::kEpilogueWarps);
  ptx::mbarrier_init(shared.ready_barrier(0), 32);
  ptx::mbarrier_init(shared.ready_barrier(1), 32);
}

FLASHBSR_DEVICE const KernelArgs& base_of(const KernelArgs& args) { return args; }
FLASHBSR_DEVICE const KernelArgs& base_of(const PairArgs& args) { return args.base; }

/// @tparam Args  KernelArgs, or of Traits::kBoxes PairArgs
template <class Traits, class Variant, class Args>
  requires AttentionVariant<Variant, ThreadMath>
FLASHBSR_DEVICE void decode(const Args& all) {
  const KernelArgs& args = base_of(all);
  extern __shared__ __align__(1024) char flashbsr_shared[];
  const DecodeShared<Traits> shared{flashbsr_shared};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // A kernel's parameters come through the constant cache, a miss per 64 bytes and one after
  // another where they are first needed: each warp asks for other ones at once.
  constexpr int kWords = sizeof(KernelArgs) / sizeof(int);
  const int ahead = reinterpret_cast<const int*>(&args)[min_of(16 * warp, kWords - 1)];
  asm volatile("" ::"r"(ahead));
  // A plan that copies have written may be read at once: a dependent launch waits for them. The
  // first item comes with its request in one load; the others follow behind the streaming.
  wait_for_plan<Traits::kArch>(args);
  let_next_start<Traits::kArch>(args);
  const int begin = args.queue_indptr[blockIdx.x], end = args.queue_indptr[blockIdx.x + 1];
  if (threadIdx.x == 0) begin_decode(args, shared, static_cast<int>(blockIdx.x));
  if constexpr (Traits::kBoxes) {
    if (lane == 0 && warp < Traits::kWarps) PairRing<Traits>::init_barriers(shared.rows(warp));
  }
  __syncthreads();
  if (begin == end) {
    ptx::wait_for_prerequisites<Traits::kArch>();
    return;
  }
  if (warp >= Traits::kWarps) {
    epilogue<Traits, Variant>(args, shared, begin, end, threadIdx.x - 32 * Traits::kWarps);
  } else if constexpr (Traits::kBoxes) {
    PairRing<Traits> ring(all, shared, warp, lane);
    stream<Traits, Variant>(args, shared, ring, begin, end, warp, lane);
  } else {
    typename RingOf<Traits>::Type ring(args, shared.items(), shared.ring(warp), shared.rows(warp),
                                       shared.staged(), warp, lane);
    stream<Traits, Variant>(args, shared, ring, begin, end, warp, lane);
  }
}

}  // namespace flashbsr
