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
#include <flashbsr/kernel/sm80/rows.h>
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

/// Whether registers are too few for what shared memory has, too.
template <class Traits>
inline constexpr bool kReadsAgain = Traits::kPacked && Traits::kRows == 128;

/// Where a slot's tile of V is, behind the first, if that of K is `tile` bytes behind its first.
template <class Traits>
FLASHBSR_DEVICE uint32_t value_tile(uint32_t tile) {
  if constexpr (Traits::kValueTileBytes == Traits::kTileBytes) return tile;
  return tile == 0 ? 0 : Traits::kValueTileBytes;
}

/// Copies of whole tiles between the products, which hide them.
template <class Traits, int kSteps, int kBlocks>
struct Feed {
  const KernelArgs& args;
  const Task& task;
  KvLoader<Traits>& loader;
  uint32_t keys, values;  ///< shared addresses of the first tiles
  int32_t first;
  uint32_t slot;  ///< of the tile at `first`
  bool has_more;  ///< there is a next one

  FLASHBSR_DEVICE bool more() const {
    if constexpr (kReadsAgain<Traits>) return first - Traits::kKvTile >= task.item.kv_begin;
    return has_more;
  }

  /// Of the slot of the tile after.
  FLASHBSR_DEVICE uint32_t next_tile(int bytes) const {
    return Traits::kStages == 1 ? 0 : (slot ^ 1) * bytes;
  }

  /// Row `i` of the copies between the products of S: of V, or of the next K and V.
  FLASHBSR_DEVICE const char* source(int i) const {
    if constexpr (Traits::kStages == 1) return loader.source(slot, true, i);
    return loader.source(slot ^ 1, i >= kRows, i < kRows ? i : i - kRows);
  }
  FLASHBSR_DEVICE void begin() { next_source = source(0); }
  FLASHBSR_DEVICE void step(int step) {
    constexpr int kAll = Traits::kStages == 1 ? kValueRows : kRows + kValueRows;
#pragma unroll
    for (int i = step * kAll / kSteps; i < (step + 1) * kAll / kSteps; ++i) {
      if constexpr (Traits::kStages == 1) {
        loader.copy_row(values, true, i, next_source, true);
      } else if (i < kRows) {
        loader.copy_row(keys + next_tile(Traits::kTileBytes), false, i, next_source, more());
      } else {
        loader.copy_row(values + next_tile(Traits::kValueTileBytes), true, i - kRows, next_source,
                        more());
      }
      if (i + 1 < kAll) next_source = source(i + 1);
    }
  }
  FLASHBSR_DEVICE void block_begin(int block) {
    if (block == 0 && more()) loader.copy_scales(args.params, slot ^ 1, Traits::kKvTile);
    if (Traits::kStages == 1 && block == 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        loader.copy_row(keys, false, i, loader.source(slot ^ 1, false, i), more());
      }
    }
    if (block == kNoteBlock) found = loader.find(args, task, first - 2 * Traits::kKvTile, slot);
  }
  FLASHBSR_DEVICE void block_end(int block) {
    if (block == kNoteBlock) {
      loader.note(found, slot);
      loader.look_up(args, task, first - 3 * Traits::kKvTile, slot ^ 1);
    }
  }

  static constexpr int kRows = KvLoader<Traits>::kRows;  ///< of K that a thread copies
  static constexpr int kValueRows = KvLoader<Traits>::kValueRows;
  static constexpr int kNoteBlock = kBlocks > 2 ? kBlocks - 2 : 0;
  const char* next_source = nullptr;
  typename KvLoader<Traits>::Found found = {};
};

