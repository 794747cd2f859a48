// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding inside attention, by the tables of core/params.h. cpu/rope.h is the same on the
// CPU.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/ptx/convert.h>

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

  /// Of column i.
  FLASHBSR_DEVICE Rotation at(int32_t i) const {
    const float cc = coarse[i], cs = coarse[half + i], fc = fine[i], fs = fine[half + i];
    return {cc * fc - cs * fs, sign * (cs * fc + cc * fs)};
  }
};

/// Which two groups of 16 dims turn together, by columns [16 group, 16 group + 16) of the tables.
/// Those that are not rotated are left over for each other.
struct PairedGroups {
  int32_t first;
  int32_t second;
  bool turn;

  /// @param count  groups of a head
  FLASHBSR_DEVICE PairedGroups(const RopeTables& tables, int32_t group, int32_t count)
      : turn(group < tables.half / 16) {
    const int32_t rotated = tables.half / 16;
    first = turn ? group : group + rotated;
    second = group + (turn ? rotated : count / 2);
  }
};

/// Four dims in two words of 16-bit numbers, put so that x and y turn together: neighbours are in
/// one word. The dot product of q and k is the same over dims in another order, so nobody puts them
/// back.
struct Zip {
  uint32_t low;
  uint32_t high;

  FLASHBSR_DEVICE explicit Zip(const RopeTables& tables)
      : low(tables.interleave ? 0x5410 : 0x3210), high(tables.interleave ? 0x7632 : 0x7654) {}

  FLASHBSR_DEVICE void operator()(uint32_t& x, uint32_t& y) const {
    const uint32_t a = ptx::permute_bytes(x, y, low);
    y = ptx::permute_bytes(x, y, high);
    x = a;
  }
};

/// Turns two pairs: their dims in x, the partners in y.
template <DType kType>
FLASHBSR_DEVICE void turn(const Rotation (&angles)[2], uint32_t& x, uint32_t& y) {
  float a[2] = {ptx::unpack_low<kType>(x), ptx::unpack_high<kType>(x)};
  float b[2] = {ptx::unpack_low<kType>(y), ptx::unpack_high<kType>(y)};
#pragma unroll
  for (int e = 0; e < 2; ++e) angles[e].turn(a[e], b[e]);
  x = ptx::pack2<kType>(a[0], a[1]);
  y = ptx::pack2<kType>(b[0], b[1]);
}

/// The angles of a lane's two pairs, of which `dim` is the first one's lower dim.
struct Angles {
  Rotation at[2];

  /// Of as many positions, less than the fine table has: a step from one to another. `fine` is the
  /// table's column of `dim`.
  FLASHBSR_DEVICE static Angles step(const float* fine, int32_t head_dim, int32_t positions) {
    const float* row = fine + positions * head_dim;
    const float2 c = *reinterpret_cast<const float2*>(row);
    const float2 s = *reinterpret_cast<const float2*>(row + head_dim / 2);
    return {{{c.x, s.x}, {c.y, s.y}}};
  }
  FLASHBSR_DEVICE static Angles of(const RopeTables& tables, int32_t head_dim, int32_t position,
                                   int32_t dim) {
    const RopeRow row(tables, position, head_dim);
    return {{row.at(dim), row.at(dim + 1)}};
  }
  FLASHBSR_DEVICE void advance(const Angles& by) {
#pragma unroll
    for (int e = 0; e < 2; ++e) by.at[e].turn(at[e].cos, at[e].sin);
  }
};

}  // namespace flashbsr
