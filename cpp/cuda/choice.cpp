// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "choice.h"
#include <cstdlib>

namespace flashbsr::cuda {

namespace {

struct Tile {
  const char* family;
  int rows;
};

/// By the rows that they hold.
constexpr Tile kTiles[] = {{"decode", 8},   {"decode", 16},  {"hopper", 128},
                           {"hopper", 192}, {"prefill", 64}, {"prefill", 128}};
constexpr int kNumTiles = sizeof(kTiles) / sizeof(kTiles[0]);

/// What the table says of a hopper kernel's types: one of Q each.
const char* kv_column(const Need& need) {
  if (need.q == need.kv) return kv_name(need.kv);
  if (need.kv != DType::kE4M3) return "none";
  return need.q == DType::kF16 ? "f16xe4m3" : "bf16xe4m3";
}

const KernelRow* try_tile(const Tile& tile, const Need& need, const DeviceInfo& device) {
  const std::string_view family = tile.family;
  const bool hopper = family == "hopper";
  if (need.rotates && family != "prefill") return nullptr;
  if (need.family == (hopper ? api::Family::kFa2 : api::Family::kFa3)) return nullptr;
  if (hopper && getenv("DEV_ROWS") && atoi(getenv("DEV_ROWS")) != tile.rows && need.head_dim_qk <= 128 && !need.hooks) return nullptr;
  if (hopper && need.group > tile.rows && need.group % tile.rows) return nullptr;
  if (!hopper && need.q == DType::kE4M3) return nullptr;
  // "standard" does what "plain" does, in more registers.
  const char* softmax[] = {"plain", "standard"};
  const char* sigmoid[] = {"sigmoid"};
  const std::span<const char* const> variants =
      need.sigmoid ? std::span<const char* const>(sigmoid)
                   : std::span<const char* const>(softmax).subspan(need.hooks ? 1 : 0);
  for (const char* variant : variants) {
    const KernelRow* row = try_find({.family = tile.family,
                                     .head_dim = need.head_dim_qk,
                                     .head_dim_vo = need.head_dim_vo,
                                     .kv = hopper ? kv_column(need) : kv_name(need.kv),
                                     .rows = tile.rows,
                                     .variant = variant},
                                    device.cc);
    if (row && row->shape.smem_bytes <= device.max_smem_per_block) return row;
  }
  return nullptr;
}

/// The smallest that holds the rows.
int wanted_tile(const Need& need) {
  int wanted = 0;
  while (wanted + 1 < kNumTiles && need.rows > kTiles[wanted].rows) ++wanted;
  return wanted;
}

}  // namespace

const KernelRow* try_choose_kernel(const Need& need, const DeviceInfo& device) {
  const int wanted = wanted_tile(need);
  for (int i = wanted; i < kNumTiles; ++i) {
    if (const KernelRow* row = try_tile(kTiles[i], need, device)) return row;
  }
  for (int i = wanted - 1; i >= 0; --i) {
    if (const KernelRow* row = try_tile(kTiles[i], need, device)) return row;
  }
  return nullptr;
}

const KernelRow& choose_kernel(const Need& need, const DeviceInfo& device) {
  if (const KernelRow* row = try_choose_kernel(need, device)) return *row;
  const int wanted = wanted_tile(need);
  return find({.family = kTiles[wanted].family,
               .head_dim = need.head_dim_qk,
               .head_dim_vo = need.head_dim_vo,
               .kv = kv_name(need.kv),
               .rows = kTiles[wanted].rows,
               .variant = need.sigmoid ? "sigmoid"
                          : need.hooks ? "standard"
                                       : "plain"},
              device.cc);
}

}  // namespace flashbsr::cuda
