// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding inside attention, by the tables of core/params.h: dims i and i + dim / 2 turn
// together. cpu/rope.h is the same on the CPU.
#pragma once

#include <flashbsr/core/params.h>

namespace flashbsr {

struct Rotation {
  float cos;
  float sin;

  FLASHBSR_DEVICE void turn(float& x, float& y) const {
    const float a = x * cos - y * sin;
    y = y * cos + x * sin;
    x = a;
  }
};

/// The angles of one position.
struct RopeRow {
  const float* coarse;
  const float* fine;
  int32_t half;
  float sign;

  /// A query before the first key (q_len > kv_len, no causal mask) has a negative position.
  FLASHBSR_DEVICE RopeRow(const RopeTables& tables, int32_t position, int32_t dim)
      : half(dim / 2), sign(position < 0 ? -1.0f : 1.0f) {
    const int32_t p = position < 0 ? -position : position;
    coarse = tables.coarse + static_cast<int64_t>(p / RopeTables::kFine) * dim;
    fine = tables.fine + p % RopeTables::kFine * dim;
  }

  /// Of dims i and i + half.
  FLASHBSR_DEVICE Rotation at(int32_t i) const {
    const float cc = coarse[i], cs = coarse[half + i], fc = fine[i], fs = fine[half + i];
    return {cc * fc - cs * fs, sign * (cs * fc + cc * fs)};
  }
};

}  // namespace flashbsr
