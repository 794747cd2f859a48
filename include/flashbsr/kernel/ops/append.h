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
#include <flashbsr/ptx/sync.h>

namespace flashbsr::ops {

struct Slot {
  int64_t page = 0;
  int64_t token = 0;  ///< within the page
  bool valid = false;
};

/// The slot of a token; not valid for padding and for whatever does not lie in the cache, whose
/// slots the host knows to be fewer than 2^31.
FLASHBSR_DEVICE Slot find_slot(const Slots& s, int64_t token) {
  if (s.mapping.given()) {
    const int64_t slot = s.mapping[token];
    if (slot < 0 || slot >= s.pages * s.page_size.divisor) return {};
    const int32_t at = static_cast<int32_t>(slot);
    const int32_t page = s.page_size.quotient(at);
    return {page, s.page_size.remainder(at, page), true};
  }
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

/// Bytes from a token's first head to unit `u` of it.
FLASHBSR_DEVICE int64_t unit_offset(const AppendRows& r, int32_t u, int64_t stride_head, DType t) {
  const int32_t head = r.row_units.quotient(u);
  return (head * stride_head + r.row_units.remainder(u, head) * r.unit) * dtype_size(t);
}

/// Addresses of units first, first + 32, .. of a token's row.
template <bool kLinear>
struct UnitAddresses {
  char* base;  ///< the token's first head, or, where units are linear, the first unit
  int64_t step;

  FLASHBSR_DEVICE char* at(const AppendRows& r, int32_t first, int32_t i, int64_t stride_head,
                           DType t) const {
    if constexpr (kLinear) return base + i * step;
    return base + unit_offset(r, first + 32 * i, stride_head, t);
  }
};

template <bool kLinear>
FLASHBSR_DEVICE UnitAddresses<kLinear> source_of(const AppendRows& r, int32_t first,
                                                 int64_t token) {
  const int64_t skip = kLinear ? unit_offset(r, first, r.in.stride_head, r.in.dtype) : 0;
  return {r.in.row(token, 0) + skip, r.in_step};
}

template <bool kLinear>
FLASHBSR_DEVICE UnitAddresses<kLinear> target_of(const AppendRows& r, int32_t first,
                                                 const Slot& slot) {
  const int64_t skip = kLinear ? unit_offset(r, first, r.cache.stride_head, r.cache.dtype) : 0;
  return {r.cache.row(slot.page, slot.token, 0) + skip, r.cache_step};
}

/// Bits as they are. `Bits`: an unsigned type of the unit's width. `first`: this lane's first unit.
template <class Bits, bool kLinear>
FLASHBSR_DEVICE void copy_item(const AppendArgs& a, const AppendRows& r, int64_t token,
                               int32_t first) {
  Bits bits[kUnitsInFlight];
  const auto in = source_of<kLinear>(r, first, token);
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    if (first + 32 * i >= r.units) continue;
    bits[i] = *reinterpret_cast<const Bits*>(in.at(r, first, i, r.in.stride_head, r.in.dtype));
  }
  const Slot slot = find_slot(a.slots, token);
  if (!slot.valid) return;
  const auto out = target_of<kLinear>(r, first, slot);
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    if (first + 32 * i >= r.units) continue;
    *reinterpret_cast<Bits*>(out.at(r, first, i, r.cache.stride_head, r.cache.dtype)) = bits[i];
  }
}

template <int kArch, bool kLinear>
FLASHBSR_DEVICE void convert_item(const AppendArgs& a, const AppendRows& r, int64_t token,
                                  int32_t first) {
  const auto in = source_of<kLinear>(r, first, token);
  if (r.unit == 1) {
    const Slot slot = find_slot(a.slots, token);
    if (!slot.valid) return;
    const auto out = target_of<kLinear>(r, first, slot);
    for (int32_t i = 0; i < kUnitsInFlight && first + 32 * i < r.units; ++i) {
      const char* from = in.at(r, first, i, r.in.stride_head, r.in.dtype);
      store_from_float(out.at(r, first, i, r.cache.stride_head, r.cache.dtype), 0, r.cache.dtype,
                       load_as_float(from, 0, r.in.dtype) * r.inverse_scale);
    }
    return;
  }
  Unit units[kUnitsInFlight];
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    if (first + 32 * i >= r.units) continue;
    units[i] = load_unit(in.at(r, first, i, r.in.stride_head, r.in.dtype), r.in.dtype);
  }
  const Slot slot = find_slot(a.slots, token);
  if (!slot.valid) return;
  const auto out = target_of<kLinear>(r, first, slot);
#pragma unroll
  for (int i = 0; i < kUnitsInFlight; ++i) {
    if (first + 32 * i >= r.units) continue;
    store_unit(out.at(r, first, i, r.cache.stride_head, r.cache.dtype), r.cache.dtype,
               convert<kArch>(units[i], r.in.dtype, r.cache.dtype, r.inverse_scale));
  }
}

/// Items of a grid, a warp each: those of K, then those of V, so that the grid reads and writes one
/// stream at a time. `body(rows of K or V, token, first unit of this lane)`.
/// @tparam kInFlight  units of a lane in an item
template <int kInFlight, class Args, class Body>
FLASHBSR_DEVICE void for_each_item(const Args& a, const Body& body) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t k_items = a.tokens * static_cast<int32_t>(a.k.parts.divisor);
  const int32_t items = k_items + a.tokens * static_cast<int32_t>(a.v.parts.divisor);
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (; item < items; item += stride) {
    const bool is_v = item >= k_items;
    const auto& r = is_v ? a.v : a.k;
    const int32_t of_rows = is_v ? item - k_items : item;
    const int32_t t = r.parts.quotient(of_rows);
    body(r, a.first_token + t, r.parts.remainder(of_rows, t) * kInFlight * 32 + lane);
  }
}

template <bool kLinear>
FLASHBSR_DEVICE void copy_item_of(const AppendArgs& a, const AppendRows& r, int64_t token,
                                  int32_t first) {
  switch (r.copy_bytes) {
    case 16: copy_item<uint4, kLinear>(a, r, token, first); break;
    case 8: copy_item<uint2, kLinear>(a, r, token, first); break;
    case 4: copy_item<uint32_t, kLinear>(a, r, token, first); break;
    case 2: copy_item<uint16_t, kLinear>(a, r, token, first); break;
    default: copy_item<uint8_t, kLinear>(a, r, token, first); break;
  }
}

/// Its blocks come to their places while the kernel before it ends: launched so (op_launch.cpp).
template <int kArch>
FLASHBSR_DEVICE void append_paged_kv(const AppendArgs& a) {
  ptx::wait_for_prerequisites<kArch>();
  ptx::launch_dependents<kArch>();
  for_each_item<kUnitsInFlight>(a, [&](const AppendRows& r, int64_t token, int32_t first) {
    if (r.linear) {
      copy_item_of<true>(a, r, token, first);
    } else {
      copy_item_of<false>(a, r, token, first);
    }
  });
}

template <int kArch>
FLASHBSR_DEVICE void append_paged_kv_convert(const AppendArgs& a) {
  for_each_item<kUnitsInFlight>(a, [&](const AppendRows& r, int64_t token, int32_t first) {
    if (r.linear) {
      convert_item<kArch, true>(a, r, token, first);
    } else {
      convert_item<kArch, false>(a, r, token, first);
    }
  });
}

}  // namespace flashbsr::ops
