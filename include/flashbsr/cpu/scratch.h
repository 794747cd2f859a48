// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory of one work item on a CPU thread: carved from one block, which a thread keeps.
#pragma once

#include <flashbsr/core/state.h>
#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/cpu/loader.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// What a packed row is, and its softmax state so far.
struct Row {
  int32_t token;
  int32_t q_head;
  Span span;    ///< visible KV positions
  float scale;  ///< natural logits per raw dot product
  float max;    ///< running maximum, base 2; -inf while nothing was visible
};

/// Takes a row's denominator and output to another maximum.
FLASHBSR_FN void rescale(Row& row, float top, FloatV& sum, float* o, int64_t dims) {
  const float factor = row.max == -infinity() ? 0.0f : __builtin_exp2f(row.max - top);
  row.max = top;
  sum *= factor;
  for (int64_t d = 0; d < dims; d += kLanes) store(o + d, load(o + d) * factor);
}

/// Per-thread memory of one item, carved from one block.
template <class Op>
struct Scratch {
  float* q;     ///< [rows][q_words]
  float* o;     ///< [rows][dv_padded]
  float* kt;    ///< [dk words padded][kKvTile]
  float* vp;    ///< [kKvTile / per word][dv_padded]
  float* s;     ///< [kFewRows][kKvTile]
  float* p;     ///< [kFewRows][kKvTile elements]
  FloatV* sum;  ///< [rows] lane-wise denominators
  Row* row;     ///< [rows]
  PackBuffers pack;
  char* zeros;
  int64_t bytes;

  Scratch(char* base, int rows, int dk, int dv) {
    const int64_t q_words = padded_words<Op>(dk);
    const int64_t dv_padded = padded_words<Op>(dv) * Op::kPerWord;
    int64_t used = 0;
    const auto take = [&](int64_t size) {
      char* at = base + used;
      used += round_up<int64_t>(size, 64);
      return at;
    };
    q = reinterpret_cast<float*>(take(rows * q_words * 4));
    o = reinterpret_cast<float*>(take(rows * dv_padded * 4));
    kt = reinterpret_cast<float*>(take(q_words * kKvTile * 4));
    vp = reinterpret_cast<float*>(take(dv_padded * kKvTile * 4));
    s = reinterpret_cast<float*>(take(kFewRows * kKvTile * 4));
    p = reinterpret_cast<float*>(take(kFewRows * kKvTile * 4));
    sum = reinterpret_cast<FloatV*>(take(rows * static_cast<int64_t>(sizeof(FloatV))));
    row = reinterpret_cast<Row*>(take(rows * static_cast<int64_t>(sizeof(Row))));
    zeros = take(kMaxHeadDim * 4 + 64);
    pack = {take(max_of(kLanes * q_words, 2 * dv_padded) * 4), zeros};
    bytes = used;
  }
};

/// Memory for scales of every token, of an item whose K or V have them.
struct Folding {
  bool keys, values;  ///< whose scales are multiplied into logits and weights
  FoldedScales k, v;  ///< kKvTile tokens apart
  float* part;        ///< [kFewRows][kKvTile] logits of one group
  int64_t bytes = 0;

  Folding(char* base, const Params& p)
      : keys(folds(p.k, p.k_scales)), values(folds(p.v, p.v_scales)) {
    const auto take = [&](bool needed, int64_t size) {
      char* at = base + bytes;
      bytes += needed ? round_up<int64_t>(size, 64) : 0;
      return at;
    };
    const auto scales = [&](bool folded, const PagedView& x, const PagedView& of) -> FoldedScales {
      const bool lifted = folded && x.dtype == DType::kI4;
      const int64_t count = int64_t{of.dim} * kKvTile;
      float* const scale = reinterpret_cast<float*>(take(folded, count * 4));
      uint16_t* const lift = reinterpret_cast<uint16_t*>(take(lifted, count * 2));
      return {scale, lifted ? lift : nullptr, kKvTile};
    };
    k = scales(keys, p.k, p.k_scales);
    v = scales(values, p.v, p.v_scales);
    part = reinterpret_cast<float*>(take(keys, int64_t{kFewRows} * kKvTile * 4));
  }
};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
