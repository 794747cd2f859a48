// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The merge of partial results of several GPUs, in one launch on each: rows are written into the
// inboxes of the others, over NVLink, and merged with what comes into one's own.
//
// A word says by itself that it is there: inboxes hold kNothing, which nobody sends, until it comes
// and again after it was read. So there are no flags, no fences, and no order to keep: a row takes
// one way through the link. Two halves of the inbox serve by turns, which is enough: a peer writes
// into this half again in its second merge from now, when it has finished the next one, for which
// it needs what this rank sends there, after this launch has put kNothing back everywhere.
//
// Every thread first sends all of its rows and then waits, so whatever blocks run at once, all
// ranks come to an end if the blocks of each are resident together: the host sees to it. Results
// are those of merge_states over the ranks, bit for bit, and equal on all of them.
#pragma once

#include <flashbsr/kernel/ops/merge.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/ptx/system.h>

namespace flashbsr::ops {

FLASHBSR_DEVICE uint32_t sent_word(uint32_t x) { return x == kNothing ? kSentNan : x; }

/// 16 bytes of what travels; stored in the type of the result.
template <DType kTravel, DType kOut>
struct PeerUnit : MergeUnit<kTravel, true> {
  static constexpr int kElements = MergeUnit<kTravel, true>::kElements;
  static constexpr int kOutBytes = kElements * dtype_size(kOut);

  /// Of a row of this rank.
  template <int kArch>
  FLASHBSR_DEVICE static PeerUnit own(const char* p) {
    uint4 x = *reinterpret_cast<const uint4*>(p);
    if constexpr (kTravel != kOut) {
      const uint4 y = *reinterpret_cast<const uint4*>(p + 16);
      x = make_uint4(pack<kArch, kTravel>(bits_float(x.x), bits_float(x.y)),
                     pack<kArch, kTravel>(bits_float(x.z), bits_float(x.w)),
                     pack<kArch, kTravel>(bits_float(y.x), bits_float(y.y)),
                     pack<kArch, kTravel>(bits_float(y.z), bits_float(y.w)));
    }
    return {{make_uint4(sent_word(x.x), sent_word(x.y), sent_word(x.z), sent_word(x.w))}};
  }

  FLASHBSR_DEVICE bool missing() const {
    const uint4& x = this->bits;
    return x.x == kNothing || x.y == kNothing || x.z == kNothing || x.w == kNothing;
  }

