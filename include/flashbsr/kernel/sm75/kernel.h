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

  sm80::KvLoader<Traits> loader;
  sm80::Mainloop<Traits, Variant> loop(args, state);
  Staging<sm80::KvLoader<Traits>::kChunks> staging(memory);

  if (thread == 0) sm80::claim_task(args, *state.task);
  for (;;) {
    __syncthreads();
    sm80::Task& task = *state.task;
    if (!task.valid) break;
    const int32_t kv_begin = task.item.kv_begin;
    int32_t first =
        kv_begin + (task.item.kv_end - kv_begin - 1) / Traits::kKvTile * Traits::kKvTile;
    const bool empty = task.item.kv_end <= kv_begin;

    sm80::visit_queries<Traits>(args, task.item, task.request.q_begin, thread,
                                [&](uint32_t offset, const char* src, uint32_t bytes) {
                                  *reinterpret_cast<uint4*>(memory + offset) =
                                      bytes ? *reinterpret_cast<const uint4*>(src) : uint4{};
                                });
    if (!empty) {
      loader.find(args, task, first);
      loader.visit_keys(args, task, first, staging.fetch());
    }
    sm80::describe_rows<Traits>(args, task, state, thread);
    if (thread == 0) sm80::claim_task(args, state.task[1]);
    __syncthreads();
    if (args.params.rope.fine) {
      sm80::prepare_queries<Traits>(args.params, task, state.rows, memory, state.scales, thread);
    }

    loop.begin(task);
    for (; first >= kv_begin && !empty; first -= Traits::kKvTile) {
      staging.store(Traits::kKeyOffset);
      __syncthreads();  // K is there, and nobody reads V any more
      loader.visit_values(args, task, first, staging.fetch());
      const int32_t next = first - Traits::kKvTile;
      if (next >= kv_begin) loader.find(args, task, next);
      const bool sees = loop.sees(first);
      if (sees) loop.score(query_tile, key_tile, first);
      staging.store(Traits::kValueOffset);
      if (next >= kv_begin) loader.visit_keys(args, task, next, staging.fetch());
      __syncthreads();  // V is there, and nobody reads K any more
      if (sees) {
        loop.soften(first);
        loop.accumulate(value_tile);
      }
    }

    sm80::write_rows(args, task, state.rows, loop, thread % 32);
    if (task.item.slot >= 0) sm80::finish_split<Traits, Variant>(args, task, thread);
    __syncthreads();
    sm80::next_task(state, thread);
  }
}

}  // namespace flashbsr::sm75
