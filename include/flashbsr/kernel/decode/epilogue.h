// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From the streaming warps' states to the item's result. The streaming warps leave O, maximum and
// sum in shared memory and go on; the epilogue warps contract them, write the output or the partial
// state, and merge a split tile when its last part has arrived.
#pragma once

#include <flashbsr/kernel/decode/mainloop.h>
#include <flashbsr/kernel/merge_queue.h>
#include <flashbsr/ptx/mbarrier.h>

namespace flashbsr {

/// Pointers into the shared memory of the block, or of one of its warpgroups.
template <class Traits>
struct DecodeShared {
  char* base;
  int group = 0;  ///< the warpgroup's number among those that decode

  FLASHBSR_DEVICE int all_barrier() const { return Traits::kAllBarrier + group; }
  FLASHBSR_DEVICE int states_barrier() const { return Traits::kStatesBarrier + group; }

  FLASHBSR_DEVICE uint32_t ring(int warp) const {
    return ptx::shared_address(base) + warp * Traits::kStages * Traits::kStageBytes;
  }
  FLASHBSR_DEVICE DecodeReady<Traits>& ready(int parity) const {
    static_assert(sizeof(DecodeReady<Traits>) == Traits::kReadyBytes);
    return reinterpret_cast<DecodeReady<Traits>*>(base + Traits::kReadyOffset)[parity];
  }
  FLASHBSR_DEVICE DecodeRows<Traits>& rows(int warp) const {
    return reinterpret_cast<DecodeRows<Traits>*>(base + Traits::kRowsOffset)[warp];
  }
  FLASHBSR_DEVICE float* o(int warp, int row) const {
    return reinterpret_cast<float*>(base + Traits::kStateOffset) +
           (warp * Traits::kRows + row) * Traits::kHeadDim;
  }
  /// (maximum, sum) of a row.
  FLASHBSR_DEVICE float2* sums(int warp, int row) const {
    return reinterpret_cast<float2*>(base + Traits::kSumsOffset) + warp * Traits::kRows + row;
  }
  FLASHBSR_DEVICE DecodeItem* items() const {
    return reinterpret_cast<DecodeItem*>(base + Traits::kItemsOffset);
  }
  // Every lane that wrote arrives, not one for its warp: so compute-sanitizer can follow it.

  /// Completed when the epilogue has read the states of an item.
  FLASHBSR_DEVICE uint32_t empty() const {
    return ptx::shared_address(base) + Traits::kBarrierOffset;
  }
  /// Completed when the items of a turn are there.
  FLASHBSR_DEVICE uint32_t staged() const { return empty() + 8; }
  /// Completed when an item of this parity is ready.
  FLASHBSR_DEVICE uint32_t ready_barrier(int parity) const { return empty() + 16 + 8 * parity; }
  /// Of a warp's ring: a barrier for K and one for V of every stage.
  FLASHBSR_DEVICE uint32_t ring_barriers(int warp) const {
    return ptx::shared_address(base) + Traits::kRingBarrierOffset +
           warp * Traits::kRingBarrierBytes;
  }
  /// Items of the queue. Beside packed codes there is no register for it.
  FLASHBSR_DEVICE int* length() const {
    return reinterpret_cast<int*>(base + Traits::kBarrierOffset + 36);
  }
  /// One word that the epilogue warps share.
  FLASHBSR_DEVICE int* flag() const {
    return reinterpret_cast<int*>(base + Traits::kBarrierOffset + 32);
  }
};

/// A streaming warp's state to shared memory. `item_count` counts the items before this one.
template <class Traits>
FLASHBSR_DEVICE void leave_state(const DecodeShared<Traits>& shared, DecodeState<Traits>& state,
                                 int row_count, int warp, int lane, int item_count) {
  using State = DecodeState<Traits>;
  if constexpr (Traits::kBoxes) lane = ptx::not_ahead(lane);
  const int g = lane >> 2, t = lane & 3;
  if (item_count > 0) ptx::mbarrier_wait<Traits::kArch>(shared.empty(), (item_count - 1) & 1);
#pragma unroll
  for (int n = 0; n < State::kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[n][i];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      const int row = 8 * n + 2 * t + i;
      if (row >= row_count) continue;
      float* o = shared.o(warp, row);
#pragma unroll
      for (int j = 0; j < State::kSteps; ++j) {
        const int d = State::value_dim(j, g);
        if constexpr (State::kPairStep == 1) {
          *reinterpret_cast<float2*>(o + d) = {state.o[j][n][i], state.o[j][n][2 + i]};
        } else {
          o[d] = state.o[j][n][i];
          o[d + State::kPairStep] = state.o[j][n][2 + i];
        }
      }
      if (g == 0) *shared.sums(warp, row) = {state.max[n][i], sum};
    }
  }
  __syncwarp();
  ptx::named_barrier_arrive(shared.states_barrier(), Traits::kThreads);
}

