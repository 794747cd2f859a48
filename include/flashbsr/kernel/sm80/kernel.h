// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Prefill and append on tensor cores through mma.sync: a persistent block claims one work item
// after the other.
//
//   claim -> load Q, K(last) -> for tiles from the last to the first:
//     wait K | load V | S = Q K^T | wait V | load next K | softmax, O += P V
//   -> write the rows, or the partial state; the last part of a split tile merges it
//
// The last tile first: it is the one a causal mask cuts.
#pragma once

#include <flashbsr/kernel/sm80/epilogue.h>
#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/kernel/sm80/loader.h>
#include <flashbsr/kernel/sm80/mainloop.h>
#include <flashbsr/kernel/sm80/query.h>
#include <flashbsr/kernel/sm80/traits.h>
#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/sync.h>

namespace flashbsr::sm80 {

/// Copies chunks asynchronously to their places in the shared-memory tile at `tile`.
struct AsyncCopy {
  uint32_t tile;

  FLASHBSR_DEVICE void operator()(uint32_t offset, const char* src, uint32_t bytes) const {
    ptx::cp_async_16_if(tile + offset, src, bytes != 0);
  }
  FLASHBSR_DEVICE void operator()(int, uint32_t offset, const char* src, uint32_t bytes) const {
    ptx::cp_async_16_if(tile + offset, src, bytes != 0);
  }
};

template <class Traits, class Variant>
FLASHBSR_DEVICE void prefill(const KernelArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const BlockState state(memory, Traits{});
  const uint32_t query_tile = ptx::shared_address(memory);
  const uint32_t key_tile = query_tile + Traits::kKeyOffset;
  const uint32_t value_tile = query_tile + Traits::kValueOffset;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);

  ptx::wait_for_prerequisites<Traits::kArch>();
  KvLoader<Traits> loader;
  Mainloop<Traits, Variant> loop(args, state);

  if (thread == 0) claim_task(args, *state.task);
  for (;;) {
    __syncthreads();
    Task& task = *state.task;
    if (!task.valid) break;
    const int32_t kv_begin = task.item.kv_begin;
    int32_t first =
        kv_begin + (task.item.kv_end - kv_begin - 1) / Traits::kKvTile * Traits::kKvTile;
    const bool empty = task.item.kv_end <= kv_begin;

    visit_queries<Traits>(args, task.item, task.request.q_begin, thread, AsyncCopy{query_tile});
    if (!empty) {
      loader.find(args, task, first);
      loader.visit_keys(args, task, first, AsyncCopy{key_tile});
    }
    ptx::cp_async_commit();
    describe_rows<Traits>(args, task, state, thread);
    if (thread == 0) claim_task(args, state.task[1]);
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (Traits::kFloat8 || (kHasHooks<Variant> && args.params.rope.fine)) {
      prepare_queries<Traits>(args.params, task, state.rows, memory, state.scales, thread);
      __syncthreads();
    }

    loop.begin(task);
    if constexpr (Traits::kStages == 1) {
      for (; first >= kv_begin && !empty; first -= Traits::kKvTile) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // K is there, and nobody reads V any more
        loader.visit_values(args, task, first, AsyncCopy{value_tile});
        ptx::cp_async_commit();
        const int32_t next = first - Traits::kKvTile;
        if (next >= kv_begin) loader.find(args, task, next);
        const bool sees = loop.sees(first);
        if (sees) loop.score(query_tile, key_tile, first);
        if (Traits::kSoftenFirst && sees) loop.soften(first);
        ptx::cp_async_wait<0>();
        __syncthreads();  // V is there, and nobody reads K any more
        if (next >= kv_begin) loader.visit_keys(args, task, next, AsyncCopy{key_tile});
        ptx::cp_async_commit();
        if (sees) {
          if (!Traits::kSoftenFirst) loop.soften(first);
          loop.accumulate(value_tile);
        }
      }
    } else {
      uint32_t stage = 0;
      if (!empty) loader.visit_values(args, task, first, AsyncCopy{value_tile});
      ptx::cp_async_commit();
      if (first - Traits::kKvTile >= kv_begin) loader.find(args, task, first - Traits::kKvTile);
      for (; first >= kv_begin && !empty; first -= Traits::kKvTile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        const uint32_t other = stage ^ Traits::kTileBytes;
        const int32_t next = first - Traits::kKvTile;
        if (next >= kv_begin) {
          loader.visit_keys(args, task, next, AsyncCopy{key_tile + other});
          loader.visit_values(args, task, next, AsyncCopy{value_tile + other});
          if (next - Traits::kKvTile >= kv_begin) loader.find(args, task, next - Traits::kKvTile);
        }
        ptx::cp_async_commit();
        if (loop.sees(first)) {
          loop.score(query_tile, key_tile + stage, first);
          loop.soften(first);
          loop.accumulate(value_tile + stage);
        }
        stage = other;
      }
    }

    write_rows(args, task, state.rows, loop, thread % 32);
    if (task.item.slot >= 0) finish_split<Traits, Variant>(args, task, thread);
    __syncthreads();
    next_task(state, thread);
  }
}

}  // namespace flashbsr::sm80
