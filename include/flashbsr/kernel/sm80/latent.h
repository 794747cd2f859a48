// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Multi-head latent attention (DeepSeek-V2, 2024) through mma.sync: K is a latent and a tail, V the
// same latent; a tile is read once and used twice. O of 64 rows and 512 dims is half of an SM's
// registers, so there is one block of eight warps, and who has which rows differs by product:
//
//   S = Q K^T   16 rows in a warp, and a part of the dims: two halves (64 rows) of 32 tokens, or
//               four quarters (16 rows) of 16; parts meet in shared memory
//   weights     of 16 rows and 16 tokens in a warp; P in shared memory, as A operands lie
//   O += P V    32 rows in a warp, so that a fragment of V feeds two products, and 128 dims
//
// A tile has two barriers of the block: K is there; P is there. The second one votes whether a
// row's weights are too large for its reference (mainloop.h): then it is raised and O rescaled.
// docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/merge_queue.h>
#include <flashbsr/kernel/sm80/kernel.h>
#include <flashbsr/kernel/sm80/latent_codes.h>
#include <flashbsr/kernel/sm80/latent_products.h>

namespace flashbsr::sm80 {

/// A tile of an item: where it begins, its notes (KvLoader), its bytes from the first one.
template <class Traits>
struct LatentTile {
  int32_t first;
  uint32_t slot = 0;
  uint32_t offset = 0;

  FLASHBSR_DEVICE LatentTile next() const {
    const uint32_t behind = offset + Traits::kTileBytes;
    return {first - Traits::kKvTile, slot ^ 1,
            behind < Traits::kStages * Traits::kTileBytes ? behind : 0};
  }
};

/// Behind it all weights of the tile are there, and fit. Every thread of the block calls it.
template <class Scores, class Output>
FLASHBSR_DEVICE void settle(Scores& scores, Output& output, bool fits) {
  if (__syncthreads_or(!fits)) [[unlikely]] {
    if (scores.owns()) scores.tell_top();
    __syncthreads();
    if (scores.owns()) scores.raise();
    __syncthreads();
    output.rescale();
  }
  if (scores.owns()) scores.add();
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void attend_latent(const KernelArgs& args) {
  static_assert(Variant::use_softmax);
  constexpr int kTile = Traits::kKvTile;
  constexpr int kLoads = Traits::kBlocksPerSM == 1 ? 32 : 16;  // of a merge, in flight
  extern __shared__ __align__(1024) char memory[];
  const BlockState state(memory, Traits{});
  const uint32_t shared = ptx::shared_address(memory), keys = shared + Traits::kKeyOffset;

  ptx::wait_for_prerequisites<Traits::kArch>();
  const MergeQueue<kMergeSlices> merges(args);
  merges.template begin<Traits::kWarps>(ptx::thread_index());
  KvLoader<Traits> loader(state, ptx::thread_index());
  LatentScores<Traits, Variant> scores(args, state, shared, ptx::thread_index());
  LatentOutput<Traits, Variant> output(shared, ptx::thread_index());

  if (threadIdx.x == 0) claim_task(args, *state.task);
  for (;;) {
    const int32_t thread = ptx::thread_index();  // anew: what is derived from it is not kept
    __syncthreads();
    Task& task = *state.task;
    if (!task.valid) break;
    const int32_t first = last_tile<Traits>(task.item);
    const int32_t kv_begin = task.item.kv_begin;
    const bool empty = first < kv_begin;

    begin_item<Traits>(args, state, loader, thread, shared, first, empty);
    const auto copy = [&](int32_t at, uint32_t slot, uint32_t tile) {
      if constexpr (Traits::kBytes) {
        copy_codes<Traits>(state, task, at, slot, tile);
      } else {
        loader.visit_latents(task, at, slot, AsyncCopy{tile});
      }
    };
    if (!empty) copy(first, 0, keys);
    ptx::cp_async_wait_all();
    __syncthreads();
    if constexpr (Traits::kBytes) {
      fit_queries<Traits>(args.params, memory, state.scales);
      __syncthreads();
    }

    scores.begin(task);
    output.begin(task);
    LatentTile<Traits> tile{first};
    const auto fetch = [&](const LatentTile<Traits>& at) {
      if (at.first >= kv_begin) copy(at.first, at.slot, keys + at.offset);
      loader.note(args, task, at.first - kTile, at.slot ^ 1);
      loader.look_up(args, task, at.first - 2 * kTile, at.slot);
    };
    if constexpr (Traits::kStages == 2) {
      while (tile.first >= kv_begin) {
        fetch(tile.next());
        scores.score(tile.first, tile.offset, 0);
        settle(scores, output, scores.weigh(tile.first));
        output.accumulate(tile.offset, 0);
        tile = tile.next();
        ptx::cp_async_wait_all();
        __syncthreads();  // the next tile is there, and nobody reads this one any more
      }
    } else if (!empty) {
      // S of a tile and P V of the one before, of the two warps of a scheduler in either order: S
      // is bound by shared memory, P V by the tensor cores.
      const bool values_first = ptx::thread_index() >= Traits::kThreads / 2;
      uint32_t exchange = 0;
      fetch(tile.next());
      scores.score(first, 0, 0);
      const bool fits = scores.weigh(first);
      ptx::cp_async_wait_all();
      settle(scores, output, fits);
      for (;;) {
        const LatentTile<Traits> next = tile.next();
        if (next.first < kv_begin) break;
        fetch(next.next());
        if (values_first) output.accumulate(tile.offset, exchange);
        scores.score(next.first, next.offset, exchange ^ Traits::kExchangeBytes);
        if (!values_first) output.accumulate(tile.offset, exchange);
        const bool fits = scores.weigh(next.first);
        ptx::cp_async_wait_all();
        settle(scores, output, fits);
        tile = next;
        exchange ^= Traits::kExchangeBytes;
      }
      output.accumulate(tile.offset, exchange);
    }
    if (scores.owns()) scores.end();
    __syncthreads();
    output.end();
    write_rows<Traits, Variant>(args, task, state.rows, output, memory);
    __syncthreads();
    if (task.item.slot >= 0 && ptx::thread_index() < 32) {
      merges.arrive_and_push_slices(task.item.merge, task.item.merge_count, ptx::thread_index());
    }
    __syncthreads();
    next_task(state, ptx::thread_index());
  }
  merges.template drain<true, Traits::kArch, Traits::kWarps, 4, kLoads>(ptx::thread_index());
}

}  // namespace flashbsr::sm80
