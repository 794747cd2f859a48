// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of K that kernels do not read where they lie: of two arrays, and latents packed in 656
// bytes. They are put side by side first, a KV tile at a time.
#pragma once

#include <flashbsr/core/latent_row.h>
#include <flashbsr/cpu/loader.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// K as it is after join_keys(). Packed latents become words, rounded once where those are bf16.
template <class Op>
FLASHBSR_FN PagedView joined_keys(const Params& p) {
  PagedView k = p.k;
  k.dim += p.k_tail.dim;
  if (has_packed_latents(p)) k.dtype = kWordType<Op>;
  return k;
}
/// V likewise: of packed latents the joined rows.
template <class Op>
FLASHBSR_FN PagedView joined_values(const Params& p) {
  PagedView v = p.v;
  if (has_packed_latents(p)) v.dtype = kWordType<Op>;
  return v;
}
/// Bytes of its memory; 0: K lies in one array.
FLASHBSR_FN int64_t joined_bytes(const Params& p) {
  if (p.k_tail.dim == 0) return 0;
  const int64_t size = has_packed_latents(p) ? 4 : dtype_size(p.k.dtype);
  return round_up<int64_t>(int64_t{kKvTile} * (p.k.dim + p.k_tail.dim) * size, 64);
}

/// A packed row as words: codes times their scales, and the rotated keys.
template <class Op>
FLASHBSR_FN void unpack_latent(const char* row, char* words) {
  using Row = PackedLatent;
  float x[Row::kDim + Row::kTailDim];
  row_to_float<DType::kE4M3>(row, x, Row::kDim);
  for (int g = 0; g < Row::kDim / Row::kGroupDims; ++g) {
    const float scale = bits_float(load<uint32_t>(row + Row::kScaleOffset + 4 * g));
    for (int d = g * Row::kGroupDims; d < (g + 1) * Row::kGroupDims; d += kLanes) {
      store(x + d, load(x + d) * scale);
    }
  }
  row_to_float<DType::kBF16>(row + Row::kTailOffset, x + Row::kDim, Row::kTailDim);
  static_assert((Row::kDim + Row::kTailDim) % (2 * kLanes) == 0);  // nothing to pad
  words_from_float<Op>(x, Row::kDim + Row::kTailDim, words);
}

/// Puts both parts of each row side by side; the tile has those then.
/// @param joined  [kKvTile][D_qk] elements
template <class Op>
FLASHBSR_FN void join_keys(const Params& p, const PlanView& plan, const Request& request,
                           int32_t kv_head, KvTile& tile, char* joined) {
  const bool paged = plan.header().flags & kPlanPaged, packed = has_packed_latents(p);
  const int32_t page_size = plan.header().page_size;
  const int32_t* pages = plan.kv_indices() + request.kv_begin;
  const PagedView keys = joined_keys<Op>(p);
  const size_t head = static_cast<size_t>(p.k.dim) * dtype_size(p.k.dtype);
  const size_t rest = static_cast<size_t>(p.k_tail.dim) * dtype_size(p.k_tail.dtype);
  for (int i = 0; i < tile.count; ++i, joined += row_bytes(keys.dtype, keys.dim)) {
    if (packed) {
      unpack_latent<Op>(tile.k[i], joined);
      tile.v[i] = joined;
    } else {
      const int32_t at = tile.begin + i;
      const char* tail = paged ? p.k_tail.row(pages[at / page_size], at % page_size, kv_head)
                               : p.k_tail.row(request.kv_begin + at, 0, kv_head);
      std::memcpy(joined, tile.k[i], head);
      std::memcpy(joined + head, tail, rest);
    }
    tile.k[i] = joined;
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