/// Contracts the warps' states of one item; thread `thread` of the epilogue warps. Those of
/// variants without softmax add up.
template <class Traits, class Variant>
FLASHBSR_DEVICE void finish_item(const KernelArgs& args, const DecodeShared<Traits>& shared,
                                 const DecodeItem& item, int thread) {
  constexpr int kQuads = Traits::kHeadDim / 4;
  constexpr bool kSoftmax = Variant::use_softmax;
  constexpr float kShift = Traits::kCompute == DType::kF16 ? 8.0f : 0.0f;  // as in DecodeMath
  constexpr float kUnit = 1.0f / kWeightUnit<Traits, Variant>;
  const Params& p = args.params;
  for (int unit = thread; unit < item.row_count * kQuads; unit += 32 * Traits::kEpilogueWarps) {
    const int row = unit / kQuads, d = unit % kQuads * 4;
    float top = -infinity();
    float o[4] = {}, sum = 0;
    if (!item.empty()) {
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) top = ptx::max(top, shared.sums(w, row)->x);
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) {
        const float2 s = *shared.sums(w, row);
        float weight = 1.0f;
        if constexpr (kSoftmax) {
          weight = s.x == -infinity() ? (s.y == s.y ? 0.0f : s.y) : ptx::exp2(s.x - top);
        }
        const float4 x = *reinterpret_cast<const float4*>(shared.o(w, row) + d);
        sum += weight * s.y;
        weight *= Traits::kValueUnit;
        o[0] += weight * x.x;
        o[1] += weight * x.y;
        o[2] += weight * x.z;
        o[3] += weight * x.w;
      }
    }
    const float lse = !kSoftmax ? 0.0f : sum == 0 ? -infinity() : top + ptx::log2(sum) - kShift;
    if (item.slot >= 0) {
      const float inverse = !kSoftmax ? kUnit : sum == 0 ? 0.0f : 1.0f / sum;
      float* part = partial_out_row(p, item.slot, row) + d;
      if (d < p.v.dim) {
        *reinterpret_cast<float4*>(part) = {o[0] * inverse, o[1] * inverse, o[2] * inverse,
                                            o[3] * inverse};
      }
      if (d == 0) *partial_lse(p, item.slot, row) = lse;
      continue;
    }
    const int packed = item.row_begin + row;
    const int token = args.group.quotient(packed);
    const int head =
        item.kv_head * static_cast<int>(args.group.divisor) + args.group.remainder(packed, token);
    RowEnd end = end_row<kSoftmax>(p, value_scale(p, item.kv_head), head, sum, lse);
    if constexpr (!kSoftmax) end.factor *= kUnit;
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] *= end.factor;
    store_values<Traits::kArch>(p.out.row(item.q_begin + token, head), p.out.dtype, d, p.v.dim, o);
    if (d == 0) write_lse(p, item.q_begin + token, head, end.lse);
  }
}

/// Hands the shared state back; what this item's state completes is merged.
/// @param tile  its first merge
template <class Traits, class Variant>
FLASHBSR_DEVICE void merge_if_last(const KernelArgs& args, const DecodeShared<Traits>& shared,
                                   const DecodeItem& item, const SplitTile& tile, int thread) {
  constexpr int kThreads = 32 * Traits::kEpilogueWarps;
  __syncwarp();
  ptx::mbarrier_arrive(shared.empty());
  if (item.slot < 0) return;
  if constexpr (!Traits::kOwnsBlock) {
    __syncwarp();
    return MergeQueue<>(args).arrive_and_push(tile.index, item.merge_count, thread, kThreads);
  }
  ptx::named_barrier_sync(Traits::kEpilogueBarrier, kThreads);
  // Requests that share KV: a state of a part belongs to several merges.
  const bool together = item.merge_count == 1 && !item.shared();
  if (together) {
    if (thread == 0) *shared.flag() = arrive(args, tile.index, tile.merge.state_count);
    ptx::named_barrier_sync(Traits::kEpilogueBarrier, kThreads);
    if (!*shared.flag()) return;
  }
  // Loads in flight. Beside packed codes there is no register for 16.
  constexpr int kLoads = Traits::kPacked ? 8 : 16;
  merge_complete<Variant::use_softmax, Traits::kArch, 2, kLoads>(args, tile, item.merge_count,
                                                                 {thread, kThreads, together});
}

}  // namespace flashbsr