/// All threads, at the beginning of an item whose last tile is at `first`, if it is not `empty`: Q
/// is under way to `query_tile`, its rows are described, where those of two tiles of KV are is
/// noted and the pages of a third are asked for, and the next item is claimed.
template <class Traits>
FLASHBSR_DEVICE void begin_item(const KernelArgs& args, const BlockState& state,
                                KvLoader<Traits>& loader, int32_t thread, uint32_t query_tile,
                                int32_t first, bool empty) {
  constexpr int kTile = Traits::kKvTile;
  Task& task = *state.task;
  if (!empty) {
    loader.look_up(args, task, first, 0);
    loader.look_up(args, task, first - kTile, 1);
  }
  ptx::cp_async_commit();
  visit_queries<Traits>(args, task.item, task.request, thread, AsyncCopy{query_tile});
  ptx::cp_async_commit();
  describe_rows<Traits>(args, task, state, thread);
  KvLoader<Traits>::describe_sources(args, task, state, thread);
  ptx::cp_async_wait<1>();  // the pages, not Q
  __syncthreads();
  if (!empty) {
    loader.note(args, task, first, 0);
    loader.note(args, task, first - kTile, 1);
    loader.look_up(args, task, first - 2 * kTile, 0);
  }
  if (thread == 0) claim_task(args, state.task[1]);
  __syncthreads();
}

