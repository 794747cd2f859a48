// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Around a work item: its claim, its rows, and the end of a split tile. Shared by sm75 and sm80.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/tile/rows.h>

namespace flashbsr::sm80 {

/// What the threads of a block tell each other.
struct Control {
  int32_t item;    ///< claimed
  int32_t merges;  ///< whether this block merges the split tile
};

/// A block's shared memory besides the tiles.
struct BlockState {
  PrefillRow* rows;
  float* scales;  ///< natural logits per dot product, of every row
  Control* control;

  template <class Traits>
  FLASHBSR_DEVICE BlockState(char* memory, Traits)
      : rows(reinterpret_cast<PrefillRow*>(memory + Traits::kRowOffset)),
        scales(reinterpret_cast<float*>(memory + Traits::kScaleOffset)),
        control(reinterpret_cast<Control*>(memory + Traits::kControlOffset)) {
    static_assert(sizeof(PrefillRow) == Traits::kRowRecordBytes);
    static_assert(Traits::kControlOffset + sizeof(Control) <= Traits::kSmemBytes);
  }
};

/// One thread takes the next item. Each block's last claim is past the end, and the last of those
/// resets the counter.
FLASHBSR_DEVICE int32_t claim_item(const KernelArgs& args, int32_t num_items) {
  const int32_t item = atomicAdd(args.counters, 1);
  if (item == num_items + static_cast<int32_t>(gridDim.x) - 1) *args.counters = 0;
  return item;
}

template <class Traits>
FLASHBSR_DEVICE void describe_rows(const KernelArgs& args, const WorkItem& item,
                                   const Request& request, const BlockState& state,
                                   int32_t thread) {
  for (int32_t r = thread; r < Traits::kRows; r += Traits::kThreads) {
    const PrefillRow row = describe_row(args, item, request, r);
    state.rows[r] = row;
    state.scales[r] = logit_scale(args.params, row.q_head, item.kv_head);
  }
}

/// After the block's stores of a partial state: the last block to arrive merges the tile.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_split(const KernelArgs& args, int32_t merge, Control* control,
                                  int32_t thread) {
  __syncthreads();
  if (thread == 0) control->merges = arrive(args, merge);
  __syncthreads();
  if (control->merges) {
    merge_split_tile<Variant::use_softmax, Traits::kArch>(args, merge, thread, Traits::kThreads);
  }
}

}  // namespace flashbsr::sm80
