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

  FLASHBSR_DEVICE void operator()(uint32_t offset, const char* src, bool inside) const {
    ptx::cp_async_16_if(tile + offset, src, inside);
  }
  FLASHBSR_DEVICE void operator()(int, uint32_t offset, const char* src, bool inside) const {
    ptx::cp_async_16_if(tile + offset, src, inside);
  }
  FLASHBSR_DEVICE void operator()(int, uint32_t offset, const char* src, Inside) const {
    ptx::cp_async_16(tile + offset, src);
  }
};

template <class Traits, class Variant>
FLASHBSR_DEVICE void prefill(const KernelArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const BlockState state(memory, Traits{});
  const uint32_t query_tile = ptx::shared_address(memory);
  const AsyncCopy copy_keys{query_tile + Traits::kKeyOffset};
  const AsyncCopy copy_values{query_tile + Traits::kValueOffset};

  ptx::wait_for_prerequisites<Traits::kArch>();
  KvLoader<Traits> loader(state, ptx::thread_index());
  Mainloop<Traits, Variant> loop(args, state, query_tile, ptx::thread_index());

  if (threadIdx.x == 0) claim_task(args, *state.task);
  for (;;) {
    const int32_t thread = ptx::thread_index();  // anew: what is derived from it is not kept
    __syncthreads();
    Task& task = *state.task;
    if (!task.valid) break;
    int32_t first = last_tile<Traits>(task.item);
    const int32_t kv_begin = task.item.kv_begin;
    const bool empty = first < kv_begin;

    if (!empty) loader.look_up(args, task, first);
    ptx::cp_async_commit();
    visit_queries<Traits>(args, task.item, task.request.q_begin, thread, AsyncCopy{query_tile});
    ptx::cp_async_commit();
    describe_rows<Traits>(args, task, state, thread);
    if (!empty) {
      ptx::cp_async_wait<1>();  // the pages, not Q
      loader.note(args, task, first, 0);
      if (first > kv_begin) loader.look_up(args, task, first - Traits::kKvTile);
    }
    __syncthreads();
    if (!empty) loader.visit_keys(args, task, first, 0, copy_keys);
    if (thread == 0) claim_task(args, state.task[1]);
    if (Traits::kFloat8 || (kHasHooks<Variant> && args.params.rope.fine)) {
      ptx::cp_async_wait_all();
      __syncthreads();
      prepare_queries<Traits>(args.params, task, state.rows, memory, state.scales, thread);
      __syncthreads();
    }

    loop.begin(task);
    uint32_t buffer = 0;
    for (; first >= kv_begin; first -= Traits::kKvTile) {
      ptx::cp_async_wait_all();
      __syncthreads();  // K is there, and nobody reads V any more
      loader.visit_values(args, task, first, buffer, copy_values);
      const int32_t next = first - Traits::kKvTile;
      buffer ^= 1;
      if (next >= kv_begin) {
        loader.note(args, task, next, buffer);
        if (next > kv_begin) loader.look_up(args, task, next - Traits::kKvTile);
      }
      const TileSight sight = loop.sight(first);
      if (sight.any) loop.score(first);
      ptx::cp_async_wait_all();
      __syncthreads();  // V is there, and nobody reads K any more
      if (next >= kv_begin) loader.visit_keys(args, task, next, buffer, copy_keys);
      if (sight.any) {
        loop.soften(first, sight.all);
        loop.accumulate();
      }
    }

    write_rows(args, task, state.rows, loop);
    if (task.item.slot >= 0) finish_split<Traits, Variant>(args, task, ptx::thread_index());
    __syncthreads();
    next_task(state, ptx::thread_index());
  }
}

}  // namespace flashbsr::sm80
