// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges of attention states, and bit packing.
#include <vector>

#include <flashbsr/cpu/bits.h>
#include <flashbsr/cpu/cache_ops.h>
#include <flashbsr/kernel/ops/prepare.h>

#include "ops.h"
#include "ops_common.h"

namespace flashbsr::api {

using flashbsr::detail::at;
using flashbsr::detail::bad_index;

namespace {

/// On a device elements may be apart.
const uint8_t* bytes_in(const Array& a) {
  check_element(a, {Element::kBool, Element::kU8});
  check_rank(a, 1, "(booleans)");
  if (!a.place.cuda) check_contiguous(a);
  return static_cast<const uint8_t*>(a.data);
}

uint8_t* bytes_out(const Array& a, int64_t size) {
  check_element(a, {Element::kU8});
  check_shape(a, {size});
  check_contiguous(a);
  return static_cast<uint8_t*>(a.data);
}

}  // namespace

void packbits(const Array& x, const Array& out, bool little, void* stream) {
  const Place place = common_place({&x, &out});
  const uint8_t* in = bytes_in(x);
  uint8_t* to = bytes_out(out, ceil_div<int64_t>(x.size(), 8));
  if (place.cuda) {
    return cuda::packbits(
        {.x = in, .size = x.size(), .stride = x.stride[0], .out = to, .little = little}, nullptr,
        {place.device, stream});
  }
  cpu::pack_bits(in, x.size(), to, little);
}

void segment_packbits(const Array& x, const Array& indptr, const Array& out,
                      const Array& out_indptr, bool little, const Array* device_indptr,
                      void* stream) {
  const Place place = common_place({&x, &out, &out_indptr, device_indptr});
  const uint8_t* in = bytes_in(x);
  const IndexView segments = indices(indptr);
  const int64_t count = flashbsr::detail::check_indptr("indptr", segments);
  if (segments[count] != x.size()) {
    bad_index(at("indptr", count), segments[count], "the length of x, " + std::to_string(x.size()));
  }
  int32_t* starts = int32_out(out_indptr, count + 1);
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) bytes += ceil_div<int64_t>(segments[i + 1] - segments[i], 8);
  uint8_t* to = bytes_out(out, bytes);
  if (place.cuda) {
    const Indices there = device_indices(indices(*device_indptr));
    return cuda::packbits({.x = in,
                           .size = x.size(),
                           .stride = x.stride[0],
                           .out = to,
                           .little = little,
                           .indptr = there,
                           .out_indptr = starts},
                          starts, {place.device, stream});
  }
  starts[0] = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bits = segments[i + 1] - segments[i];
    cpu::pack_bits(in + segments[i], bits, to + starts[i], little);
    starts[i + 1] = starts[i] + static_cast<int32_t>(ceil_div<int64_t>(bits, 8));
  }
}

namespace {

const float* lse_rows(const Array& s) {
  check_element(s, {Element::kF32});
  check_rows(s);
  return static_cast<const float*>(s.data);
}

void check_merge_dim(const RaggedView& v, const Array& a) {
  if (v.dim > cpu::kMaxMergeDim) {
    bad_shape(a, "a head dim of at most " + std::to_string(cpu::kMaxMergeDim));
  }
}

ops::StateView device_state(const RaggedView& v, const Array& s) {
  return {v, static_cast<const float*>(s.data), s.stride[0], s.stride[s.ndim - 1]};
}

}  // namespace

void merge_state(const State& a, const State& b, const State& out, const Array* mask, bool base2,
                 void* stream) {
  const Place place = common_place({&a.v, &a.s, &b.v, &b.s, &out.v, &out.s, mask});
  const RaggedView va = ragged_view(a.v), vb = ragged_view(b.v), vo = ragged_view(out.v);
  check_shape(b.v, {va.tokens, va.heads, va.dim});
  check_shape(out.v, {va.tokens, va.heads, va.dim});
  check_no_overlap(out.v);
  check_no_overlap(out.s);
  check_element(b.v, {a.v.element});
  check_element(out.v, {a.v.element});
  check_merge_dim(va, a.v);
  for (const State* state : {&a, &b, &out}) check_shape(state->s, {va.tokens, va.heads});
  const float *sa = lse_rows(a.s), *sb = lse_rows(b.s);
  float* so = const_cast<float*>(lse_rows(out.s));
  const uint8_t* keep = nullptr;
  if (mask) {
    keep = bytes_in(*mask);
    check_shape(*mask, {va.tokens});
    check_contiguous(*mask);
  }
  const float unit = base2 ? 1.0f : kLn2;
  if (place.cuda) {
    ops::MergeArgs args;
    args.a = device_state(va, a.s);
    args.b = device_state(vb, b.s);
    args.out = device_state(vo, out.s);
    args.s_out = so;
    args.mask = keep;
    args.unit = unit;
    return cuda::merge(args, false, va.tokens, {place.device, stream});
  }
  for (int64_t t = 0; t < va.tokens; ++t) {
    if (keep && !keep[t]) continue;
    for (int32_t h = 0; h < va.heads; ++h) {
      const char* rows[2] = {va.row(t, h), vb.row(t, h)};
      const float lses[2] = {sa[t * a.s.stride[0] + h], sb[t * b.s.stride[0] + h]};
      so[t * out.s.stride[0] + h] =
          cpu::merge_row(rows, lses, 2, vo.row(t, h), va.dtype, va.dim, unit);
    }
  }
}

