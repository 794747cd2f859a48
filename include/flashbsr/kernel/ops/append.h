// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Appends rows of K and V to a paged cache: bit for bit where the types agree, converted to the
// cache's type (float8: divided by a scale) otherwise.
//
// A warp takes an item: up to 4 KB of one token, which is all of its K and V in the common case.
// Its loads do not wait for the look-up of the slot (three dependent loads, the same for every
// lane); only the stores do.
#pragma once

#include <flashbsr/kernel/ops/unit.h>

namespace flashbsr::ops {

struct Slot {
  int64_t page = 0;
  int64_t token = 0;  ///< within the page
  bool valid = false;
};

/// The slot of a token; not valid for padding and for whatever does not lie in the cache.
FLASHBSR_DEVICE Slot find_slot(const Slots& s, int64_t token) {
  const int64_t request = s.batch_indices[token];
  const int64_t position = s.positions[token];
  if (request < 0 || request + 1 >= s.kv_indptr.size) return {};
  if (position < 0 || position > 0x7fffffff) return {};
  const int64_t begin = s.kv_indptr[request];
  const int64_t end = min_of(s.kv_indptr[request + 1], s.kv_indices.size);
  const int32_t at = static_cast<int32_t>(position);
  const int32_t page_of_request = s.page_size.quotient(at);
  if (begin < 0 || begin + page_of_request >= end) return {};
  const int64_t page = s.kv_indices[begin + page_of_request];
  if (page < 0 || page >= s.pages) return {};
  return {page, s.page_size.remainder(at, page_of_request), true};
}

/// Unit `u` of a token's row: its head, and its first element within the head.
struct UnitPlace {
  int32_t head;
  int32_t offset;

  FLASHBSR_DEVICE UnitPlace(const AppendRows& r, int32_t u)
      : head(r.row_units.quotient(u)), offset(r.row_units.remainder(u, head) * r.unit) {}
};

FLASHBSR_DEVICE const char* source_of(const AppendRows& r, int32_t u, int64_t token) {
  const UnitPlace at(r, u);
  return r.in.row(token, at.head) + at.offset * dtype_size(r.in.dtype);
}

FLASHBSR_DEVICE char* target_of(const AppendRows& r, int32_t u, const Slot& slot) {
  const UnitPlace at(r, u);
  return r.cache.row(slot.page, slot.token, at.head) + at.offset * dtype_size(r.cache.dtype);
}

/// Bits as they are. `Bits`: an unsigned type of the unit's width. `first`: this lane's first unit.
template <class Bits>
FLASHBSR_DEVICE void copy_item(const AppendArgs& a, const AppendRows& r, int64_t token,
                               int32_t first) {
  Bits bits[kUnitsInFlight];
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    const int32_t u = first + 32 * i;
    if (u < r.units) bits[i] = *reinterpret_cast<const Bits*>(source_of(r, u, token));
  }
  const Slot slot = find_slot(a.slots, token);
  if (!slot.valid) return;
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    const int32_t u = first + 32 * i;
    if (u < r.units) *reinterpret_cast<Bits*>(target_of(r, u, slot)) = bits[i];
  }
}

template <int kArch>
FLASHBSR_DEVICE void convert_item(const AppendArgs& a, const AppendRows& r, int64_t token,
                                  int32_t first) {
  if (r.unit == 1) {
    const Slot slot = find_slot(a.slots, token);
    if (!slot.valid) return;
    for (int32_t u = first; u < min_of(first + 32 * kUnitsInFlight, r.units); u += 32) {
      store_from_float(target_of(r, u, slot), 0, r.cache.dtype,
                       load_as_float(source_of(r, u, token), 0, r.in.dtype) * r.inverse_scale);
    }
    return;
  }
  Unit units[kUnitsInFlight];
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    const int32_t u = first + 32 * i;
    if (u < r.units) units[i] = load_unit(source_of(r, u, token), r.in.dtype);
  }
  const Slot slot = find_slot(a.slots, token);
  if (!slot.valid) return;
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    const int32_t u = first + 32 * i;
    if (u >= r.units) return;
    store_unit(target_of(r, u, slot), r.cache.dtype,
               convert<kArch>(units[i], r.in.dtype, r.cache.dtype, r.inverse_scale));
  }
}

/// Items of a grid, a warp each. `body(rows of K or V, token, first unit of this lane)`.
template <class Body>
FLASHBSR_DEVICE void for_each_item(const AppendArgs& a, const Body& body) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t items = a.tokens * static_cast<int32_t>(a.parts.divisor);
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < items; item += stride) {
    const int32_t t = a.parts.quotient(item);
    const int32_t part = a.parts.remainder(item, t);
    const bool is_v = part >= a.k.parts;
    const int32_t of_rows = is_v ? part - a.k.parts : part;
    body(is_v ? a.v : a.k, a.first_token + t, of_rows * kUnitsInFlight * 32 + lane);
  }
}

FLASHBSR_DEVICE void append_paged_kv(const AppendArgs& a) {
  for_each_item(a, [&](const AppendRows& r, int64_t token, int32_t first) {
    switch (r.copy_bytes) {
      case 16: copy_item<uint4>(a, r, token, first); break;
      case 8: copy_item<uint2>(a, r, token, first); break;
      case 4: copy_item<uint32_t>(a, r, token, first); break;
      case 2: copy_item<uint16_t>(a, r, token, first); break;
      default: copy_item<uint8_t>(a, r, token, first); break;
    }
  });
}

template <int kArch>
FLASHBSR_DEVICE void append_paged_kv_convert(const AppendArgs& a) {
  for_each_item(a, [&](const AppendRows& r, int64_t token, int32_t first) {
    convert_item<kArch>(a, r, token, first);
  });
}

}  // namespace flashbsr::ops
