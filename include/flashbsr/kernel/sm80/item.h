// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Around a work item: its claim, its rows, and the end of a split tile. Shared by sm75 and sm80.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/tile/rows.h>

namespace flashbsr::sm80 {

/// A claimed item. Kept in shared memory and read where it is needed: the main loop has no
/// registers to spare for it.
struct Task {
  WorkItem item;
  Request request;
  int32_t valid;   ///< false: nothing is left
  int32_t merges;  ///< whether this block merges the item's split tile
  int32_t pad[2];
};

/// Where the item's rows of K, of V or of their scales are: of token t of page p at base + p
/// page_bytes + t token_bytes, modulo 2^64.
struct alignas(16) KvSource {
  uint64_t base;
  uint64_t page_bytes;
  uint64_t token_bytes;
};

/// A block's shared memory besides the tiles.
struct BlockState {
  const char** kv_rows;  ///< addresses of two tiles' rows
  KvSource* sources;     ///< of K and V, and of their scales
  int32_t* pages;        ///< of the tokens of two tiles
  PrefillRow* rows;
  float* scales;        ///< natural logits per dot product, of every row
  float* token_scales;  ///< of two tiles' tokens: K's, then V's
  Visibility* visible;  ///< of every warp's rows
  Task* task;           ///< this one, and behind it the next

  template <class Traits>
  FLASHBSR_DEVICE BlockState(char* memory, Traits)
      : kv_rows(reinterpret_cast<const char**>(memory + Traits::kKvRowOffset)),
        sources(reinterpret_cast<KvSource*>(memory + Traits::kSourceOffset)),
        pages(reinterpret_cast<int32_t*>(memory + Traits::kPageOffset)),
        rows(reinterpret_cast<PrefillRow*>(memory + Traits::kRowOffset)),
        scales(reinterpret_cast<float*>(memory + Traits::kScaleOffset)),
        token_scales(reinterpret_cast<float*>(memory + Traits::kTokenScaleOffset)),
        visible(reinterpret_cast<Visibility*>(memory + Traits::kVisibleOffset)),
        task(reinterpret_cast<Task*>(memory + Traits::kTaskOffset)) {
    static_assert(sizeof(KvSource) == Traits::kSourceBytes);
    static_assert(sizeof(PrefillRow) == Traits::kRowRecordBytes);
    static_assert(sizeof(Visibility) == Traits::kVisibilityBytes);
    static_assert(sizeof(Task) == Traits::kTaskBytes);
  }
};

/// One thread takes the next item. Each block's last claim is past the end, and the last of those
/// resets the counter.
FLASHBSR_DEVICE void claim_task(const KernelArgs& args, Task& task) {
  const int32_t num_items = args.header->num_wide_items;
  const int32_t index = atomicAdd(args.counters, 1);
  if (index == num_items + static_cast<int32_t>(gridDim.x) - 1) *args.counters = 0;
  task.valid = index < num_items;
  if (index >= num_items) return;
  task.item = args.items[index];
  task.request = args.requests[task.item.request];
}

/// Once no thread needs the current task any more; a barrier follows. A fixed place costs the main
/// loop no register for its address.
FLASHBSR_DEVICE void next_task(const BlockState& state, int32_t thread) {
  constexpr int kWords = sizeof(Task) / 4;
  int32_t* words = reinterpret_cast<int32_t*>(state.task);
  if (thread < kWords) words[thread] = words[kWords + thread];
}

/// Where the last tile of an item begins; the first one begins at kv_begin, and if there is none,
/// the last one lies before it.
template <class Traits>
FLASHBSR_DEVICE int32_t last_tile(const WorkItem& item) {
  const int32_t length = max_of(item.kv_end - item.kv_begin, 0);
  return item.kv_begin + (ceil_div(length, Traits::kKvTile) - 1) * Traits::kKvTile;
}

template <class Traits>
FLASHBSR_DEVICE void describe_rows(const KernelArgs& args, const Task& task,
                                   const BlockState& state, int32_t thread) {
  for (int32_t r = thread; r < Traits::kRows; r += Traits::kThreads) {
    const PrefillRow row = describe_row(args, task.item, task.request, r);
    state.rows[r] = row;
    state.scales[r] = Traits::kKeyUnit * logit_scale(args.params, row.q_head, task.item.kv_head);
  }
}

}  // namespace flashbsr::sm80
