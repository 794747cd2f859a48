// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding of q and k (Su et al., RoFormer, 2021, eq. 34), into arrays of their own, in
// place, or k, and v with it, into a paged cache of any type.
//
// A warp takes an item: some heads of q, k or v of one token. A lane keeps its pairs from head to
// head, so it needs their cosines and sines once. It reads both elements of a pair before it writes
// either, and nobody else touches them: in place is safe.
#pragma once

#include <flashbsr/kernel/ops/append.h>
#include <flashbsr/kernel/ops/search.h>

namespace flashbsr::ops {

/// The rows of one token: where they are read and written.
struct TokenRows {
  const char* in;
  char* out;
  int64_t in_stride;  ///< bytes from head to head
  int64_t out_stride;
  DType from, to;
  int32_t heads, dim;
  float scale;
};

FLASHBSR_DEVICE TokenRows rows_of(const RopeRows& r, const PagedView* cache, const Slot& slot,
                                  int64_t token) {
  const RaggedView& in = r.in;
  TokenRows rows{in.row(token, 0),
                 nullptr,
                 in.stride_head * dtype_size(in.dtype),
                 0,
                 in.dtype,
                 in.dtype,
                 in.heads,
                 in.dim,
                 r.inverse_scale};
  if (cache) {
    rows.out = cache->row(slot.page, slot.token, 0);
    rows.out_stride = cache->stride_head * dtype_size(cache->dtype);
    rows.to = cache->dtype;
  } else {
    rows.out = r.out.row(token, 0);
    rows.out_stride = r.out.stride_head * dtype_size(r.out.dtype);
    rows.to = r.out.dtype;
  }
  return rows;
}

/// Cosine and sine of pair i at a position. `kFast`: to 2^-20.9, for results of 16 bits or fewer,
/// in two instructions and few registers instead of twenty.
template <bool kFast>
FLASHBSR_DEVICE void angle_of(const Rotation& r, int64_t position, int32_t i, float& cosine,
                              float& sine) {
  if (r.cos_sin) {
    const float* row = r.cos_sin + position * r.cos_sin_stride;
    cosine = row[i];
    sine = row[r.rotary_dim / 2 + i];
    return;
  }
  const uint64_t phase = static_cast<uint64_t>(position) * r.turns[i];
  // The upper half, signed, in half turns: [-1, 1).
  const float half_turns =
      static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(phase >> 32))) * 0x1p-31f;
  if constexpr (kFast) {
    constexpr float kPi = 3.14159265f;
    cosine = __cosf(half_turns * kPi);
    sine = __sinf(half_turns * kPi);
  } else {
    sincospif(half_turns, &sine, &cosine);
  }
}

/// Sixteen elements in a row, x then y, to their first ones of each pair in x and second ones in y.
FLASHBSR_DEVICE void sort_pairs(float (&x)[kUnit], float (&y)[kUnit]) {
  float first[kUnit], second[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) {
    first[i] = x[2 * i];
    second[i] = x[2 * i + 1];
    first[i + kUnit / 2] = y[2 * i];
    second[i + kUnit / 2] = y[2 * i + 1];
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    x[i] = first[i];
    y[i] = second[i];
  }
}

FLASHBSR_DEVICE void join_pairs(float (&x)[kUnit], float (&y)[kUnit]) {
  float low[kUnit], high[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) {
    low[2 * i] = x[i];
    low[2 * i + 1] = y[i];
    high[2 * i] = x[i + kUnit / 2];
    high[2 * i + 1] = y[i + kUnit / 2];
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    x[i] = low[i];
    y[i] = high[i];
  }
}

