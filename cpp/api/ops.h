// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Checked entry points of the functions around attention. The arrays of a call are in host memory,
// where it is carried out before it returns, or all on one CUDA device, where it is put on
// `stream`.
//
// On the host every value is checked before anything is written, so that a call that raises leaves
// the caller's arrays as they were. On a device only shapes and types are known: kernels skip
// indices that name nothing of the caller's. With FLASHBSR_CHECK=1 in the environment index arrays
// are copied back and checked as on the host.
#pragma once

#include <optional>

#include <flashbsr/plan/prefixes.h>
#include <flashbsr/variant/rope.h>

#include "layouts.h"

namespace flashbsr::api {

/// Places by page tables: row t is position positions[t] of request batch_indices[t].
struct AppendTable {
  Array batch_indices;  ///< [nnz]; -1 is padding
  Array kv_indices;
  Array kv_indptr;
  Array kv_last_page_len;
};

/// Either `table`, with `positions`, or `slot_mapping` is there.
struct AppendArrays {
  Array key;      ///< [nnz, H_kv, D_qk]
  Array value;    ///< [nnz, H_kv, D_vo]
  Array k_cache;  ///< or the stacked cache
  std::optional<Array> v_cache;
  std::optional<Array> positions;  ///< [nnz]; RoPE needs them in any case
  std::optional<AppendTable> table;
  std::optional<Array> slot_mapping;  ///< [nnz] page x page_size + token in it; -1: nowhere
  bool hnd = false;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  // Written: scales of every token and head, where the cache is codes.
  std::optional<Array> k_scales;
  std::optional<Array> v_scales;
  std::optional<DType> k_codes;  ///< what bytes are
  std::optional<DType> v_codes;
};

void append_paged_kv_cache(const AppendArrays& a, void* stream);

/// A cache of codes, [..., heads, D], times its scales, into floats of the same shape.
struct DequantizeArrays {
  Array cache;
  Array scales;
  std::optional<DType> codes;
  float number = 1.0f;  ///< on all of them
  Array out;
};

void dequantize_kv_cache(const DequantizeArrays& a, void* stream);

/// Every head of x [nnz, heads, D] times a symmetric orthonormal matrix. `out` may be `x`.
void hadamard(const Array& x, const Array& out, void* stream);

/// Angles that are computed, or those of a table.
struct RopeSettings {
  int32_t rotary_dim = 0;  ///< without a table
  bool interleave = false;
  RopeFrequencies frequencies;
  /// [max_position, rotary_dim] float: cosines, then sines.
  std::optional<Array> cos_sin;
  bool hadamard = false;  ///< of an append: heads of q and k are transformed behind their rotation
};

struct RopeArrays {
  Array q, k, q_out, k_out;  ///< [nnz, heads, D]; outputs may be the inputs, or float8
  float q_scale = 1.0f;      ///< q_out is divided by it
  float k_scale = 1.0f;
};

/// A position per token; or, on a device, indptr [B + 1] and the first position of each request.
struct RopePositions {
  std::optional<Array> positions;
  std::optional<Array> indptr, offsets;
};

void apply_rope(const RopeArrays& a, const RopePositions& positions, const RopeSettings& rope,
                void* stream);

/// Queries of an append, and where they go, float8 perhaps.
struct RopeQueries {
  Array q, out;
  float scale = 1.0f;  ///< out is divided by it
};

/// Rotates queries, and keys on their way into the cache. Queries of padding are copied.
void rope_append_paged_kv_cache(const RopeQueries& queries, const AppendArrays& a,
                                const RopeSettings& rope, void* stream);

void get_batch_indices_positions(const Array& append_indptr, const Array& seq_lens,
                                 const Array& batch_indices, const Array& positions, void* stream);
void get_seq_lens(const Array& kv_indptr, const Array& last_page_len, int32_t page_size,
                  const Array& out, void* stream);

/// What requests of a paged layout in host memory begin with together.
void find_prefixes(PrefixTree& tree, const LayoutArrays& arrays, bool causal);

void packbits(const Array& x, const Array& out, bool little, void* stream);
/// `indptr` is in host memory. Where x is on a device, `device_indptr` is the same there.
void segment_packbits(const Array& x, const Array& indptr, const Array& out,
                      const Array& out_indptr, bool little, const Array* device_indptr,
                      void* stream);

struct State {
  Array v;  ///< [n, heads, D], or [n, states, heads, D]
  Array s;  ///< [n, heads] float, or [n, states, heads]
};

/// `mask` [n]: rows with 0 keep `a`. `out` may be `a`.
void merge_state(const State& a, const State& b, const State& out, const Array* mask, bool base2,
                 void* stream);
void merge_states(const State& in, const State& out, bool base2, void* stream);

/// What ranks that merge through each other's memory have agreed on; addresses are this device's.
struct Peers {
  std::vector<uintptr_t> inboxes;  ///< of every rank, inbox_bytes(...) each, filled with ones
  int32_t rank = 0;
  int64_t rows = 0;       ///< tokens x heads that an inbox has room for
  int64_t row_bytes = 0;  ///< of a row on its way
  uintptr_t control = 0;  ///< ops::PeerControl, zeros at first
  uintptr_t missed = 0;   ///< a word of host memory that becomes 1 + a rank that did not answer
  int64_t timeout_ms = 0;
};

/// Of a rank.
int64_t inbox_bytes(int64_t ranks, int64_t rows, int64_t row_bytes);
/// `in` has all heads; `out` too, or those of this rank where each gets its own. Rows travel as
/// `travel`.
void merge_peers(const State& in, const State& out, const Peers& peers, DType travel, bool base2,
                 void* stream);

}  // namespace flashbsr::api
