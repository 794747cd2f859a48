// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From a warp's registers to the output, or to the partial state of a split tile.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/kernel/sm80/mainloop.h>
#include <flashbsr/kernel/sm80/rows.h>

namespace flashbsr::sm80 {

namespace detail {

/// Neighbouring dims that a thread has: of packed codes, of bytes, of 16 bits.
template <class Traits>
inline constexpr int kRun = Traits::kValuePacked  ? 8
                            : Traits::kValueBytes ? 4
                                                  : 2;

/// x[band][half] of row `r`, of which the compiler must not know which it is at.
template <int kBands>
FLASHBSR_DEVICE float of_row(const float (&x)[kBands][2], int32_t r) {
  static_assert(kBands <= 2);
  const int band = kBands - 1;
  const float low = r & 8 ? x[0][1] : x[0][0], high = r & 8 ? x[band][1] : x[band][0];
  return r & 16 ? high : low;
}

/// Gives store(d, x) the values of a thread's row `r`, in runs; d counts from the thread's first
/// dim.
template <class Traits, class Loop, int kBands, int kDimTiles, class Store>
FLASHBSR_DEVICE void for_each_run(const float (&o)[kBands][kDimTiles][4], int32_t r, float factor,
                                  const Store& store) {
  const auto at = [&](int n, int i) {
    float x[kBands][2];
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      x[b][0] = o[b][n][i];
      x[b][1] = o[b][n][2 + i];
    }
    return of_row(x, r) * factor;
  };
  if constexpr (Traits::kValuePacked) {  // of 32 dims, tile i has every fourth from i on
#pragma unroll
    for (int n = 0; n < kDimTiles; n += 4) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = at(n + i % 4, i / 4);
      store(n * 8, x);
    }
  } else if constexpr (Traits::kValueBytes) {  // tiles 2c and 2c + 1 hold even and odd dims
#pragma unroll
    for (int n = 0; n < kDimTiles; n += 2) {
      const float x[4] = {at(n, 0), at(n + 1, 0), at(n, 1), at(n + 1, 1)};
      store(Loop::column(n * 8), x);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const float x[2] = {at(n, 0), at(n, 1)};
      store(Loop::column(n * 8), x);
    }
  }
}

}  // namespace detail

/// Every thread of the block calls it, with its share of O and what it refers to, of a Mainloop or
/// the like. `memory` is the block's, whose tiles are not read any more where the variant
/// transforms outputs.
template <class Traits, class Variant, class Loop>
FLASHBSR_DEVICE void write_rows(const KernelArgs& args, const Task& task, const PrefillRow* rows,
                                const Loop& loop, char* memory) {
  if constexpr (Variant::transforms_outputs) __syncthreads();
  const Params& p = args.params;
  const WorkItem& item = task.item;
  const int32_t lane = ptx::thread_index() % 32;
  const int32_t first_row = Loop::first_row(ptx::thread_index() / 32);
  const int32_t first_dim = Loop::first_dim(ptx::thread_index()) + lane % 4 * detail::kRun<Traits>;
  const float v_scale = value_scale(p, item.kv_head);
  // One piece of code for all rows of a thread: a piece for each was a fifth of the kernel.
  const int32_t first = first_row + lane / 4;
#pragma unroll 1
  for (int32_t r = first; r < first + 16 * Loop::kBands; r += 8) {
    float sum = detail::of_row(loop.sum, r);
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (r >= item.row_count) continue;
    const float lse = sum == 0.0f ? -infinity() : ptx::log2(sum) - detail::of_row(loop.base, r);
    // Without softmax the weights' shift is all there is to undo.
    constexpr float kUnit = Loop::kShift == 0.0f ? 1.0f : 1.0f / 32768.0f;
    const bool split = item.slot >= 0;
    const bool leads = first_dim == 0;
    RowEnd end{kUnit, lse};
    char* out;
    if (split) {
      if constexpr (Variant::use_softmax) end.factor = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
      out = reinterpret_cast<char*>(partial_out_row(p, item.slot, r));
      if (leads) *partial_lse(p, item.slot, r) = Variant::use_softmax ? lse : 0.0f;
    } else {
      const PrefillRow row = rows[r];
      const int64_t token = static_cast<int64_t>(task.request.q_begin) + row.token;
      end = end_row<Variant::use_softmax>(p, v_scale, row.q_head, sum, lse);
      if constexpr (!Variant::use_softmax) end.factor *= kUnit;
      out = p.out.row(token, row.q_head);
      if (leads) write_lse(p, token, row.q_head, end.lse);
    }
    if constexpr (Traits::kTokenScales) end.factor *= Traits::kValueUnit;
    if constexpr (Variant::transforms_outputs) {
      if (!split) {
        const OutputRow<Traits> kept(memory, r);
        detail::for_each_run<Traits, Loop>(loop.o, r, end.factor, [&](int32_t d, const auto& x) {
          int i = 0;
#pragma unroll
          for (const float v : x) kept[first_dim + d + i++] = v;
        });
        continue;
      }
    }
    // A partial state is stored as an output in fp32 is.
    const DType type = split ? DType::kF32 : p.out.dtype;
    with_output_size(type, [&]<int kSize>() {
      char* const start = out + kSize * first_dim;
      const int32_t left = p.v.dim - first_dim;
      detail::for_each_run<Traits, Loop>(loop.o, r, end.factor, [&](int32_t d, const auto& x) {
        store_sized<kSize, Traits::kArch>(start, type, d, Loop::kExact ? d + 1 : left, x);
      });
    });
  }
  if constexpr (Variant::transforms_outputs) {
    if (item.slot < 0) {
      write_transformed<Traits, Variant>(args, task, rows, memory, ptx::thread_index());
    }
  }
}

/// After the block's stores of a partial state: what it completes is merged.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_split(const KernelArgs& args, Task& task, const PrefillRow* rows,
                                  char* memory, int32_t thread) {
  __syncthreads();
  // Loads in flight. With eight, three kernels with hooks spill a register.
  constexpr int kLoads = kHasHooks<Variant> ? 4 : 8;
  const int32_t merge = task.item.merge, count = task.item.merge_count;
  // Requests that share KV: a state of a part belongs to several merges. Their variants have no
  // output_transform.
  const bool together = count == 1;
  if (together) {
    if (thread == 0) task.merges = arrive(args, merge);
    __syncthreads();
    if (!task.merges) return;
    if constexpr (Variant::transforms_outputs) {
      const auto keep = [&](int32_t row, int64_t, int32_t, int32_t d, const float (&o)[4]) {
        const OutputRow<Traits> out(memory, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) out[d + i] = o[i];
      };
      contract_split_tile<Variant::use_softmax>(args, split_tile(args, merge), thread,
                                                Traits::kThreads, keep);
      return write_transformed<Traits, Variant>(args, task, rows, memory, thread);
    }
  }
  merge_complete<Variant::use_softmax, Traits::kArch, 1, kLoads>(
      args, split_tile(args, merge), count, {thread, Traits::kThreads, together});
}

}  // namespace flashbsr::sm80
