// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Checked entry points of the functions around attention. Every value is checked before anything is
// written, so that a call that raises leaves the caller's arrays as they were.
#pragma once

#include <optional>

#include <flashbsr/variant/rope.h>

#include "array.h"

namespace flashbsr::api {

struct AppendArrays {
  Array key;            ///< [nnz, H_kv, D_qk]
  Array value;          ///< [nnz, H_kv, D_vo]
  Array batch_indices;  ///< [nnz]; -1 is padding
  Array positions;      ///< [nnz]
  Array k_cache;        ///< or the stacked cache
  std::optional<Array> v_cache;
  Array kv_indices;
  Array kv_indptr;
  Array kv_last_page_len;
};

void append_paged_kv_cache(const AppendArrays& a, bool hnd, float k_scale, float v_scale);

struct RopeArrays {
  Array q, k, q_out, k_out;  ///< [nnz, heads, D]; outputs may be the inputs
};

void apply_rope(const RopeArrays& a, const Array& positions, int32_t rotary_dim, bool interleave,
                const RopeFrequencies& frequencies);
/// `cos_sin` [max_position, rotary_dim] float: cosines, then sines.
void apply_rope_cos_sin(const RopeArrays& a, const Array& positions, const Array& cos_sin,
                        bool interleave);

void get_batch_indices_positions(const Array& append_indptr, const Array& seq_lens,
                                 const Array& batch_indices, const Array& positions);
void get_seq_lens(const Array& kv_indptr, const Array& last_page_len, int32_t page_size,
                  const Array& out);

void packbits(const Array& x, const Array& out, bool little);
void segment_packbits(const Array& x, const Array& indptr, const Array& out,
                      const Array& out_indptr, bool little);

struct State {
  Array v;  ///< [n, heads, D], or [n, states, heads, D]
  Array s;  ///< [n, heads] float, or [n, states, heads]
};

/// `mask` [n]: rows with 0 keep `a`. `out` may be `a`.
void merge_state(const State& a, const State& b, const State& out, const Array* mask, bool base2);
void merge_states(const State& in, const State& out, bool base2);

}  // namespace flashbsr::api
