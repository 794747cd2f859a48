// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding (Su et al., RoFormer, 2021, eq. 15) of float rows, NeoX halves or interleaved.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Rotates row[0, dim) in place for attention's ROPE_LLAMA, as RopeTables says.
FLASHBSR_FN void rope_row(float* row, int dim, int64_t position, const RopeTables& tables) {
  const int columns = dim / 2, half = tables.half;
  // A query before the first key (q_len > kv_len, no causal mask) has a negative position.
  const float sign = position < 0 ? -1.0f : 1.0f;
  if (position < 0) position = -position;
  const float* coarse = tables.coarse + (position / RopeTables::kFine) * dim;
  const float* fine = tables.fine + (position % RopeTables::kFine) * dim;
  const auto turn = [&](int column, float& first, float& second) {
    const float* c = coarse + column;
    const float* f = fine + column;
    const float cosine = c[0] * f[0] - c[columns] * f[columns];
    const float sine = sign * (c[columns] * f[0] + c[0] * f[columns]);
    const float x = first, y = second;
    first = x * cosine - y * sine;
    second = y * cosine + x * sine;
  };
  if (tables.interleave) {
    for (int i = 0; i < half; i += 2) {
      turn(i, row[i], row[i + 1]);
      turn(i + 1, row[half + i], row[half + i + 1]);
    }
    return;
  }
  // Plain loop over the halves: the compiler vectorises it, and half need not fill vectors.
  for (int i = 0; i < half; ++i) turn(i, row[i], row[half + i]);
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
