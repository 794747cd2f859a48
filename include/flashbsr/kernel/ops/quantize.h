// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Appends rows of K and V to a paged cache of codes, with a scale of every token, head and group.
// What quantize_runs.h does not take, of any type and alignment: a warp takes a head of a token; a
// lane holds four neighbouring elements of every 128, so that groups of 16, 32 and 64 are 4, 8 and
// 16 lanes.
#pragma once

#include <flashbsr/kernel/ops/quantize_runs.h>

namespace flashbsr::ops {

/// Four elements, of which rows have a multiple.
FLASHBSR_DEVICE void load_four(const char* row, int32_t d, DType t, bool aligned, float (&x)[4]) {
  if (aligned && dtype_size(t) == 2) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(row + 2 * d);
    if (t == DType::kBF16) {
      unpack<DType::kBF16>(pairs.x, x[0], x[1]);
      unpack<DType::kBF16>(pairs.y, x[2], x[3]);
    } else {
      unpack<DType::kF16>(pairs.x, x[0], x[1]);
      unpack<DType::kF16>(pairs.y, x[2], x[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = load_as_float(row, d + i, t);
}

/// The least and the greatest of some elements and 0, and whether all are finite.
struct Range {
  float low = 0, high = 0;
  int finite = 1;

  FLASHBSR_DEVICE void add(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low = min_of(low, x[i]);
      high = max_of(high, x[i]);
      finite &= x[i] - x[i] == 0;
    }
  }

  /// That of `lanes` neighbouring lanes.
  FLASHBSR_DEVICE void reduce(int lanes) {
    for (int step = 1; step < lanes; step *= 2) {
      low = min_of(low, __shfl_xor_sync(~0u, low, step));
      high = max_of(high, __shfl_xor_sync(~0u, high, step));
      finite &= __shfl_xor_sync(~0u, finite, step);
    }
  }
};

FLASHBSR_DEVICE uint32_t code_bits(float x, DType t) {
  switch (t) {
    case DType::kI8: return static_cast<uint32_t>(round_within(x, -127, 127)) & 255u;
    case DType::kE4M3: return float_to_e4m3(x);
    case DType::kE5M2: return float_to_e5m2(x);
    case DType::kI4: return static_cast<uint32_t>(round_within(x, 0, 15));
    default: return float_to_e2m1(x);
  }
}

/// Four codes: four bytes, or two. Caches are aligned to them as a rule.
FLASHBSR_DEVICE void store_codes(char* row, int32_t d, DType t, const float (&x)[4],
                                 const GroupScale& s) {
  const bool packed = is_packed(t);
  const int bits = packed ? 4 : 8;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= code_bits(s.code_of(x[i]), t) << (bits * i);
  char* to = row + (packed ? d / 2 : d);
  const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uint64_t>(to));
  if (packed) {
    if (odd % 2 == 0) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
    } else {
      to[0] = static_cast<char>(word);
      to[1] = static_cast<char>(word >> 8);
    }
  } else if (odd % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = static_cast<char>(word >> (8 * i));
  }
}

/// One head of a token, by a warp.
/// A scale of more than the 128 elements that a warp holds takes a turn over all of them for their
/// range and reads them again: unrolled to keep them, a kernel took 28 seconds to compile.
template <class Change>
FLASHBSR_DEVICE void quantize_head(const QuantizeRows& r, bool is_v, const Slot& slot,
                                   int64_t token, int32_t head, int lane, const Change& change) {
  constexpr int32_t kWarpElements = 128;
  const char* in = r.in.row(token, head);
  char* out = r.cache.row(slot.page, slot.token, head);
  char* scales = r.scales.row(slot.page, slot.token, head);
  const DType codes = r.cache.dtype;
  const int32_t size = r.in.dim / r.scales.dim;  // of a group
  const bool long_groups = size > kWarpElements;
  Range range;
#pragma unroll 1
  for (int turn = long_groups ? 0 : 1; turn < 2; ++turn) {
    if (turn == 1 && long_groups) range.reduce(32);
#pragma unroll 1
    for (int32_t begin = 0; begin < r.in.dim; begin += kWarpElements) {
      const int32_t d = begin + 4 * lane;
      const bool inside = d < r.in.dim;
      float x[4] = {};
      if (inside) {
        load_four(in, d, r.in.dtype, r.aligned, x);
        change(r, is_v, token, in, d, x);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= r.inverse_scale;
      }
      if (!long_groups) range = Range{};
      if (turn == 0 || !long_groups) range.add(x);
      if (turn == 0) continue;
      if (!long_groups) range.reduce(r.scales.dim == 1 ? 32 : size / 4);
      const GroupScale s = scale_of(range.low, range.high, range.finite, codes, r.scales.dtype);
      if (!inside) continue;
      store_codes(out, d, codes, x, s);
      if (d % size == 0) store_from_float(scales, d / size, r.scales.dtype, s.stored);
    }
  }
}

/// Heads of K, then those of V, a warp each: `body(rows, is_v, slot, token, head, lane)`.
template <class Body>
FLASHBSR_DEVICE void for_each_head(const QuantizeArgs& a, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t heads = a.k.in.heads;
  const int32_t k_items = a.tokens * heads;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < 2 * k_items; item += stride) {
    const bool is_v = item >= k_items;
    const int32_t of_rows = is_v ? item - k_items : item;
    const int32_t t = a.heads.quotient(of_rows);
    const int64_t token = a.first_token + t;
    const Slot slot = find_slot(a.slots, token);
    if (!slot.valid) continue;
    body(is_v ? a.v : a.k, is_v, slot, token, a.heads.remainder(of_rows, t), lane);
  }
}

/// `change(rows, is_v, token, row, d, x)` may change the elements from d on that x holds, before.
template <int kArch, class Change>
FLASHBSR_DEVICE void quantize_all(const QuantizeArgs& a, const Change& change) {
  if (a.k.runs > 0 && a.v.runs > 0) return quantize_runs<kArch>(a, change);
  for_each_head(
      a, [&](const QuantizeRows& rows, bool is_v, const Slot& slot, int64_t token, int32_t head,
             int lane) { quantize_head(rows, is_v, slot, token, head, lane, change); });
}

template <int kArch>
FLASHBSR_DEVICE void append_paged_kv_quantize(const QuantizeArgs& a) {
  quantize_all<kArch>(a, AsTheyCome{});
}

}  // namespace flashbsr::ops