/// Rotates heads [head, end) of a token: 8 pairs a lane. With interleaved pairs the two units
/// follow one another, otherwise they are rotary_dim / 2 elements apart.
template <int kArch>
FLASHBSR_DEVICE void rotate_units(const TokenRows& rows, const Rotation& r, int64_t position,
                                  int32_t head, int32_t end) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t half = r.rotary_dim / 2;
  const int32_t units = half / kUnit;
  const int32_t heads = max_of(32 / units, 1);  // that the warp rotates at once
  const int32_t lane_head = units < 32 ? lane / units : 0;
  if (lane_head >= heads) return;
  for (int32_t u = units < 32 ? lane % units : lane; u < units; u += 32) {
    const int32_t a = r.interleave ? 2 * u * kUnit : u * kUnit;
    const int32_t b = r.interleave ? a + kUnit : a + half;
    const int32_t from_size = dtype_size(rows.from), to_size = dtype_size(rows.to);
    const int64_t in_step = heads * rows.in_stride, out_step = heads * rows.out_stride;
    const char* in = rows.in + (head + lane_head) * rows.in_stride;
    char* out = rows.out + (head + lane_head) * rows.out_stride;
    // Under way while the position arrives and the angles are worked out.
    Unit first{}, second{};
    if (head + lane_head < end) {
      first = load_unit(in + a * from_size, rows.from);
      second = load_unit(in + b * from_size, rows.from);
    }
    float cosine[kUnit], sine[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      angle_of<true>(r, position, u * kUnit + i, cosine[i], sine[i]);
      cosine[i] *= rows.scale;
      sine[i] *= rows.scale;
    }
#pragma unroll 1  // four rounds at once take more registers than there are
    for (int32_t h = head + lane_head; h < end; h += heads) {
      float x[kUnit], y[kUnit];
      to_floats<kArch>(first, rows.from, x);
      to_floats<kArch>(second, rows.from, y);
      in += in_step;
      if (h + heads < end) {  // the next ones are under way while these are turned
        first = load_unit(in + a * from_size, rows.from);
        second = load_unit(in + b * from_size, rows.from);
      }
      // Interleaved, (x0, x1), (x2, x3), .. are the pairs: sorted apart, and back afterwards.
      if (r.interleave) sort_pairs(x, y);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const float x0 = x[i], y0 = y[i];
        x[i] = x0 * cosine[i] - y0 * sine[i];
        y[i] = y0 * cosine[i] + x0 * sine[i];
      }
      if (r.interleave) join_pairs(x, y);
      store_unit(out + a * to_size, rows.to, from_floats<kArch>(x, rows.to));
      store_unit(out + b * to_size, rows.to, from_floats<kArch>(y, rows.to));
      out += out_step;
    }
  }
}

/// The same, a pair at a time: rows of any alignment and length.
FLASHBSR_DEVICE void rotate_pairs(const TokenRows& rows, const Rotation& r, int64_t position,
                                  int32_t head, int32_t end) {
  const int32_t half = r.rotary_dim / 2;
  for (int32_t i = static_cast<int32_t>(threadIdx.x) % 32; i < half; i += 32) {
    float cosine, sine;
    angle_of<false>(r, position, i, cosine, sine);
    const int32_t a = r.interleave ? 2 * i : i;
    const int32_t b = r.interleave ? 2 * i + 1 : i + half;
    for (int32_t h = head; h < end; ++h) {
      const char* in = rows.in + h * rows.in_stride;
      char* out = rows.out + h * rows.out_stride;
      const float x = load_as_float(in, a, rows.from), y = load_as_float(in, b, rows.from);
      store_from_float(out, a, rows.to, (x * cosine - y * sine) * rows.scale);
      store_from_float(out, b, rows.to, (y * cosine + x * sine) * rows.scale);
    }
  }
}

/// Units that a lane moves at once; the rotation leaves no registers for more.
inline constexpr int kMoveUnits = 2;

