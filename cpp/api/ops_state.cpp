// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges of attention states, and bit packing.
#include <vector>

#include <flashbsr/cpu/bits.h>
#include <flashbsr/cpu/cache_ops.h>

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

}  // namespace flashbsr::api
