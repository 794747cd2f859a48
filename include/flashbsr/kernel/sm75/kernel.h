// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Prefill and append on Turing: the sm80 kernel's parts in a loop without cp.async. A tile waits in
// registers, fetched while the tile before it is computed:
//
//   store K | sync | fetch V | S = Q K^T | store V, fetch next K | sync | softmax, O += P V
#pragma once

#include <flashbsr/kernel/sm75/scales.h>
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
  /// @param idle  the thread has none
  FLASHBSR_DEVICE Staging(char* shared, bool idle) : shared_(shared), idle_(idle) {}

  /// What KvLoader's visits call.
  FLASHBSR_DEVICE auto fetch() {
    return [this](int chunk, uint32_t offset, const char* src, bool inside) {
      offset_[chunk] = offset;
      data_[chunk] = inside ? *reinterpret_cast<const uint4*>(src) : uint4{};
    };
  }
  FLASHBSR_DEVICE void store(int32_t tile) const {
    if (idle_) return;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      *reinterpret_cast<uint4*>(shared_ + tile + offset_[i]) = data_[i];
    }
  }

 private:
  char* shared_;
  bool idle_;
  uint4 data_[kChunks];
  uint32_t offset_[kChunks];  // constants after inlining
};

template <class Traits, class Variant>
FLASHBSR_DEVICE void prefill(const KernelArgs& args) {
  extern __shared__ __align__(1024) char memory[];
  const sm80::BlockState state(memory, Traits{});
  const uint32_t query_tile = ptx::shared_address(memory);

  sm80::KvLoader<Traits> loader(state, ptx::thread_index());
  sm80::Mainloop<Traits, Variant> loop(args, state, query_tile, ptx::thread_index());
  using Loader = sm80::KvLoader<Traits>;
  Staging<Loader::kChunks> staging(memory, Loader::is_idle(ptx::thread_index()));
  TokenScales<Traits> scales(memory, state);

  if (threadIdx.x == 0) sm80::claim_task(args, *state.task);
  for (;;) {
    const int32_t thread = ptx::thread_index();  // anew: what is derived from it is not kept
    __syncthreads();
    sm80::Task& task = *state.task;
    if (!task.valid) break;
    int32_t first = sm80::last_tile<Traits>(task.item);
    const bool empty = first < task.item.kv_begin;

    if (!empty) loader.look_up(args, task, first, 0);
    sm80::visit_queries<Traits>(args, task.item, task.request, thread,
                                [&](uint32_t offset, const char* src, bool inside) {
                                  *reinterpret_cast<uint4*>(memory + offset) =
                                      inside ? *reinterpret_cast<const uint4*>(src) : uint4{};
                                });
    sm80::describe_rows<Traits>(args, task, state, thread);
    sm80::KvLoader<Traits>::describe_sources(args, task, state, thread);
    __syncthreads();
    if (!empty) {
      loader.note(args, task, first, 0);
      if (first > task.item.kv_begin) loader.look_up(args, task, first - Traits::kKvTile, 0);
    }
    if (thread == 0) sm80::claim_task(args, state.task[1]);
    __syncthreads();
    if (!empty) {
      loader.visit_keys(args, task, first, 0, staging.fetch());
      scales.fetch(loader, args.params, 0, task.item.kv_end - first);
    }
    scales.begin();
    constexpr bool kCodes = dtype_size(Traits::kKv) == 1;
    if (kCodes || (Variant::takes_rope && args.params.rope.fine)) {
      sm80::prepare_queries<Traits>(args.params, task, state.rows, memory, state.scales, thread);
    }
    if (kCodes) __syncthreads();  // rows of bf16 have other scales now

    loop.begin(task);
    uint32_t buffer = 0;
    for (; first >= task.item.kv_begin; first -= Traits::kKvTile) {
      staging.store(Traits::kKeyOffset);
      scales.store(buffer);
      __syncthreads();  // K is there, and nobody reads V any more
      loader.visit_values(args, task, first, buffer, staging.fetch());
      const int32_t next = first - Traits::kKvTile;
      const uint32_t slot = buffer;
      buffer ^= 1;
      if (next >= task.item.kv_begin) {
        loader.note(args, task, next, buffer);
        if (next > task.item.kv_begin) loader.look_up(args, task, next - Traits::kKvTile, 0);
      }
      const sm80::TileSight sight = loop.sight(first);
      if (sight.any) loop.score(first, 0, slot, sm80::Nothing{});
      staging.store(Traits::kValueOffset);
      __syncthreads();  // V is there, and nobody reads K any more
      if (next >= task.item.kv_begin) {
        loader.visit_keys(args, task, next, buffer, staging.fetch());
        scales.fetch(loader, args.params, buffer, Traits::kKvTile);
      }
      if (sight.any) {
        scales.turn(loop, slot);
        loop.soften(first, sight.all);
        loop.resume(0, 0);
      }
    }

    scales.finish(loop);
    sm80::write_rows<Traits, Variant>(args, task, state.rows, loop, memory);
    if (task.item.slot >= 0) {
      sm80::finish_split<Traits, Variant>(args, task, state.rows, memory, ptx::thread_index());
    }
    __syncthreads();
    sm80::next_task(state, ptx::thread_index());
  }
}

}  // namespace flashbsr::sm75
