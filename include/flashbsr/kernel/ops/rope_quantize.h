// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Appends that quantise (quantize.h), with keys by RoPE: turned in float32 and rounded once, to
// codes.
#pragma once

#include <flashbsr/kernel/ops/quantize.h>
#include <flashbsr/kernel/ops/rope.h>

namespace flashbsr::ops {

/// Turns elements d to d + 3 of a row, which `x` has; their partners are read beside them.
FLASHBSR_DEVICE void rotate_four(const QuantizeRows& rows, const char* row, int32_t d,
                                 const Rotation& r, int64_t position, float (&x)[4]) {
  if (d >= r.rotary_dim) return;
  const int32_t half = r.rotary_dim / 2;
  const DType type = rows.in.dtype;
  float y[4];
  if (r.interleave) {
    y[0] = x[1], y[1] = x[0], y[2] = x[3], y[3] = x[2];
  } else if (half % 4 == 0) {
    load_four(row, d < half ? d + half : d - half, type, rows.aligned, y);
  } else {
    for (int i = 0; i < 4; ++i) {
      const int32_t e = d + i;
      y[i] = e < r.rotary_dim ? load_as_float(row, e < half ? e + half : e - half, type) : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t e = d + i;
    if (e >= r.rotary_dim) continue;
    const bool first = r.interleave ? e % 2 == 0 : e < half;
    const int32_t pair = r.interleave ? e / 2 : first ? e : e - half;
    float cosine, sine;
    angle_of<true>(r, position, pair, cosine, sine);
    x[i] = x[i] * cosine + y[i] * (first ? -sine : sine);
  }
}

FLASHBSR_DEVICE void rope_append_quantize(const RopeQuantizeArgs& a) {
  for_each_head(a.append, [&](const QuantizeRows& rows, bool is_v, const Slot& slot, int64_t token,
                              int32_t head, int lane) {
    const int64_t position = is_v ? 0 : a.positions[token];
    // Positions outside of the table keep their values.
    const bool turned =
        !is_v && (!a.rotation.cos_sin || (position >= 0 && position < a.rotation.max_position));
    quantize_head(rows, slot, token, head, lane, [&](const char* row, int32_t d, float (&x)[4]) {
      if (turned) rotate_four(rows, row, d, a.rotation, position, x);
    });
  });
}

}  // namespace flashbsr::ops
