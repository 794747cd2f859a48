// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The last steps of a row, shared by every kernel: sink, v scale, output type, LSE unit; partial
// states of split tiles, the arrival of their parts, and the merge. cpu/epilogue.h is the same on
// the CPU.
//
//   unsplit: end_row -> store_values, write_lse
//   split:   partial_out_row, partial_lse -> block barrier -> one thread: arrive -> block barrier
//            -> in the last block: merge_split_tile
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/math.h>
#include <flashbsr/ptx/sync.h>

namespace flashbsr {

/// What is left to do to a row: O times `factor`, and its LSE in base 2.
struct RowEnd {
  float factor;
  float lse;
};

/// What outputs of a KV head are multiplied by.
FLASHBSR_DEVICE float value_scale(const Params& p, int32_t kv_head) {
  return p.v_head_scale ? p.out_scale * p.v_head_scale[kv_head] : p.out_scale;
}

/// `o` still has to be divided by `sum` (1 where it is normalised, 0 where the row saw nothing);
/// `lse` is in base 2, without the sink. Without softmax both are ignored.
/// @param v_scale  value_scale() of the row
template <bool kSoftmax>
FLASHBSR_DEVICE RowEnd end_row(const Params& p, float v_scale, int32_t q_head, float sum,
                               float lse) {
  if constexpr (!kSoftmax) return {v_scale, 0.0f};
  float factor = sum == 0.0f ? 0.0f : v_scale * ptx::reciprocal(sum);
  if (p.sinks) {
    // state.h's sink_weights, with the device's exponentials.
    const float sink = p.sinks[q_head] * kLog2e;
    if (lse != -infinity() || sink != -infinity()) {
      const float top = max_of(lse, sink);
      const float row = ptx::exp2(lse - top), both = row + ptx::exp2(sink - top);
      factor *= row * ptx::reciprocal(both);
      lse = top + ptx::log2(both);
    }
  }
  return {factor, lse};
}

/// `lse` in base 2. One thread of a row calls it.
FLASHBSR_DEVICE void write_lse(const Params& p, int64_t token, int32_t q_head, float lse) {
  if (p.lse) p.lse[token * p.lse_stride_token + q_head * p.lse_stride_head] = lse * p.lse_unit;
}

/// Calls f.operator()<bytes>() for the run-time type of an output: f32, f16 or bf16, e4m3.
template <class F>
FLASHBSR_DEVICE void with_output_size(DType t, const F& f) {
  if (dtype_size(t) == 2) {
    f.template operator()<2>();
  } else if (t == DType::kF32) {
    f.template operator()<4>();
  } else {
    f.template operator()<1>();
  }
}

/// Stores row[d, d + kCount) in a type of kSize bytes, nothing where d >= dim. `row` is 16-byte
/// aligned, d a multiple of kCount, dim of 8. Both types of two bytes are one piece of code: with a
/// piece for each prefill kernels took a tenth longer to compile.
template <int kSize, int kArch = 80, int kCount>
FLASHBSR_DEVICE void store_sized(char* row, DType t, int32_t d, int32_t dim,
                                 const float (&x)[kCount]) {
  static_assert(kCount == 2 || kCount == 4 || kCount == 8);
  // Asked at the stores, or what comes before is a branch of its own, too.
  const auto store = [inside = d < dim](auto* to, const auto& value) {
    if (inside) *to = value;
  };
  if constexpr (kSize == 4) {
    float* dst = reinterpret_cast<float*>(row) + d;
    if constexpr (kCount == 2) {
      store(reinterpret_cast<float2*>(dst), float2{x[0], x[1]});
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        store(reinterpret_cast<float4*>(dst + i), float4{x[i], x[i + 1], x[i + 2], x[i + 3]});
      }
    }
  } else if constexpr (kSize == 1) {
    char* dst = row + d;
    if constexpr (kCount == 2) {
      const uint32_t pair = ptx::pack2_e4m3<kArch>(x[0], x[1]);
      store(reinterpret_cast<uint16_t*>(dst), static_cast<uint16_t>(pair));
    } else {
      uint32_t four[kCount / 4];
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        four[i] = ptx::pack4_e4m3<kArch>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      }
      if constexpr (kCount == 4) store(reinterpret_cast<uint32_t*>(dst), four[0]);
      if constexpr (kCount == 8) store(reinterpret_cast<uint2*>(dst), uint2{four[0], four[1]});
    }
  } else {
    uint32_t pair[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      // Both, and one of them: without a branch.
      const uint32_t brain = ptx::pack2<DType::kBF16, kArch>(x[2 * i], x[2 * i + 1]),
                     half = ptx::pack2<DType::kF16, kArch>(x[2 * i], x[2 * i + 1]);
      pair[i] = t == DType::kBF16 ? brain : half;
    }
    char* dst = row + 2 * d;
    if constexpr (kCount == 2) store(reinterpret_cast<uint32_t*>(dst), pair[0]);
    if constexpr (kCount == 4) store(reinterpret_cast<uint2*>(dst), uint2{pair[0], pair[1]});
    if constexpr (kCount == 8) {
      store(reinterpret_cast<uint4*>(dst), uint4{pair[0], pair[1], pair[2], pair[3]});
    }
  }
}