template <class Traits, class Variant>
FLASHBSR_DEVICE void prefill(const KernelArgs& args) {
  constexpr int kTile = Traits::kKvTile;
  constexpr bool kTwo = Traits::kStages == 2;
  constexpr bool kFew = kHasHooks<Variant> || kReadsAgain<Traits>;
  using Loop = Mainloop<Traits, Variant>;
  extern __shared__ __align__(1024) char memory[];
  const BlockState state(memory, Traits{});
  const uint32_t query_tile = ptx::shared_address(memory);
  const uint32_t keys = query_tile + Traits::kKeyOffset;
  const uint32_t values = query_tile + Traits::kValueOffset;

  KvLoader<Traits> loader(state, ptx::thread_index());
  Loop loop(args, state, query_tile, ptx::thread_index());

  if (threadIdx.x == 0) claim_task(args, *state.task);
  for (;;) {
    const int32_t thread = ptx::thread_index();  // anew: what is derived from it is not kept
    __syncthreads();
    Task& task = *state.task;
    if (!task.valid) break;
    int32_t first = last_tile<Traits>(task.item);
    const int32_t kv_begin = task.item.kv_begin;
    const auto begin = [&] { return kFew ? task.item.kv_begin : kv_begin; };
    const bool empty = first < kv_begin;

    begin_item<Traits>(args, state, loader, thread, query_tile, first, empty);
    if (!empty) {
      loader.copy_scales(args.params, 0, task.item.kv_end - first);
      loader.visit_keys(args, task, first, 0, AsyncCopy{keys});
      if (kTwo) loader.visit_values(args, task, first, 0, AsyncCopy{values});
    }
    if constexpr (Variant::transforms_queries) {
      ptx::cp_async_wait_all();
      __syncthreads();
      rewrite_queries<Traits, Variant>(args, task, state.rows, memory, thread);
      __syncthreads();
    }
    if (dtype_size(Traits::kKv) == 1 || (Variant::takes_rope && args.params.rope.fine)) {
      ptx::cp_async_wait_all();
      __syncthreads();
      prepare_queries<Traits>(args.params, task, state.rows, memory, state.scales, thread);
      __syncthreads();
    }

    loop.begin(task);
    const bool plain = loop.is_plain() && args.params.k.dim == Traits::kHeadDim &&
                       args.params.v.dim == Traits::kHeadDim;
    uint32_t slot = 0;  // of notes, and of tiles where there are two
    while (first >= begin()) {
      const TileSight sight = loop.sight(first);
      int done = 0;
      if (!kHasHooks<Variant> && plain && sight.all) {
        const int32_t whole = loop.whole_begin();
        for (;;) {
          ptx::cp_async_wait_all();
          loader.settle_scales(args.params, slot);
          __syncthreads();
          Feed<Traits, Loop::kSteps, Loop::kBlocks> feed{
              args, task, loader, keys, values, first, slot, first - kTile >= begin()};
          const uint32_t tile = kTwo ? slot * Traits::kTileBytes : 0;
          loop.score(first, tile, slot, feed);
          if constexpr (!kTwo) {
            ptx::cp_async_wait_all();
            __syncthreads();
          }
          done = loop.accumulate(value_tile<Traits>(tile), feed);
          if (done < Loop::kBlocks) break;
          first -= kTile;
          slot ^= 1;
          if (first < max_of(kFew ? loop.whole_begin() : whole, begin())) break;
        }
        if (done == Loop::kBlocks) continue;
        Feed<Traits, Loop::kSteps, Loop::kBlocks> feed{
            args, task, loader, keys, values, first, slot, first - kTile >= begin()};
        for (int block = done; block < Loop::kBlocks; ++block) {
          feed.block_begin(block);
          feed.block_end(block);
        }
        loop.resume(done, kTwo ? slot * Traits::kValueTileBytes : 0);
      } else {
        ptx::cp_async_wait_all();
        loader.settle_scales(args.params, slot);
        __syncthreads();  // K is there, and nobody reads the buffers of before any more
        const bool more = first - kTile >= begin();
        const int32_t next = first - kTile;
        const uint32_t tile = kTwo ? slot * Traits::kTileBytes : 0;
        const uint32_t next_tile = kTwo ? Traits::kTileBytes - tile : 0;
        // Hooks leave no registers to keep a thread's share in.
        const KvLoader<Traits> copier =
            kHasHooks<Variant> ? KvLoader<Traits>(state, ptx::thread_index()) : loader;
        if (more) copier.copy_scales(args.params, slot ^ 1, kTile);
        if constexpr (kTwo) {
          if (more) {
            copier.visit_keys(args, task, next, slot ^ 1, AsyncCopy{keys + next_tile});
            copier.visit_values(args, task, next, slot ^ 1,
                                AsyncCopy{values + value_tile<Traits>(next_tile)});
          }
        } else {
          copier.visit_values(args, task, first, slot, AsyncCopy{values});
        }
        if constexpr (Variant::transforms_keys || (kTwo && Variant::transforms_values)) {
          const int32_t row = ptx::thread_index();
          rewrite_tile<Traits, Variant, false>(args, task, first,
                                               memory + Traits::kKeyOffset + tile, row);
          if constexpr (kTwo) {
            rewrite_tile<Traits, Variant, true>(
                args, task, first, memory + Traits::kValueOffset + value_tile<Traits>(tile), row);
          }
          __syncthreads();
        }
        if (sight.any) loop.score(first, tile, slot, Nothing{});
        if constexpr (!kTwo) {
          ptx::cp_async_wait_all();
          __syncthreads();  // V is there, and nobody reads K any more
          if constexpr (Variant::transforms_values) {
            rewrite_tile<Traits, Variant, true>(args, task, first, memory + Traits::kValueOffset,
                                                ptx::thread_index());
            __syncthreads();
          }
          if (more) copier.visit_keys(args, task, next, slot ^ 1, AsyncCopy{keys});
        }
        loader.note(args, task, first - 2 * kTile, slot);
        loader.look_up(args, task, first - 3 * kTile, slot ^ 1);
        if (sight.any) {
          loop.soften(first, sight.all);
          loop.resume(0, value_tile<Traits>(tile));
        }
      }
      first -= kTile;
      slot ^= 1;
    }

    ptx::cp_async_wait_all();  // page ids of tiles that do not exist
    write_rows<Traits, Variant>(args, task, state.rows, loop, memory);
    if (task.item.slot >= 0) {
      finish_split<Traits, Variant>(args, task, state.rows, memory, ptx::thread_index());
    }
    __syncthreads();
    next_task(state, ptx::thread_index());
  }
}

}  // namespace flashbsr::sm80
