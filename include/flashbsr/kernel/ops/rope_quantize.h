// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Appends that quantise (quantize.h), with keys by RoPE: turned in float32 and rounded once, to
// codes.
#pragma once

#include <flashbsr/kernel/ops/quantize.h>
#include <flashbsr/kernel/ops/rope.h>

namespace flashbsr::ops {

FLASHBSR_DEVICE void load_partners(const char* row, int32_t d, const QuantizeRows& r,
                                   float (&y)[4]) {
  load_four(row, d, r.in.dtype, r.aligned, y);
}
FLASHBSR_DEVICE void load_partners(const char* row, int32_t d, const QuantizeRows& r, Run& y) {
  uint4 bits[2];
  load_run(row + 2 * d, bits);
  unpack_run(bits, r.in.dtype, y);
}

/// Turns the elements from d on of a row, which `x` has; their partners are read beside them.
template <int kCount>
FLASHBSR_DEVICE void rotate_some(const QuantizeRows& rows, const char* row, int32_t d,
                                 const Rotation& r, int64_t position, float (&x)[kCount]) {
  if (d >= r.rotary_dim) return;
  const int32_t half = r.rotary_dim / 2;
  float y[kCount];
  if (r.interleave) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) y[i] = x[i ^ 1];
  } else if (kCount == kRun || half % kCount == 0) {  // runs: the host sees to it
    load_partners(row, d < half ? d + half : d - half, rows, y);
  } else {
    for (int i = 0; i < kCount; ++i) {
      const int32_t e = d + i;
      y[i] = e < r.rotary_dim ? load_as_float(row, e < half ? e + half : e - half, rows.in.dtype)
                              : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t e = d + i;
    if (e >= r.rotary_dim) continue;
    const bool first = r.interleave ? e % 2 == 0 : e < half;
    const int32_t pair = r.interleave ? e / 2 : first ? e : e - half;
    float cosine, sine;
    angle_of<true>(r, position, pair, cosine, sine);
    x[i] = x[i] * cosine + y[i] * (first ? -sine : sine);
  }
}

/// Whether K of a position is turned: those outside of the table keep their values.
FLASHBSR_DEVICE bool is_known(const Rotation& r, int64_t position) {
  return !r.cos_sin || (position >= 0 && position < r.max_position);
}

template <int kArch>
FLASHBSR_DEVICE void rope_append_quantize(const RopeQuantizeArgs& a) {
  quantize_all<kArch>(a.append, [&](const QuantizeRows& rows, bool is_v, int64_t token,
                                    const char* row, int32_t d, auto& x) {
    if (is_v) return;
    const int64_t position = a.positions[token];
    if (is_known(a.rotation, position)) rotate_some(rows, row, d, a.rotation, position, x);
  });
}

}  // namespace flashbsr::ops
