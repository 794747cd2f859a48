// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "choice.h"

#include <array>
#include <iterator>
#include <string_view>

#include <flashbsr/core/error.h>

namespace flashbsr::cuda {

namespace {

struct Tile {
  const char* family;
  int rows;
};

/// In the order of preference among those that hold the rows; on an H200, 32/8 heads, head dim 128
/// (docs/kernels/sm90a.md has the table): decode reads 16 x 4096 tokens for 16 rows in 67 us,
/// Hopper in 72; from 17 rows on Hopper's 192 rows are the fastest whatever the number, and 128
/// rows serve where 192 have no room.
constexpr Tile kTiles[] = {{"decode", 8},   {"decode", 16},  {"hopper", 192},
                           {"hopper", 128}, {"prefill", 64}, {"prefill", 128}};

/// What the table says of a hopper kernel's types: one of Q each.
const char* kv_column(const Need& need) {
  if (need.q == need.kv) return kv_name(need.kv);
  if (need.kv != DType::kE4M3) return "none";
  return need.q == DType::kF16 ? "f16xe4m3" : "bf16xe4m3";
}

/// RoPE inside attention: of the kernels with hooks, not on padded head dims, on Hopper of 16-bit
/// K.
bool can_rotate(const Tile& tile, const Need& need) {
  const std::string_view family = tile.family;
  if (family == "hopper") return need.q == need.kv && dtype_size(need.kv) == 2;
  return family == "prefill";
}

/// What the table may have for a computation, the best first: "standard" does what others do, in
/// more registers and instructions.
std::array<const char*, 2> variants_for(const Need& need) {
  if (need.sigmoid) return {"sigmoid"};
  if (!need.hooks()) return {"plain", "standard"};
  const bool one = need.soft_cap + need.alibi + need.rotates + need.masked == 1;
  if (one && need.soft_cap) return {"soft_cap", "standard"};
  if (one && need.alibi) return {"alibi", "standard"};
  return {"standard"};
}

const KernelRow* try_tile(const Tile& tile, const Need& need, const DeviceInfo& device) {
  const std::string_view family = tile.family;
  const bool hopper = family == "hopper";
  if (need.rotates && !can_rotate(tile, need)) return nullptr;
  if (need.family == (hopper ? api::Family::kFa2 : api::Family::kFa3)) return nullptr;
  if (hopper && need.group > tile.rows && need.group % tile.rows) return nullptr;
  if (!hopper && need.q == DType::kE4M3) return nullptr;
  for (const char* variant : variants_for(need)) {
    if (!variant) continue;
    const KernelRow* row = try_find({.family = tile.family,
                                     .head_dim = need.head_dim_qk,
                                     .head_dim_vo = need.head_dim_vo,
                                     .kv = hopper ? kv_column(need) : kv_name(need.kv),
                                     .rows = tile.rows,
                                     .variant = variant},
                                    device.cc);
    if (!row || row->shape.smem_bytes > device.max_smem_per_block) continue;
    // Another family may have the head dim itself.
    if (hopper && need.rotates && row->head_dim != need.head_dim_qk) continue;
    return row;
  }
  return nullptr;
}

/// Whether a tile holds all rows of a request, on average. Hopper's holds any number: its
/// warpgroups without rows only pass over tiles.
bool holds(const Tile& tile, const Need& need) {
  return tile.family[0] == 'h' || need.rows <= tile.rows;
}

/// What to name where there is no kernel.
KernelQuery nearest_query(const Need& need) {
  const bool fa3 = need.family == api::Family::kFa3 || need.q == DType::kE4M3;
  return {.family = fa3 ? "hopper" : "prefill",
          .head_dim = need.head_dim_qk,
          .head_dim_vo = need.head_dim_vo,
          .kv = kv_name(need.kv),
          .rows = fa3 ? 192 : 64,
          .variant = need.sigmoid   ? "sigmoid"
                     : need.hooks() ? "standard"
                                    : "plain"};
}

}  // namespace

const KernelRow* try_choose_kernel(const Need& need, const DeviceInfo& device) {
  for (const Tile& tile : kTiles) {
    if (!holds(tile, need)) continue;
    if (const KernelRow* row = try_tile(tile, need, device)) return row;
  }
  // None holds them: the largest there is, of which a request takes several.
  for (size_t i = std::size(kTiles); i-- > 0;) {
    if (const KernelRow* row = try_tile(kTiles[i], need, device)) return row;
  }
  return nullptr;
}

const KernelRow& choose_kernel(const Need& need, const DeviceInfo& device) {
  if (const KernelRow* row = try_choose_kernel(need, device)) return *row;
  if (need.family == api::Family::kFa3 && need.rotates) {
    throw Error(
        ErrorCode::kUnsupported, "pos_encoding_mode", "'ROPE_LLAMA' with backend='fa3'",
        "it with 16-bit q and KV and head dims of 64, 128 or 256; backend='auto' or 'fa2'; or "
        "rotate q and k with apply_rope first");
  }
  return find(nearest_query(need), device.cc);
}

}  // namespace flashbsr::cuda