/// Elements [begin, dim) of heads [head, end) as they are, converted. `units`: of such a row.
template <int kArch>
FLASHBSR_DEVICE void move_rows(const TokenRows& rows, const FastDiv& units, int32_t unit,
                               int32_t begin, int32_t head, int32_t end) {
  const int32_t count = (end - head) * static_cast<int32_t>(units.divisor);
  const auto in_at = [&](int32_t u, int32_t h) {
    return rows.in + (head + h) * rows.in_stride +
           (begin + units.remainder(u, h) * unit) * dtype_size(rows.from);
  };
  const auto out_at = [&](int32_t u, int32_t h) {
    return rows.out + (head + h) * rows.out_stride +
           (begin + units.remainder(u, h) * unit) * dtype_size(rows.to);
  };
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  if (unit == 1) {
    for (int32_t u = lane; u < count; u += 32) {
      const int32_t h = units.quotient(u);
      store_from_float(out_at(u, h), 0, rows.to,
                       load_as_float(in_at(u, h), 0, rows.from) * rows.scale);
    }
    return;
  }
  for (int32_t base = lane; base < count; base += 32 * kMoveUnits) {
    Unit in[kMoveUnits];
#pragma unroll
    for (int i = 0; i < kMoveUnits; ++i) {
      const int32_t u = base + 32 * i;
      if (u < count) in[i] = load_unit(in_at(u, units.quotient(u)), rows.from);
    }
#pragma unroll
    for (int i = 0; i < kMoveUnits; ++i) {
      const int32_t u = base + 32 * i;
      if (u >= count) break;
      store_unit(out_at(u, units.quotient(u)), rows.to,
                 convert<kArch>(in[i], rows.from, rows.to, rows.scale));
    }
  }
}

FLASHBSR_DEVICE int64_t position_of(const RopeArgs& a, int64_t token) {
  if (a.positions.data) return a.positions[token];
  const int64_t request = request_of(a.indptr, token);
  return a.offsets[request] + token - a.indptr[request];
}

/// For heads that are turned and nothing else.
struct Turned {};
template <class Transform>
inline constexpr bool kOnlyTurns = false;
template <>
inline constexpr bool kOnlyTurns<Turned> = true;

/// `transform(rows, position, head, end)` turns and writes heads of q or k in place of this.
template <int kArch, class Transform>
FLASHBSR_DEVICE void rope_item(const RopeArgs& a, int64_t token, int32_t part,
                               const Transform& transform) {
  const bool is_q = part < a.q.parts;
  const bool is_v = part >= a.q.parts + a.k.parts;
  const int32_t of_tensor = part - (is_q ? 0 : is_v ? a.q.parts + a.k.parts : a.q.parts);
  const RopeRows& tensor = is_q ? a.q : is_v ? a.v : a.k;
  const PagedView* cache = !a.append || is_q ? nullptr : is_v ? &a.v_cache : &a.k_cache;
  Slot slot;
  if (a.append) slot = find_slot(a.slots, token);
  if (cache && !slot.valid) return;
  const TokenRows rows = rows_of(tensor, cache, slot, token);
  const int32_t head = of_tensor * a.item_heads;
  const int32_t end = min_of(head + a.item_heads, rows.heads);

  // V, rows of padding and positions outside of the table keep their values. A slot of -1 says
  // nothing of the query: its key may belong to another rank.
  const int64_t position = is_v ? 0 : position_of(a, token);
  const bool turned =
      !is_v && (!a.append || slot.valid || a.slots.mapping.given()) &&
      (a.rotation.cos_sin == nullptr || (position >= 0 && position < a.rotation.max_position));
  if constexpr (!kOnlyTurns<Transform>) {
    if (turned) return transform(rows, position, head, end);
  }
  if (turned && a.unit == kUnit) {
    rotate_units<kArch>(rows, a.rotation, position, head, end);
  } else if (turned) {
    rotate_pairs(rows, a.rotation, position, head, end);
  }
  const int32_t begin = turned ? a.rotation.rotary_dim : 0;
  if (rows.in != rows.out && begin < rows.dim) {
    move_rows<kArch>(rows, turned ? tensor.tail_units : tensor.row_units, a.unit, begin, head, end);
  }
}

template <int kArch, class Transform = Turned>
FLASHBSR_DEVICE void rope(const RopeArgs& a, const Transform& transform = {}) {
  const int32_t items = a.tokens * static_cast<int32_t>(a.parts.divisor);
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < items; item += stride) {
    const int32_t t = a.parts.quotient(item);
    rope_item<kArch>(a, a.first_token + t, a.parts.remainder(item, t), transform);
  }
}

}  // namespace flashbsr::ops