  template <int kArch>
  FLASHBSR_DEVICE static void store(char* p, const float (&x)[kElements]) {
    if constexpr (kTravel == kOut) {
      MergeUnit<kTravel, true>::template store<kArch>(p, x);
    } else {
      float4* out = reinterpret_cast<float4*>(p);
      out[0] = make_float4(x[0], x[1], x[2], x[3]);
      out[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
};

/// A merge as one lane sees it.
template <int kArch, DType kTravel, DType kOut>
class PeerMerge {
 public:
  using MUnit = PeerUnit<kTravel, kOut>;

  FLASHBSR_DEVICE explicit PeerMerge(const PeerMergeArgs& args)
      : args_(args),
        control_(ptx::load_system(reinterpret_cast<const uint4*>(args.control))),
        units_{lane() & ((1 << args.merge.group_log2) - 1), 1 << args.merge.group_log2,
               args.merge.out.v.dim / MUnit::kElements} {}

  /// Blocks of all launches of a rank come here, and the last one turns to the other half.
  FLASHBSR_DEVICE void run() {
    for_rows([&](int32_t row, int64_t token, int32_t head) { send(row, token, head); });
    __syncthreads();  // all have read which half it is
    if (threadIdx.x == 0 && ptx::atomic_add_relaxed(&args_.control->arrived, 1) + 1 == gridDim.x) {
      args_.control->arrived = 0;
      args_.control->merges = control_.x + 1;
    }
    for_rows([&](int32_t row, int64_t token, int32_t head) { merge(row, token, head); });
  }

  // What merge_units asks of the states of a row.

  FLASHBSR_DEVICE float lse(int32_t i) const {
    return bits_float(i == args_.rank ? own_lse_ : ptx::load_system(lse_of(received(i), row_)));
  }

  template <class Unit>
  FLASHBSR_DEVICE Unit unit(int32_t i, int64_t index) const {
    if (i == args_.rank) return Unit::template own<kArch>(own_ + index * Unit::kOutBytes);
    return {{ptx::load_system(unit_of(received(i), row_, index))}};
  }

  /// Whether some of the states have not come and may still do. After the time-out those are NaN.
  template <int kChunk>
  FLASHBSR_DEVICE bool missing(int32_t first, int32_t count, const LaneUnits& units,
                               float (&lse)[kChunk], const MUnit (&in)[kChunk][kMergeUnits]) {
    uint32_t states = 0;
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      if (first + s >= count || first + s == args_.rank) continue;
      bool is_missing = broken() || float_bits(lse[s]) == kNothing;
#pragma unroll
      for (int i = 0; i < kMergeUnits; ++i) {
        is_missing = is_missing || (units.live(i) && in[s][i].missing());
      }
      states |= uint32_t{is_missing} << s;
    }
    if (states == 0) return false;
    if (!broken()) {
      const uint64_t now = ptx::global_time();
      if (deadline_ == 0) deadline_ = now + args_.timeout_ns;
      if (now < deadline_) {
        if (args_.pause_ns) ptx::rest(args_.pause_ns);
        return true;
      }
      args_.control->broken = 1;
      ptx::store_system(args_.missed, static_cast<uint32_t>(first + __ffs(states)));
    }
#pragma unroll
    for (int s = 0; s < kChunk; ++s) {
      if (states >> s & 1) lse[s] = bits_float(kSentNan);
    }
    return false;
  }

 private:
  FLASHBSR_DEVICE static int32_t lane() { return static_cast<int32_t>(threadIdx.x) % 32; }
  FLASHBSR_DEVICE bool broken() const { return control_.y != 0; }

  FLASHBSR_DEVICE char* inbox(int32_t of, int32_t source) const {
    const int32_t half = static_cast<int32_t>(control_.x & 1);
    return args_.inbox[of] + (half * args_.merge.count + source) * args_.source_bytes;
  }
  FLASHBSR_DEVICE char* sent(int32_t to) const { return inbox(to, args_.rank); }
  FLASHBSR_DEVICE char* received(int32_t source) const { return inbox(args_.rank, source); }
  FLASHBSR_DEVICE uint4* unit_of(char* source, int32_t row, int64_t index) const {
    return reinterpret_cast<uint4*>(source) + int64_t{row} * units_.count + index;
  }
  FLASHBSR_DEVICE uint32_t* lse_of(char* source, int32_t row) const {
    return reinterpret_cast<uint32_t*>(source + args_.lse_offset) + row;
  }

  /// Calls `work` with this lane's rows, group by group; in step within a warp.
  template <class Work>
  FLASHBSR_DEVICE void for_rows(const Work& work) const {
    const int32_t rows_of_warp = 32 >> args_.merge.group_log2;
    const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps * rows_of_warp;
    const int32_t warp = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
    for (int32_t base = warp * rows_of_warp; base < args_.merge.rows; base += stride) {
      const int32_t row = base + (lane() >> args_.merge.group_log2);
      const int32_t token = args_.merge.heads.quotient(row);
      work(row, token, args_.merge.heads.remainder(row, token));
    }
  }

  FLASHBSR_DEVICE const char* own_row(int64_t token, int32_t head) const {
    return args_.merge.a.v.row(token, head);
  }
  FLASHBSR_DEVICE uint32_t own_lse(int64_t token, int32_t head) const {
    const StateView& a = args_.merge.a;
    return sent_word(float_bits(a.s[token * a.s_stride_token + head * a.s_stride_head]));
  }

  /// Everybody begins with the rank after its own, so that no link has all of the traffic. Who is
  /// broken sends to itself, where nobody looks: loads need not wait for a branch.
  FLASHBSR_DEVICE void send(int32_t row, int64_t token, int32_t head) const {
    if (row >= args_.merge.rows) return;
    const int32_t ranks = args_.merge.count;
    for (int32_t step = 1; step < ranks; ++step) {
      const int32_t other = args_.rank + step - (args_.rank + step < ranks ? 0 : ranks);
      const int32_t of = head + other * args_.head_step;
      const char* from = own_row(token, of);
      const uint32_t lse = own_lse(token, of);
      LaneUnits units = units_;
      for (; units.first < units.count; units.first += units.group * kMergeUnits) {
        MUnit own[kMergeUnits];
#pragma unroll
        for (int i = 0; i < kMergeUnits; ++i) {  // without a branch: all are under way at once
          const int64_t at = min_of<int64_t>(units.index(i), units.count - 1);
          own[i] = MUnit::template own<kArch>(from + at * MUnit::kOutBytes);
        }
        char* const there = sent(broken() ? args_.rank : other);
#pragma unroll
        for (int i = 0; i < kMergeUnits; ++i) {
          if (units.live(i)) ptx::store_system(unit_of(there, row, units.index(i)), own[i].bits);
        }
        if (units.first == 0) ptx::store_system(lse_of(there, row), lse);
      }
    }
  }

  FLASHBSR_DEVICE void merge(int32_t row, int64_t token, int32_t head) {
    const bool live = row < args_.merge.rows;
    const StateView& out = args_.merge.out;
    float lse = 0.0f;
    if (live) {
      row_ = row;
      const int32_t of = head + args_.rank * args_.head_step;
      own_ = own_row(token, of);
      own_lse_ = own_lse(token, of);
      lse = merge_row<kArch, MUnit, kMergeChunk>(*this, args_.merge.count, units_,
                                                 out.v.row(token, head), args_.merge);
      clear_units(row);
    }
    __syncwarp();  // all lanes of the group have read the LSEs
    if (live && units_.first == 0) {
      args_.merge.s_out[token * out.s_stride_token + head * out.s_stride_head] = lse;
      for (int32_t i = 0; i < args_.merge.count; ++i) {
        if (i != args_.rank) *lse_of(received(i), row) = kNothing;
      }
    }
  }

  FLASHBSR_DEVICE void clear_units(int32_t row) const {
    const uint4 nothing = make_uint4(kNothing, kNothing, kNothing, kNothing);
    for (int32_t i = 0; i < args_.merge.count; ++i) {
      if (i == args_.rank) continue;
      for (int64_t at = units_.first; at < units_.count; at += units_.group) {
        *unit_of(received(i), row, at) = nothing;
      }
    }
  }

  const PeerMergeArgs& args_;
  const uint4 control_;  ///< a PeerControl
  const LaneUnits units_;
  uint64_t deadline_ = 0;
  // The row that is merged.
  int32_t row_ = 0;
  uint32_t own_lse_ = 0;
  const char* own_ = nullptr;
};

/// A kernel for each pair of types: attention streams through L2 between two merges, and only the
/// first 64 KB of a kernel are there when it begins. Of one with all types, 110 KB, bfloat16 was
/// behind: merges took 3 us longer than in float32, for half of the bytes.
template <int kArch, DType kTravel, DType kOut>
FLASHBSR_DEVICE void merge_peers(const PeerMergeArgs& a) {
  ptx::wait_for_prerequisites<kArch>();
  // Not before: the next kernel reads its plan early, which one before this may have written.
  ptx::launch_dependents<kArch>();
  PeerMerge<kArch, kTravel, kOut>(a).run();
}

}  // namespace flashbsr::ops
