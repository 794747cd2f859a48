// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

#include <algorithm>
#include <vector>

#include <flashbsr/cpu/bits.h>
#include <flashbsr/cpu/cache_ops.h>

#include "cache.h"

namespace flashbsr::api {

using flashbsr::detail::at;
using flashbsr::detail::bad_index;

namespace {

int32_t* int32_out(const Array& a, int64_t size) {
  check_element(a, {Element::kI32});
  check_shape(a, {size});
  check_contiguous(a);
  return static_cast<int32_t*>(a.data);
}

const uint8_t* bytes_in(const Array& a) {
  check_element(a, {Element::kBool, Element::kU8});
  check_rank(a, 1, "(booleans)");
  check_contiguous(a);
  return static_cast<const uint8_t*>(a.data);
}

uint8_t* bytes_out(const Array& a, int64_t size) {
  check_element(a, {Element::kU8});
  check_shape(a, {size});
  check_contiguous(a);
  return static_cast<uint8_t*>(a.data);
}

/// The page size of a cache whose shape is not fixed by a plan.
int32_t page_size_of(const Array& k, bool stacked, bool hnd) {
  const int full = stacked ? 5 : 4;
  if (k.ndim == full - 1) return 1;
  check_rank(k, full, stacked ? "[pages, 2, ...]" : "[pages, ...]");
  return static_cast<int32_t>(k.shape[full - (hnd ? 2 : 3)]);
}

}  // namespace

void append_paged_kv_cache(const AppendArrays& a, bool hnd, float k_scale, float v_scale) {
  const RaggedView key = ragged_view(a.key, true), value = ragged_view(a.value, true);
  const int32_t page_size = page_size_of(a.k_cache, !a.v_cache, hnd);
  const CacheShape shape{.paged = true, .page_size = max_of(page_size, 1), .hnd = hnd};
  const CacheViews cache = cache_views(a.k_cache, a.v_cache ? &*a.v_cache : nullptr, shape);
  const Array& v_array = a.v_cache ? *a.v_cache : a.k_cache;
  check_shape(a.key, {-1, cache.k.heads, cache.k.dim});
  check_shape(a.value, {key.tokens, cache.v.heads, cache.v.dim});
  for (const auto& [scale, name] : {std::pair{k_scale, "k_scale"}, std::pair{v_scale, "v_scale"}}) {
    if (!(scale > 0) || scale == infinity()) {
      throw Error(ErrorCode::kValue, name, std::to_string(scale), "a positive number");
    }
  }
  check_no_overlap(a.k_cache);
  if (a.v_cache) check_no_overlap(*a.v_cache);
  if (cache.k.pages != cache.v.pages) bad_shape(v_array, "as many pages as k");

  const IndexView batch = indices(a.batch_indices), positions = indices(a.positions),
                  pages = indices(a.kv_indices), indptr = indices(a.kv_indptr),
                  last = indices(a.kv_last_page_len);
  const int64_t requests = flashbsr::detail::check_indptr("kv_indptr", indptr);
  check_shape(a.batch_indices, {key.tokens});
  check_shape(a.positions, {key.tokens});
  check_shape(a.kv_last_page_len, {requests});
  if (pages.size < indptr[requests]) {
    bad_shape(a.kv_indices,
              "at least kv_indptr[-1] = " + std::to_string(indptr[requests]) + " ids");
  }
  for (int64_t r = 0; r < requests; ++r) {
    if (indptr[r + 1] > indptr[r] && (last[r] < 1 || last[r] > page_size)) {
      bad_index(at("kv_last_page_len", r), last[r],
                "a value in [1, page_size = " + std::to_string(page_size) + "]");
    }
  }

  // First pass: every destination is checked before any is written.
  for (int64_t t = 0; t < key.tokens; ++t) {
    const int64_t b = batch[t];
    if (b == -1) continue;
    if (b < 0 || b >= requests) {
      bad_index(at("batch_indices", t), b,
                "-1 (padding), or a request below " + std::to_string(requests));
    }
    const int64_t held = indptr[b + 1] - indptr[b];
    const int64_t length = held ? (held - 1) * page_size + last[b] : 0;
    if (positions[t] < 0 || positions[t] >= length) {
      bad_index(at("positions", t), positions[t],
                "a position in [0, " + std::to_string(length) + "), the length of request " +
                    std::to_string(b));
    }
    const int64_t page = pages[indptr[b] + positions[t] / page_size];
    if (page < 0 || page >= cache.k.pages) {
      bad_index(at("kv_indices", indptr[b] + positions[t] / page_size), page,
                "a page of the cache, in [0, " + std::to_string(cache.k.pages) + ")");
    }
  }
  for (int64_t t = 0; t < key.tokens; ++t) {
    if (batch[t] < 0) continue;
    const cpu::Slot slot = cpu::find_slot(pages, indptr, page_size, batch[t], positions[t]);
    cpu::store_token(key, t, cache.k, slot.page, slot.offset, 1.0f / k_scale);
    cpu::store_token(value, t, cache.v, slot.page, slot.offset, 1.0f / v_scale);
  }
}

namespace {

struct RopeViews {
  RaggedView q, k, q_out, k_out;
};

/// `source` names the argument that `rotary_dim` comes from.
RopeViews rope_views(const RopeArrays& a, const IndexView& positions, int32_t rotary_dim,
                     const char* source) {
  RopeViews v{ragged_view(a.q), ragged_view(a.k), ragged_view(a.q_out), ragged_view(a.k_out)};
  check_shape(a.k, {v.q.tokens, -1, -1});
  check_shape(a.q_out, {v.q.tokens, v.q.heads, v.q.dim});
  check_shape(a.k_out, {v.k.tokens, v.k.heads, v.k.dim});
  check_no_overlap(a.q_out);
  check_no_overlap(a.k_out);
  check_element(a.q_out, {a.q.element});
  check_element(a.k_out, {a.k.element});
  flashbsr::detail::check_length("positions", positions.size, v.q.tokens, "one per token");
  const int32_t widest = min_of(v.q.dim, v.k.dim);
  if (rotary_dim < 2 || rotary_dim % 2 || rotary_dim > widest) {
    throw Error(ErrorCode::kValue, source, std::to_string(rotary_dim) + " rotary dims",
                "an even number in [2, head_dim = " + std::to_string(widest) + "]");
  }
  return v;
}

void rotate(const RopeViews& v, int64_t token, int32_t rotary_dim, bool interleave,
            const float* cosines, const float* sines) {
  cpu::rotate_token(v.q, v.q_out, token, rotary_dim, interleave, cosines, sines);
  cpu::rotate_token(v.k, v.k_out, token, rotary_dim, interleave, cosines, sines);
}

}  // namespace

void apply_rope(const RopeArrays& a, const Array& positions, int32_t rotary_dim, bool interleave,
                const RopeFrequencies& frequencies) {
  const IndexView at_position = indices(positions);
  const RopeViews v = rope_views(a, at_position, rotary_dim, "rotary_dim");
  cpu::TokenRotation rotation(frequencies, rotary_dim);
  for (int64_t t = 0; t < v.q.tokens; ++t) {
    rotation.move_to(at_position[t]);
    rotate(v, t, rotary_dim, interleave, rotation.cosines(), rotation.sines());
  }
}

void apply_rope_cos_sin(const RopeArrays& a, const Array& positions, const Array& cos_sin,
                        bool interleave) {
  check_element(cos_sin, {Element::kF32});
  check_rank(cos_sin, 2, "[max_position, rotary_dim]");
  check_rows(cos_sin);
  const int32_t rotary_dim = static_cast<int32_t>(cos_sin.shape[1]);
  const IndexView at_position = indices(positions);
  const RopeViews v = rope_views(a, at_position, rotary_dim, "cos_sin_cache");
  for (int64_t t = 0; t < v.q.tokens; ++t) {
    if (at_position[t] < 0 || at_position[t] >= cos_sin.shape[0]) {
      bad_index(at("positions", t), at_position[t],
                "a row of cos_sin_cache, in [0, " + std::to_string(cos_sin.shape[0]) + ")");
    }
  }
  for (int64_t t = 0; t < v.q.tokens; ++t) {
    const float* row = static_cast<const float*>(cos_sin.data) + at_position[t] * cos_sin.stride[0];
    rotate(v, t, rotary_dim, interleave, row, row + rotary_dim / 2);
  }
}

void get_batch_indices_positions(const Array& append_indptr, const Array& seq_lens,
                                 const Array& batch_indices, const Array& positions) {
  const IndexView indptr = indices(append_indptr), lens = indices(seq_lens);
  const int64_t requests = flashbsr::detail::check_indptr("append_indptr", indptr);
  flashbsr::detail::check_length("seq_lens", lens.size, requests, "one per request");
  const int64_t nnz = batch_indices.size();
  int32_t* batch = int32_out(batch_indices, nnz);
  int32_t* position = int32_out(positions, nnz);
  if (nnz < indptr[requests]) {
    bad_index("nnz", nnz, "at least append_indptr[-1] = " + std::to_string(indptr[requests]));
  }
  for (int64_t b = 0; b < requests; ++b) {
    if (lens[b] < indptr[b + 1] - indptr[b]) {
      bad_index(at("seq_lens", b), lens[b],
                "at least the " + std::to_string(indptr[b + 1] - indptr[b]) + " tokens appended");
    }
    flashbsr::detail::narrow("seq_lens", b, lens[b]);
  }
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = lens[b] - (indptr[b + 1] - indptr[b]);
    for (int64_t t = indptr[b]; t < indptr[b + 1]; ++t) {
      batch[t] = static_cast<int32_t>(b);
      position[t] = static_cast<int32_t>(first + t - indptr[b]);
    }
  }
  std::fill(batch + indptr[requests], batch + nnz, -1);
  std::fill(position + indptr[requests], position + nnz, 0);
}

