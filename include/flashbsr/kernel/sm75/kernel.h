// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Prefill and append on Turing: the sm80 kernel's parts in a loop without cp.async. A tile waits in
// registers, fetched while the tile before it is computed:
//
//   store K | sync | fetch V | S = Q K^T | store V, fetch next K | sync | softmax, O += P V
#pragma once

#include <flashbsr/kernel/sm75/traits.h>
#include <flashbsr/kernel/sm80/epilogue.h>
#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/kernel/sm80/loader.h>
#include <flashbsr/kernel/sm80/mainloop.h>
#include <flashbsr/kernel/sm80/query.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr::sm75 {

/// A thread's chunks of a tile on their way from global to shared memory.
template <int kChunks>
class Staging {
 public:
  FLASHBSR_DEVICE explicit Staging(char* shared) : shared_(shared) {}

  /// What KvLoader's visits call.
  FLASHBSR_DEVICE auto fetch() {
    return [this](int chunk, uint32_t offset, const char* src, uint32_t bytes) {
      offset_[chunk] = offset;
      data_[chunk] = bytes ? *reinterpret_cast<const uint4*>(src) : uint4{};
    };
  }
  FLASHBSR_DEVICE void store(int32_t tile) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      *reinterpret_cast<uint4*>(shared_ + tile + offset_[i]) = data_[i];
    }
  }

 private:
  char* shared_;
  uint4 data_[kChunks];
  uint32_t offset_[kChunks];  // constants after inlining
};

template <class Traits, class Variant>
FLASHBSR_DEVICE void prefill(const KernelArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const sm80::BlockState state(memory, Traits{});
  const uint32_t query_tile = ptx::shared_address(memory);
  const uint32_t key_tile = query_tile + Traits::kKeyOffset;
  const uint32_t value_tile = query_tile + Traits::kValueOffset;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);

  const int32_t num_items = args.header->num_items;
  sm80::KvLoader<Traits> loader(thread);
  sm80::Mainloop<Traits, Variant> loop(args, state.rows, state.scales, thread);
  Staging<sm80::KvLoader<Traits>::kChunks> staging(memory);

  if (thread == 0) state.control->item = sm80::claim_item(args, num_items);
  for (;;) {
    __syncthreads();
    const int32_t index = state.control->item;
    if (index >= num_items) break;
    const WorkItem item = args.items[index];
    const Request request = args.requests[item.request];
    const int32_t tiles = ceil_div(item.kv_end - item.kv_begin, Traits::kKvTile);
    int32_t first = item.kv_begin + (tiles - 1) * Traits::kKvTile;

    sm80::visit_queries<Traits>(args, item, request.q_begin, thread,
                                [&](uint32_t offset, const char* src, uint32_t bytes) {
                                  *reinterpret_cast<uint4*>(memory + offset) =
                                      bytes ? *reinterpret_cast<const uint4*>(src) : uint4{};
                                });
    loader.begin(args, item, request);
    if (tiles > 0) {
      loader.find(args, first);
      loader.visit_keys(args, first, staging.fetch());
    }
    sm80::describe_rows<Traits>(args, item, request, state, thread);
    __syncthreads();
    if (thread == 0) state.control->item = sm80::claim_item(args, num_items);
    if (args.params.rope.fine) {
      sm80::prepare_queries<Traits>(args.params, state.rows, item.row_count,
                                    request.kv_len - request.q_len, memory, state.scales, thread);
    }

    loop.begin(item, request);
    for (int32_t tile = tiles; tile > 0; --tile, first -= Traits::kKvTile) {
      staging.store(Traits::kKeyOffset);
      __syncthreads();  // K is there, and nobody reads V any more
      loader.visit_values(args, first, staging.fetch());
      if (tile > 1) loader.find(args, first - Traits::kKvTile);
      const bool sees = loop.sees(first);
      if (sees) loop.score(query_tile, key_tile, first);
      staging.store(Traits::kValueOffset);
      if (tile > 1) loader.visit_keys(args, first - Traits::kKvTile, staging.fetch());
      __syncthreads();  // V is there, and nobody reads K any more
      if (sees) {
        loop.soften(first);
        loop.accumulate(value_tile);
      }
    }

    sm80::write_rows(args, item, request.q_begin, state.rows, loop, thread % 32);
    if (item.slot >= 0) {
      sm80::finish_split<Traits, Variant>(args, item.merge, state.control, thread);
    }
  }
}

}  // namespace flashbsr::sm75
