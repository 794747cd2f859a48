// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From views to a launch: how wide a unit may be, how a token is cut into items, how many blocks.
// Arithmetic only; the caller has checked shapes and types.
#pragma once

#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::ops {

/// The largest power of two, up to 16, that divides every address of a row and its length.
FLASHBSR_FN int32_t alignment_of(const void* data, int64_t stride_a, int64_t stride_b,
                                 int64_t stride_c, int64_t dim, DType t) {
  const int64_t bytes = (stride_a | stride_b | stride_c | dim) * dtype_size(t);
  const uint64_t bits = reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(bytes) | 16;
  return static_cast<int32_t>(bits & (~bits + 1));
}
FLASHBSR_FN int32_t alignment_of(const RaggedView& v) {
  return alignment_of(v.data, v.stride_token, v.stride_head, 0, v.dim, v.dtype);
}
FLASHBSR_FN int32_t alignment_of(const PagedView& v) {
  return alignment_of(v.data, v.stride_page, v.stride_token, v.stride_head, v.dim, v.dtype);
}

/// Whether rows can be read or written in units of kUnit elements. float32 has no such unit.
template <class View>
FLASHBSR_FN bool has_units(const View& v) {
  return v.dtype != DType::kF32 && alignment_of(v) >= kUnit * dtype_size(v.dtype);
}

/// Blocks for so many warps' worth of items.
FLASHBSR_FN uint32_t blocks_for(int64_t warps) {
  return static_cast<uint32_t>(ceil_div<int64_t>(warps, kWarps));
}
/// Blocks for a thread per element, up to what fills any device.
FLASHBSR_FN uint32_t blocks_for_threads(int64_t threads) {
  return static_cast<uint32_t>(
      min_of<int64_t>(max_of<int64_t>(ceil_div<int64_t>(threads, kThreads), 1), 4096));
}

FLASHBSR_FN bool copied(const AppendRows& r) {
  return r.in.dtype == r.cache.dtype && r.inverse_scale == 1.0f;
}

FLASHBSR_FN void prepare(AppendRows& r, bool copy) {
  const int32_t size = dtype_size(r.in.dtype);
  r.copy_bytes = copy ? min_of(alignment_of(r.in), alignment_of(r.cache)) : 0;
  if (copy) {
    // A row whose elements are not aligned to themselves does not exist.
    r.unit = max_of(r.copy_bytes / size, 1);
  } else {
    r.unit = has_units(r.in) && has_units(r.cache) ? kUnit : 1;
  }
  const int32_t row = r.in.dim / r.unit;
  r.units = r.in.heads * row;
  r.row_units = FastDiv(static_cast<uint32_t>(max_of(row, 1)));
  r.parts = FastDiv(static_cast<uint32_t>(max_of(ceil_div(r.units, 32 * kUnitsInFlight), 1)));
  const auto step_of = [&](int64_t head_stride, DType t) {
    const bool joined = r.in.stride_head == r.in.dim && r.cache.stride_head == r.cache.dim;
    return (joined ? 32 * r.unit : 32 / max_of(row, 1) * head_stride) * dtype_size(t);
  };
  r.linear = (r.in.stride_head == r.in.dim && r.cache.stride_head == r.cache.dim) ||
             (row > 0 && 32 % row == 0);
  r.in_step = step_of(r.in.stride_head, r.in.dtype);
  r.cache_step = step_of(r.cache.stride_head, r.cache.dtype);
}

/// Fills in what follows from the views. Returns whether `append_paged_kv` serves; otherwise it is
/// `append_paged_kv_convert`.
FLASHBSR_FN bool prepare(AppendArgs& a) {
  const bool copy = copied(a.k) && copied(a.v);
  prepare(a.k, copy);
  prepare(a.v, copy);
  return copy;
}
FLASHBSR_FN int64_t items_per_token(const AppendArgs& a) {
  return int64_t{a.k.parts.divisor} + a.v.parts.divisor;
}

/// Whether lanes take runs, and how: groups are some lanes, and all that is read or written at once
/// lies at a multiple of its size.
FLASHBSR_FN void prepare(QuantizeRows& r) {
  const int32_t lanes = r.in.dim / max_of(r.scales.dim, 1) / kRun;
  const int32_t bytes = is_packed(r.cache.dtype) ? kRun / 2 : kRun;
  const PagedView& c = r.cache;
  const bool whole = lanes * kRun * r.scales.dim == r.in.dim && lanes > 0 && lanes <= 32 &&
                     (lanes & (lanes - 1)) == 0;
  const bool taken =
      whole && dtype_size(r.in.dtype) == 2 && alignment_of(r.in) >= 16 &&
      alignment_of(c.data, c.stride_page, c.stride_token, c.stride_head, 0, c.dtype) >= bytes;
  r.aligned = alignment_of(r.in) >= 8;
  r.runs = taken ? r.in.heads * r.in.dim / kRun : 0;
  r.group_log2 = 0;
  while (r.group_log2 < 5 && (1 << r.group_log2) < lanes) ++r.group_log2;
  r.parts = FastDiv(static_cast<uint32_t>(max_of(ceil_div(r.runs, 32), 1)));
  r.head_runs = FastDiv(static_cast<uint32_t>(max_of(r.in.dim / kRun, 1)));
}

