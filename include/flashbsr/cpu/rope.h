// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding (Su et al., RoFormer, 2021, eq. 15) of float rows, NeoX halves or interleaved.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Rotates row[0, dim) in place for attention's ROPE_LLAMA (NeoX halves: i pairs with i + dim / 2).
FLASHBSR_FN void rope_row(float* row, int dim, int64_t position, const RopeTables& tables) {
  const int half = dim / 2;
  // A query before the first key (q_len > kv_len, no causal mask) has a negative position.
  const float sign = position < 0 ? -1.0f : 1.0f;
  if (position < 0) position = -position;
  const float* coarse = tables.coarse + (position / RopeTables::kFine) * dim;
  const float* fine = tables.fine + (position % RopeTables::kFine) * dim;
  // Plain loop over the halves: the compiler vectorises it, and half need not fill vectors.
  for (int i = 0; i < half; ++i) {
    const float c = coarse[i] * fine[i] - coarse[half + i] * fine[half + i];
    const float s = sign * (coarse[half + i] * fine[i] + coarse[i] * fine[half + i]);
    const float x = row[i], y = row[half + i];
    row[i] = x * c - y * s;
    row[half + i] = y * c + x * s;
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
