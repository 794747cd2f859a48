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
  const int32_t num_items = args.header->num_items;
  KvLoader<Traits> loader(thread);
  Mainloop<Traits, Variant> loop(args, state.rows, state.scales, thread);

  if (thread == 0) state.control->item = claim_item(args, num_items);
  for (;;) {
    __syncthreads();
    const int32_t index = state.control->item;
    if (index >= num_items) break;
    const WorkItem item = args.items[index];
    const Request request = args.requests[item.request];
    const int32_t tiles = ceil_div(item.kv_end - item.kv_begin, Traits::kKvTile);
    int32_t first = item.kv_begin + (tiles - 1) * Traits::kKvTile;

    visit_queries<Traits>(args, item, request.q_begin, thread, AsyncCopy{query_tile});
    loader.begin(args, item, request);
    if (tiles > 0) {
      loader.find(args, first);
      loader.visit_keys(args, first, AsyncCopy{key_tile});
    }
    ptx::cp_async_commit();
    describe_rows<Traits>(args, item, request, state, thread);
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (thread == 0) state.control->item = claim_item(args, num_items);
    if (Traits::kFloat8 || (kHasHooks<Variant> && args.params.rope.fine)) {
      prepare_queries<Traits>(args.params, state.rows, item.row_count,
                              request.kv_len - request.q_len, memory, state.scales, thread);
      __syncthreads();
    }

    loop.begin(item, request);
    for (int32_t tile = tiles; tile > 0; --tile, first -= Traits::kKvTile) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // K is there, and nobody reads V any more
      loader.visit_values(args, first, AsyncCopy{value_tile});
      ptx::cp_async_commit();
      if (tile > 1) loader.find(args, first - Traits::kKvTile);
      const bool sees = loop.sees(first);
      if (sees) loop.score(query_tile, key_tile, first);
      ptx::cp_async_wait<0>();
      __syncthreads();  // V is there, and nobody reads K any more
      if (tile > 1) loader.visit_keys(args, first - Traits::kKvTile, AsyncCopy{key_tile});
      ptx::cp_async_commit();
      if (sees) {
        loop.soften(first);
        loop.accumulate(value_tile);
      }
    }

    write_rows(args, item, request.q_begin, state.rows, loop, thread % 32);
    if (item.slot >= 0) finish_split<Traits, Variant>(args, item.merge, state.control, thread);
  }
}

}  // namespace flashbsr::sm80