/// Fills in what follows from the views, for `tokens` tokens. Returns the most items of a token.
/// @param rotation  of k, or null
FLASHBSR_FN int64_t prepare(QuantizeArgs& a, const Rotation* rotation, int64_t tokens) {
  prepare(a.k);
  prepare(a.v);
  if (rotation && rotation->rotary_dim % (rotation->interleave ? kRun : 2 * kRun) != 0)
    a.k.runs = 0;
  a.heads = FastDiv(static_cast<uint32_t>(max_of<int64_t>(a.k.in.heads, 1)));
  a.span = 1;
  if (a.k.runs == 0 || a.v.runs == 0) return 2 * int64_t{a.k.in.heads};
  const int64_t items = int64_t{a.k.parts.divisor} + a.v.parts.divisor;
  // Tokens of one item share what it is begun with. Before that there are four rounds of 4096
  // warps, about what runs at once.
  a.span = static_cast<int32_t>(
      max_of<int64_t>(min_of<int64_t>(tokens * items / (4 * 4096), kMaxSpan), 1));
  return items;
}

/// Fills in what follows from the views, for launches of up to `tokens` tokens.
FLASHBSR_FN void prepare(RopeArgs& a, int64_t tokens) {
  const int32_t half = a.rotation.rotary_dim / 2;
  const auto fits = [](const auto& x) { return x.heads == 0 || has_units(x); };
  bool units = half % kUnit == 0 && fits(a.q.in) && fits(a.q.out) && fits(a.k.in);
  units = units && (a.append ? fits(a.v.in) && fits(a.k_cache) && fits(a.v_cache) : fits(a.k.out));
  a.unit = units ? kUnit : 1;
  // Four rounds of a warp keep the cosines and sines busy; with few tokens, more warps are better.
  const int32_t heads = units ? max_of(32 / max_of(half / kUnit, 1), 1) : 1;
  a.item_heads = tokens <= 256 ? heads : 4 * heads;
  const auto cut = [&](RopeRows& r) {
    r.parts = ceil_div(r.in.heads, a.item_heads);
    r.row_units = FastDiv(static_cast<uint32_t>(max_of(r.in.dim / a.unit, 1)));
    r.tail_units =
        FastDiv(static_cast<uint32_t>(max_of((r.in.dim - a.rotation.rotary_dim) / a.unit, 1)));
  };
  cut(a.q);
  cut(a.k);
  if (a.append) cut(a.v);
  a.parts = FastDiv(static_cast<uint32_t>(max_of(a.q.parts + a.k.parts + a.v.parts, 1)));
}

/// Rows of whole units whose number is a power of two are a lane's, or two a lane's.
FLASHBSR_FN void prepare(HadamardArgs& a) {
  const int32_t units = a.in.dim / kUnit;
  const bool kept = a.order == 1 && units > 0 && has_units(a.in) && has_units(a.out);
  a.lanes_log2 = kept ? 0 : -1;
  while (kept && a.lanes_log2 < 5 && 2 << a.lanes_log2 <= units) ++a.lanes_log2;
  a.heads = FastDiv(static_cast<uint32_t>(max_of(a.in.heads, 1)));
}
FLASHBSR_FN int64_t rows_of_warp(const HadamardArgs& a) {
  return a.lanes_log2 < 0 ? 1 : 32 >> a.lanes_log2;
}

/// `stacked`: the states are `count` of a.a; else a.a and a.b.
FLASHBSR_FN void prepare(MergeArgs& a, bool stacked) {
  int32_t alignment = min_of(alignment_of(a.a.v), alignment_of(a.out.v));
  alignment =
      min_of(alignment, stacked ? alignment_of(a.a.v.data, a.v_stride_state, 0, 0, 0, a.a.v.dtype)
                                : alignment_of(a.b.v));
  a.aligned = alignment == 16;
  const int32_t units = a.aligned ? a.out.v.dim * dtype_size(a.out.v.dtype) / 16 : a.out.v.dim;
  a.group_log2 = 0;
  while (a.group_log2 < 5 && (kMergeUnits << a.group_log2) < units) ++a.group_log2;
  a.per_unit = 1.0f / a.unit;
  a.v_step = a.v_stride_state * dtype_size(a.out.v.dtype);
  a.heads = FastDiv(static_cast<uint32_t>(max_of(a.out.v.heads, 1)));
}
/// Bytes of an inbox's part for one rank and one half: rows of `row_bytes` and their LSEs.
struct InboxShape {
  int64_t lse_offset = 0;
  int64_t source_bytes = 0;

  FLASHBSR_FN InboxShape(int64_t rows, int64_t row_bytes)
      : lse_offset(round_up<int64_t>(rows * row_bytes, 128)),
        source_bytes(lse_offset + round_up<int64_t>(rows * 4, 128)) {}
};

/// Fills in what follows from the views. While few blocks are busy a lane has one unit, so that
/// more of them send. Many lanes would read all that the L2 cache gives while they wait, beside
/// what is coming.
FLASHBSR_FN void prepare(PeerMergeArgs& a) {
  constexpr int64_t kLanes = int64_t{256} * kThreads;
  MergeArgs& m = a.merge;
  const int32_t units = m.out.v.dim * dtype_size(a.travel) / 16;
  const bool few = int64_t{m.rows} * units <= kLanes;
  m.group_log2 = 0;
  while (m.group_log2 < 5 && ((few ? 1 : kMergeUnits) << m.group_log2) < units) ++m.group_log2;
  m.per_unit = 1.0f / m.unit;
  m.heads = FastDiv(static_cast<uint32_t>(max_of(m.out.v.heads, 1)));
  a.pause_ns = few ? 0 : 200;
}
FLASHBSR_FN uint32_t blocks_for(const MergeArgs& a) {
  return blocks_for(ceil_div<int64_t>(a.rows, 32 >> a.group_log2));
}

}  // namespace flashbsr::ops