/// The same in a run-time type.
template <int kArch = 80, int kCount>
FLASHBSR_DEVICE void store_values(char* row, DType t, int32_t d, int32_t dim,
                                  const float (&x)[kCount]) {
  with_output_size(t, [&]<int kSize>() { store_sized<kSize, kArch>(row, t, d, dim, x); });
}

/// Partial O [D_vo] of row `row` of the state at `slot`, normalised fp32, rows 32-byte aligned.
FLASHBSR_DEVICE float* partial_out_row(const Params& p, int32_t slot, int32_t row) {
  return p.partial_out + static_cast<int64_t>(slot + row) * p.v.dim;
}

/// Partial LSE of that row, base 2.
FLASHBSR_DEVICE float* partial_lse(const Params& p, int32_t slot, int32_t row) {
  return p.partial_lse + (slot + row);
}

/// A merge with what its request adds. Two loads, one after another: a kernel makes them while it
/// waits for something else.
struct SplitTile {
  int32_t index;  ///< of the merge
  Merge merge;
  int32_t q_begin;
};

FLASHBSR_DEVICE SplitTile split_tile(const KernelArgs& args, int32_t index) {
  const Merge merge = args.merges[index];
  return {index, merge, args.requests[merge.request].q_begin};
}

/// Counts a block's partial state as written; true in the block that must merge. One thread calls
/// it, between a barrier after the stores of all and a barrier before the merge.
FLASHBSR_DEVICE bool arrive(const KernelArgs& args, int32_t index, int32_t state_count) {
  int32_t* counter = args.counters + 1 + index;
  const bool last = ptx::atomic_add_acq_rel(counter, 1) == state_count - 1;
  if (last) *counter = 0;  // for the next run
  return last;
}
FLASHBSR_DEVICE bool arrive(const KernelArgs& args, int32_t index) {
  return arrive(args, index, args.merges[index].state_count);
}

/// Where a merge's states are, a batch at a time: known before the first is loaded, or the load of
/// a part between the loads of two states makes each wait for the one before it (append of 4 x 512
/// tokens to 8192: 659 TFLOP/s instead of 702).
class StateCursor {
 public:
  FLASHBSR_DEVICE StateCursor(const KernelArgs& args, const Merge& m)
      : parts_(args.merge_parts + m.part), at_{m.slot, m.state_count, m.row_count, 0} {
    if (m.part >= 0) at_ = *parts_++;
  }
  /// The first rows of the next states, of which `left` are left; behind the last anything.
  template <int kCount>
  FLASHBSR_DEVICE void next(int32_t left, int32_t (&slot)[kCount]) {
    if (at_.count >= min_of(left, kCount)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) slot[i] = at_.slot + i * at_.stride;
      at_.slot += kCount * at_.stride;
      at_.count -= kCount;
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (at_.count == 0 && i < left) at_ = *parts_++;
      slot[i] = at_.slot;
      at_.slot += at_.stride;
      --at_.count;
    }
  }

 private:
  const MergePart* parts_;
  MergePart at_;
};

namespace detail {

/// Past L1: another SM wrote it during this kernel.
FLASHBSR_DEVICE float load_cg(const float* p) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
FLASHBSR_DEVICE float4 load_cg4(const float* p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

}  // namespace detail

/// Four dims of a finished row to the output: what merge_split_tile does with them otherwise.
template <int kArch>
struct StoreOutput {
  const Params& p;