void get_seq_lens(const Array& kv_indptr, const Array& last_page_len, int32_t page_size,
                  const Array& out) {
  const IndexView indptr = indices(kv_indptr), last = indices(last_page_len);
  const int64_t requests = flashbsr::detail::check_indptr("kv_indptr", indptr);
  flashbsr::detail::check_length("kv_last_page_len", last.size, requests, "one per request");
  if (page_size < 1) {
    throw Error(ErrorCode::kValue, "page_size", std::to_string(page_size), "at least 1");
  }
  int32_t* lens = int32_out(out, requests);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t pages = indptr[b + 1] - indptr[b];
    if (pages && (last[b] < 1 || last[b] > page_size)) {
      bad_index(at("kv_last_page_len", b), last[b],
                "a value in [1, page_size = " + std::to_string(page_size) + "]");
    }
    const int64_t len = pages ? (pages - 1) * page_size + last[b] : 0;
    lens[b] = flashbsr::detail::narrow("kv length of request", b, len);
  }
}

void packbits(const Array& x, const Array& out, bool little) {
  const uint8_t* in = bytes_in(x);
  cpu::pack_bits(in, x.size(), bytes_out(out, ceil_div<int64_t>(x.size(), 8)), little);
}

void segment_packbits(const Array& x, const Array& indptr, const Array& out,
                      const Array& out_indptr, bool little) {
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

}  // namespace

void merge_state(const State& a, const State& b, const State& out, const Array* mask, bool base2) {
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
  }
  const float unit = base2 ? 1.0f : kLn2;
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

void merge_states(const State& in, const State& out, bool base2) {
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
      so[t * out.s.stride[0] + h] =
          cpu::merge_row(rows.data(), lses.data(), static_cast<int>(states), vo.row(t, h), vo.dtype,
                         vo.dim, base2 ? 1.0f : kLn2);
    }
  }
}

}  // namespace flashbsr::api