void merge_states(const State& in, const State& out, bool base2, void* stream) {
  const Place place = common_place({&in.v, &in.s, &out.v, &out.s});
  float_dtype(in.v);
  check_rank(in.v, 4, "[n, states, heads, dim]");
  check_rows(in.v);
  const int64_t n = in.v.shape[0], states = in.v.shape[1], heads = in.v.shape[2];
  check_shape(in.s, {n, states, heads});
  const float* s = lse_rows(in.s);
  const RaggedView vo = ragged_view(out.v);
  check_shape(out.v, {n, heads, in.v.shape[3]});
  check_element(out.v, {in.v.element});
  check_merge_dim(vo, out.v);
  check_shape(out.s, {n, heads});
  float* so = const_cast<float*>(lse_rows(out.s));
  const float unit = base2 ? 1.0f : kLn2;
  if (place.cuda) {
    RaggedView first = vo;
    first.data = in.v.data;
    first.stride_token = in.v.stride[0];
    first.stride_head = in.v.stride[2];
    ops::MergeArgs args;
    args.a = device_state(first, in.s);
    args.count = static_cast<int32_t>(states);
    args.v_stride_state = in.v.stride[1];
    args.s_stride_state = in.s.stride[1];
    args.out = device_state(vo, out.s);
    args.s_out = so;
    args.unit = unit;
    return cuda::merge(args, true, n, {place.device, stream});
  }
  std::vector<const char*> rows(static_cast<size_t>(states));
  std::vector<float> lses(static_cast<size_t>(states));
  const int64_t size = dtype_size(vo.dtype);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < states; ++i) {
        const size_t at_state = static_cast<size_t>(i);
        const int64_t row = t * in.v.stride[0] + i * in.v.stride[1] + h * in.v.stride[2];
        rows[at_state] = static_cast<const char*>(in.v.data) + row * size;
        lses[at_state] = s[t * in.s.stride[0] + i * in.s.stride[1] + h];
      }
      so[t * out.s.stride[0] + h] = cpu::merge_row(
          rows.data(), lses.data(), static_cast<int>(states), vo.row(t, h), vo.dtype, vo.dim, unit);
    }
  }
}

int64_t inbox_bytes(int64_t ranks, int64_t rows, int64_t row_bytes) {
  return 2 * ranks * ops::InboxShape(rows, row_bytes).source_bytes;
}

void merge_peers(const State& in, const State& out, const Peers& peers, DType travel, bool base2,
                 void* stream) {
  const Place place = common_place({&in.v, &in.s, &out.v, &out.s});
  if (!place.cuda) {
    throw Error(ErrorCode::kUnsupported, in.v.name, "an array in host memory",
                "one on a GPU; merge_over_ranks(method=\"reduce_scatter\") merges these");
  }
  const RaggedView vi = ragged_view(in.v), vo = ragged_view(out.v);
  const int32_t ranks = static_cast<int32_t>(peers.inboxes.size());
  const int32_t heads = vo.heads == vi.heads ? vi.heads : vi.heads / ranks;
  check_shape(out.v, {vi.tokens, heads, vi.dim});
  check_element(out.v, {in.v.element});
  check_shape(in.s, {vi.tokens, vi.heads});
  check_shape(out.s, {vi.tokens, heads});
  if (ranks > ops::kMaxPeers || vi.heads % ranks) {
    throw Error(ErrorCode::kUnsupported, "ranks", std::to_string(ranks),
                "at most " + std::to_string(ops::kMaxPeers) + ", which divide the " +
                    std::to_string(vi.heads) + " heads");
  }
  for (const RaggedView* v : {&vi, &vo}) {
    if (ops::alignment_of(*v) != 16) {
      bad_shape(v == &vi ? in.v : out.v, "rows of whole 16 bytes that begin at such");
    }
  }
  const int64_t rows = vi.tokens * heads, row_bytes = int64_t{vi.dim} * dtype_size(travel);
  if (rows > peers.rows || row_bytes > peers.row_bytes || rows > ops::kMaxItems) {
    throw Error(ErrorCode::kCapacity, in.v.name,
                std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes",
                "at most " + std::to_string(peers.rows) + " of " + std::to_string(peers.row_bytes) +
                    ", for which there are inboxes");
  }
  const ops::InboxShape shape(peers.rows, peers.row_bytes);
  ops::PeerMergeArgs args;
  lse_rows(in.s);
  args.merge.a = device_state(vi, in.s);
  args.merge.out = device_state(vo, out.s);
  args.merge.s_out = const_cast<float*>(lse_rows(out.s));
  args.merge.count = ranks;
  args.merge.rows = static_cast<int32_t>(rows);
  args.merge.unit = base2 ? 1.0f : kLn2;
  for (int32_t i = 0; i < ranks; ++i) {
    args.inbox[i] = reinterpret_cast<char*>(peers.inboxes[static_cast<size_t>(i)]);
  }
  args.source_bytes = shape.source_bytes;
  args.lse_offset = shape.lse_offset;
  args.control = reinterpret_cast<ops::PeerControl*>(peers.control);
  args.missed = reinterpret_cast<uint32_t*>(peers.missed);
  args.timeout_ns = static_cast<uint64_t>(peers.timeout_ms) * 1000000;
  args.rank = peers.rank;
  args.head_step = heads == vi.heads ? 0 : heads;
  args.travel = travel;
  cuda::merge_peers(args, {place.device, stream});
}

}  // namespace flashbsr::api