  FLASHBSR_DEVICE void operator()(int32_t, int64_t token, int32_t q_head, int32_t d,
                                  const float (&o)[4]) const {
    store_values<kArch>(p.out.row(token, q_head), p.out.dtype, d, p.v.dim, o);
  }
};

/// Contracts the partial states of a merge in their order, so that the result does not depend
/// on who arrived when, and writes the LSE and by store(row of the tile, token, query head, dim,
/// values) the output. `thread` of `threads` calls it with all the others; each takes kQuads times
/// four dims of a row at a time, with kLoads loads in flight. States of variants without softmax
/// add up.
template <bool kSoftmax, int kQuads = 1, int kLoads = 8, class Store>
FLASHBSR_DEVICE void contract_split_tile(const KernelArgs& args, const SplitTile& tile,
                                         int32_t thread, int32_t threads, const Store& store) {
  const Params& p = args.params;
  const Merge& m = tile.merge;
  const int32_t part_dims = p.v.dim / kQuads, chunks = part_dims / 4;

  for (int32_t unit = thread; unit < m.row_count * chunks; unit += threads) {
    const int32_t row = unit / chunks;
    const int32_t d = (unit - row * chunks) * 4;
    StateCursor states(args, m);
    float o[kQuads][4] = {};
    float top = -infinity(), sum = 0.0f;

    // Loads in flight hide the latency of L2; the maximum is taken over as many states.
    constexpr int kBatch = kLoads / kQuads;
    for (int32_t left = m.state_count; left > 0; left -= kBatch) {
      int32_t slot[kBatch];
      states.next(left, slot);
      float4 x[kBatch][kQuads];
      float weight[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        weight[i] = kSoftmax ? -infinity() : 0.0f;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) x[i][q] = {};
        if (i < left) {
          const float* part = partial_out_row(p, slot[i], row) + d;
#pragma unroll
          for (int q = 0; q < kQuads; ++q) x[i][q] = detail::load_cg4(part + q * part_dims);
          weight[i] = 1.0f;
          if constexpr (kSoftmax) weight[i] = detail::load_cg(partial_lse(p, slot[i], row));
        }
      }
      if constexpr (kSoftmax) {
        float new_top = top;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) new_top = ptx::max(new_top, weight[i]);
        const float shrink = top == -infinity() ? 0.0f : ptx::exp2(top - new_top);
        top = new_top;
        sum *= shrink;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[q][i] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          weight[i] = weight[i] == -infinity() ? 0.0f : ptx::exp2(weight[i] - top);
          sum += weight[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          o[q][0] += weight[i] * x[i][q].x;
          o[q][1] += weight[i] * x[i][q].y;
          o[q][2] += weight[i] * x[i][q].z;
          o[q][3] += weight[i] * x[i][q].w;
        }
      }
    }

    const int32_t packed = m.row_begin + row;
    const int32_t in_request = args.group.quotient(packed);
    const int32_t q_head = m.kv_head * static_cast<int32_t>(args.group.divisor) +
                           args.group.remainder(packed, in_request);
    const int64_t token = static_cast<int64_t>(tile.q_begin) + in_request;
    const float lse = sum == 0.0f ? -infinity() : top + ptx::log2(sum);
    const RowEnd end = end_row<kSoftmax>(p, value_scale(p, m.kv_head), q_head, sum, lse);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[q][i] *= end.factor;
      store(row, token, q_head, d + q * part_dims, o[q]);
    }
    if (d == 0) write_lse(p, token, q_head, end.lse);
  }
}

template <bool kSoftmax, int kArch = 80, int kQuads = 1, int kLoads = 8>
FLASHBSR_DEVICE void merge_split_tile(const KernelArgs& args, const SplitTile& tile, int32_t thread,
                                      int32_t threads) {
  contract_split_tile<kSoftmax, kQuads, kLoads>(args, tile, thread, threads,
                                                StoreOutput<kArch>{args.params});
}

template <bool kSoftmax, int kArch = 80, int kQuads = 1, int kLoads = 8>
FLASHBSR_DEVICE void merge_split_tile(const KernelArgs& args, int32_t index, int32_t thread,
                                      int32_t threads) {
  merge_split_tile<kSoftmax, kArch, kQuads, kLoads>(args, split_tile(args, index), thread, threads);
}

/// Who merges: all threads of `threads` the one merge that they know to be complete, or each warp
/// of them its own runs.
struct MergeCrew {
  int32_t thread, threads;
  bool together;
};

/// Merges what a state completes of `count` runs from `first` on, which requests that share KV have
/// in it, or the one merge of a tile of its own. After a barrier behind the stores of all. Arrivals
/// of runs go side by side: each is a round trip to L2. One piece of code for both: it is a tenth
/// of a kernel.
/// @param tile  the first merge, where it is the only one
template <bool kSoftmax, int kArch, int kQuads, int kLoads>
FLASHBSR_DEVICE void merge_complete(const KernelArgs& args, const SplitTile& tile, int32_t count,
                                    const MergeCrew& crew) {
  const int32_t lane = crew.thread % 32, warps = crew.threads / 32;
  const int32_t mine = crew.together ? crew.thread : lane;
  const int32_t all = crew.together ? crew.threads : 32;
#pragma unroll 1
  for (int32_t base = crew.together ? 0 : crew.thread / 32; base < count; base += 32 * warps) {
    const int32_t run = base + lane * warps;
    uint32_t complete = 1;
    if (!crew.together) {
      complete = __ballot_sync(~0u, run < count && arrive(args, tile.index + run));
    }
#pragma unroll 1
    for (; complete; complete &= complete - 1) {
      const int32_t next = base + (__ffs(static_cast<int>(complete)) - 1) * warps;
      const SplitTile of_run = crew.together ? tile : split_tile(args, tile.index + next);
      merge_split_tile<kSoftmax, kArch, kQuads, kLoads>(args, of_run, mine, all);
    }
  }
}

}  // namespace flashbsr
