// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "choice.h"

#include <array>
#include <ranges>
#include <span>
#include <string_view>

#include <flashbsr/core/error.h>

#include "jit.h"

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
/// Products of e4m3 whose sums may be long; of head dims above 64, which have shorter kernels.
constexpr Tile kFastTile = {"hopper_fast", 192};
constexpr int kFastFrom = 64;
/// Codes with scales of every token, Hopper's in float32 alone. What has no kernel of more rows
/// takes several tiles of few.
constexpr Tile kFewScaledTile = {"decode_scaled", 8};
constexpr Tile kScaledTiles[] = {{kPairsFamily.data(), 8}, {kPairsGatherFamily.data(), 8},
                                 kFewScaledTile,           {"hopper_scaled", 192},
                                 {"hopper_scaled", 128},   {"prefill_scaled", 64},
                                 {"prefill_scaled", 128}};
/// Such codes in 16 bits, whose halves have scales of their own.
constexpr Tile kHalvesTiles[] = {{"hopper_halves", 192}, {"hopper_halves", 128}};
/// V is a part of K: families of their own. Of Hopper for caches of Q's type, of e4m3, and of rows
/// with scales. Of the others' tiles the smallest that holds a request's rows, or the largest that
/// the device has room for: 64 rows and two tiles of K are 158 KB. Of codes they have 16 rows.
constexpr Tile kLatentTile = {"latent", 64}, kLatentCodeTile = {"latent_codes", 64},
               kPackedLatentTile = {"latent_packed", 64};
/// Of codes, and few rows.
constexpr Tile kFewTile = {"latent_few", 16}, kFewPackedTile = {"latent_few_packed", 16};
constexpr Tile kLatentMmaTiles[] = {{"latent_mma", 16}, {"latent_mma", 32}, {"latent_mma", 64}};
constexpr Tile kLatentMmaCodes[] = {{"latent_mma", 16}};
constexpr Tile kLatentMmaPacked[] = {{"latent_mma_packed", 16}};

/// K and V in codes of two types have a template, and no row of the build.
constexpr Tile kTwoTypesTile = {"prefill_scaled", 64};
constexpr bool serves_two_types(const Tile& tile) {
  return tile.family == kTwoTypesTile.family && tile.rows == kTwoTypesTile.rows;
}

/// What the table says of a hopper kernel's types: one of Q each.
const char* kv_column(const Need& need) {
  if (need.q == need.kv) return kv_name(need.kv);
  const bool half = need.q == DType::kF16;
  if (need.kv == DType::kE4M3) return half ? "f16xe4m3" : "bf16xe4m3";
  if (need.kv == DType::kI8) return half ? "f16xi8" : "bf16xi8";
  return "none";
}

/// RoPE inside attention: of the kernels with hooks, not on padded head dims; only prefill kernels
/// widen bytes before they rotate, and have the registers for head dim 512.
bool can_rotate(const Tile& tile, const Need& need) {
  if (tile.family[0] == 'p') return !is_packed(need.kv);
  return need.q == need.kv && dtype_size(need.kv) == 2 && need.head_dim_qk <= 256;
}

/// What the table may have for a computation, the best first: "standard" does what others do, in
/// more registers and instructions. Sigmoids are compiled when they are first used.
std::array<const char*, 2> variants_for(const Need& need) {
  if (need.sigmoid) return {};
  if (!need.hooks()) return {"plain", "standard"};
  const bool one = need.soft_cap + need.alibi + need.rotates + need.masked == 1;
  if (one && need.soft_cap) return {"soft_cap", "standard"};
  if (one && need.alibi) return {"alibi", "standard"};
  return {"standard"};
}

/// As kernels that are compiled at run time are called.
const char* variant_name(const Need& need) {
  return need.sigmoid ? "sigmoid" : need.hooks() ? "standard" : "plain";
}

/// Whether a sigmoid without hooks has a kernel that asks for no others: where it is faster.
bool sigmoid_alone(const Tile& tile, const Need& need) {
  if (!need.sigmoid || need.hooks() || dtype_size(need.kv) != 2) return false;
  return tile.family[0] == 'd' || (tile.family[0] == 'h' && need.head_dim_qk <= 128);
}

enum class Source { kBuild, kProvider };

/// Whether the row has the shared memory and turns q and k as RoPE asks.
bool serves(const KernelRow& row, const Need& need, const DeviceInfo& device) {
  if (row.shape.smem_bytes > device.max_smem_per_block) return false;
  // A box of two heads has no padding between them.
  const bool fits = need.head_dim_qk == row.head_dim && need.head_dim_vo == row.head_dim;
  if (takes_pair_boxes(row) && !fits) return false;
  // Padding moves the halves of a head apart. Another family may have the head dim itself.
  return !need.rotates || row.family[0] == 'p' || row.head_dim == need.head_dim_qk;
}

/// Hopper's kernels for latents of codes, whose rows come one by one.
bool is_hopper_codes(const Tile& tile) {
  return tile.family == kLatentCodeTile.family || tile.family == kPackedLatentTile.family ||
         tile.family == kFewTile.family || tile.family == kFewPackedTile.family;
}

/// What the table says of a row's types: of some families that of Q, too, where it is another.
std::string types_of(const Tile& tile, const Need& need) {
  const bool both = tile.family[0] == 'h' || is_hopper_codes(tile);
  if (need.v != need.kv) return std::string(kv_name(need.kv)) + "_" + kv_name(need.v);
  return both ? kv_column(need) : kv_name(need.kv);
}

/// The row of the table: of those that serve the first of the least head dim.
const KernelRow* try_build(const Tile& tile, const Need& need, const DeviceInfo& device) {
  const std::string types = types_of(tile, need);
  const KernelRow* best = nullptr;
  for (const char* variant : variants_for(need)) {
    if (!variant) continue;
    const KernelRow* row = try_find({.family = tile.family,
                                     .head_dim = need.head_dim_qk,
                                     .head_dim_vo = need.head_dim_vo,
                                     .kv = types.c_str(),
                                     .rows = tile.rows,
                                     .variant = variant},
                                    device.cc);
    if (!row || !serves(*row, need, device)) continue;
    if (!row->image && !need.provider) continue;
    if (!best || row->head_dim < best->head_dim) best = row;
  }
  return best && !best->image ? rare_row(*best, device.cc, need.provider) : best;
}

/// A row that is compiled when it is first used.
const KernelRow* try_provider(const Tile& tile, const Need& need, const DeviceInfo& device) {
  const bool hopper = tile.family[0] == 'h', custom = need.variant;
  const bool by_rows = hopper ? need.gathers : is_hopper_codes(tile);
  const std::string types = types_of(tile, need);
  const JitQuery query{.shape = {.family = tile.family,
                                 .head_dim = need.head_dim_qk,
                                 .head_dim_vo = need.head_dim_vo,
                                 .q = need.q,
                                 .kv = need.kv,
                                 .v = need.v,
                                 .rows = tile.rows,
                                 .hooks = custom || need.sigmoid || need.hooks(),
                                 .custom = custom,
                                 .row_hooks = need.row_hooks},
                       .kv = types.c_str(),
                       .variant = custom                      ? need.variant->c_str()
                                  : sigmoid_alone(tile, need) ? "sigmoid_alone"
                                                              : variant_name(need),
                       .masked = need.masked,
                       .copies = by_rows  ? KvCopies::kRows
                                 : hopper ? KvCopies::kBoxes
                                          : KvCopies::kEither};
  const KernelRow* row = try_jit_row(query, device.cc, need.provider);
  return row && serves(*row, need, device) ? row : nullptr;
}

const KernelRow* try_tile(Source source, const Tile& tile, const Need& need,
                          const DeviceInfo& device) {
  const bool hopper = tile.family[0] == 'h' || need.mixed_rows > 0;
  // How many keys of a share a query sees all kernels know, but where these are only those that
  // stream.
  if (need.places && tile.family[0] != 'd') return nullptr;
  if (tile.family == kPairsFamily && (!need.pairs || need.gathers)) return nullptr;
  if (tile.family == kPairsGatherFamily && !need.pairs) return nullptr;
  if (need.v != need.kv && !serves_two_types(tile)) return nullptr;
  if (need.rotates && !can_rotate(tile, need)) return nullptr;
  if (hopper && need.half_scales) return nullptr;
  if (need.family == (hopper ? api::Family::kFa2 : api::Family::kFa3)) return nullptr;
  if (hopper && need.group > tile.rows && need.group % tile.rows) return nullptr;
  if (!hopper && need.q == DType::kE4M3) return nullptr;
  return source == Source::kBuild ? try_build(tile, need, device)
                                  : try_provider(tile, need, device);
}

/// Whether a tile holds all rows of a request, on average. Hopper's holds any number: its
/// warpgroups without rows only pass over tiles.
bool holds(const Tile& tile, const Need& need) {
  return tile.family[0] == 'h' || need.rows <= tile.rows;
}

/// Rows of a latent kernel hold these dims and no others: the tail of Q is a column of its own.
const KernelRow* try_latent_tile(Source source, const Tile& tile, const Need& need,
                                 const DeviceInfo& device) {
  const KernelRow* row =
      source == Source::kBuild ? try_build(tile, need, device) : try_provider(tile, need, device);
  const bool same =
      row && row->head_dim == need.head_dim_qk && row->head_dim_vo == need.head_dim_vo;
  return same ? row : nullptr;
}

const KernelRow* try_latent(Source source, const Need& need, const DeviceInfo& device) {
  if (need.sigmoid || need.rotates || need.places || need.variant) return nullptr;
  const bool codes = need.scaled || need.q != need.kv;
  const Tile& wide = need.scaled ? kPackedLatentTile : codes ? kLatentCodeTile : kLatentTile;
  const Tile& few = need.scaled ? kFewPackedTile : kFewTile;
  const auto try_hopper = [&](const Tile& tile) -> const KernelRow* {
    const bool whole = need.group <= tile.rows || need.group % tile.rows == 0;
    if (need.family == api::Family::kFa2 || !whole) return nullptr;
    return try_latent_tile(source, tile, need, device);
  };
  const auto try_mma = [&]() -> const KernelRow* {
    if (need.family == api::Family::kFa3) return nullptr;
    const std::span<const Tile> tiles = need.scaled ? std::span<const Tile>(kLatentMmaPacked)
                                        : codes     ? std::span<const Tile>(kLatentMmaCodes)
                                                    : std::span<const Tile>(kLatentMmaTiles);
    const KernelRow* largest = nullptr;
    for (const Tile& tile : tiles) {
      if (need.tile_rows > 0 && need.tile_rows != tile.rows) continue;
      const KernelRow* row = try_latent_tile(source, tile, need, device);
      if (row) largest = row;
      if (row && (holds(tile, need) || need.tile_rows > 0)) break;
    }
    return largest;
  };
  // Codes of few rows: Hopper's kernel of 64 is as long about 16 as about 128. That of 16 is for Q
  // of bf16 without hooks, and of the build; mma.sync's does the others. It is asked for by its
  // rows where requests are few and short, whatever the cache is.
  const bool few_rows = codes && need.rows <= few.rows;
  const bool asked = need.tile_rows == few.rows || (few_rows && need.tile_rows == 0);
  if (asked && source == Source::kBuild && need.q == DType::kBF16 && !need.hooks()) {
    if (const KernelRow* row = try_hopper(few)) return row;
  }
  const KernelRow* row = few_rows ? try_mma() : try_hopper(wide);
  return row ? row : few_rows ? try_hopper(wide) : try_mma();
}

/// What to name where there is no kernel.
KernelQuery nearest_query(const Need& need) {
  const bool fa3 = need.family == api::Family::kFa3 || need.q == DType::kE4M3;
  if (need.scaled) {
    return {.family = kFewScaledTile.family,
            .head_dim = need.head_dim_qk,
            .head_dim_vo = need.head_dim_vo,
            .kv = kv_name(need.kv),
            .rows = kFewScaledTile.rows,
            .variant = variant_name(need)};
  }
  return {.family = fa3 ? "hopper" : "prefill",
          .head_dim = need.head_dim_qk,
          .head_dim_vo = need.head_dim_vo,
          .kv = kv_name(need.kv),
          .rows = fa3 ? 192 : 64,
          .variant = variant_name(need)};
}

/// Codes that no kernel reads, in this build or another.
[[noreturn]] void refuse_codes(const Need& need, const DeviceInfo& device) {
  throw Error(ErrorCode::kUnsupported, "kv_dtype",
              std::string(dtype_name(need.kv)) + " and " + dtype_name(need.v) +
                  " codes, head_dim " + std::to_string(need.head_dim_qk) + " and " +
                  std::to_string(need.head_dim_vo) + " of v on sm_" + std::to_string(device.cc),
              "head dims up to 128 on a GPU, and K and V of one type on compute capability 7.5; "
              "backend='cpu' has all");
}

const KernelRow* try_source(Source source, const Need& need, const DeviceInfo& device) {
  if (need.latent) return try_latent(source, need, device);
  if (source == Source::kBuild && need.fast_sums && need.head_dim_qk > kFastFrom && !need.scaled) {
    if (const KernelRow* row = try_tile(source, kFastTile, need, device)) return row;
  }
  const std::span<const Tile> tiles = need.halves   ? std::span<const Tile>(kHalvesTiles)
                                      : need.scaled ? std::span<const Tile>(kScaledTiles)
                                                    : std::span<const Tile>(kTiles);
  for (const Tile& tile : tiles) {
    if (need.tile_rows > 0 ? need.tile_rows != tile.rows : !holds(tile, need)) continue;
    if (const KernelRow* row = try_tile(source, tile, need, device)) return row;
  }
  if (need.tile_rows > 0) return nullptr;
  // None holds them: the largest there is, of which a request takes several.
  for (const Tile& tile : tiles | std::views::reverse) {
    if (const KernelRow* row = try_tile(source, tile, need, device)) return row;
  }
  return nullptr;
}

}  // namespace

Need need_of(const api::AttentionOptions& o, const api::Batch& batch, DType q, double rows) {
  return {.head_dim_qk = o.head_dim_qk,
          .head_dim_vo = o.head_dim_vo,
          .q = q,
          .kv = batch.kv,
          .v = batch.v,
          .soft_cap = o.soft_cap > 0,
          .alibi = o.position == Position::kAlibi,
          .rotates = o.position == Position::kRopeLlama,
          .masked = batch.masked,
          .scaled = batch.scaled,
          .latent = o.latent,
          .places = batch.places,
          .sigmoid = o.activation == Activation::kSigmoid,
          .rows = rows,
          .group = o.shape.num_qo_heads / o.shape.num_kv_heads,
          .family = o.family,
          .row_hooks = o.row_hooks,
          .fast_sums = o.fast_fp8,
          .tile_rows = batch.tile_rows,
          .mixed_rows = batch.mixed_rows,
          .provider = o.provider};
}

bool pay_together(const api::AttentionOptions& options, const api::Batch& batch, double rows,
                  int sms) {
  const int64_t heads = options.shape.num_kv_heads, group = options.shape.num_qo_heads / heads;
  const bool whole = heads % 2 == 0 && kNarrowRows % (2 * group) == 0 && 2 * rows <= kNarrowRows;
  if (!batch.scaled || !is_packed(batch.kv) || batch.per_head || !whole) return false;
  // Fixed splits promise that a request's bits do not depend on its batch: nor may the kernel.
  if (options.split.fixed_size > 0) return !options.hnd;
  if (batch.requests * heads / 2 >= sms) return true;
  // With fewer pairs than SMs there are merges, which take 2.5 us. A token of a head takes 1.2 ns
  // less, and 0.3 where heads lie apart.
  const int64_t worth_a_merge = options.hnd ? 9000 : 2000;  // tokens of a head, for each SM
  if (!batch.lengths) return !options.hnd;
  int64_t tokens = 0;
  for (const Request& r : *batch.lengths) tokens += r.kv_len;
  return tokens * heads >= worth_a_merge * sms;
}

const KernelRow* try_choose_kernel(const Need& need, const DeviceInfo& device) {
  if (need.mixed_rows > 0) {
    const bool plain =
        !need.variant && !need.hooks() && !need.sigmoid && !need.latent && need.q == need.kv;
    if (!plain || need.group > kNarrowRows) return nullptr;
    const char* family = need.gathers ? "mixed_gather" : "mixed";
    return try_tile(Source::kBuild, {family, need.mixed_rows}, need, device);
  }
  const KernelRow* row = need.variant ? nullptr : try_source(Source::kBuild, need, device);
  if (row || !need.provider || need.tile_rows > 0) return row;
  return try_source(Source::kProvider, need, device);
}

const KernelRow& choose_kernel(const Need& need, const DeviceInfo& device) {
  if (const KernelRow* row = try_choose_kernel(need, device)) return *row;
  if (need.family == api::Family::kFa3 && need.rotates) {
    throw Error(
        ErrorCode::kUnsupported, "pos_encoding_mode", "'ROPE_LLAMA' with backend='fa3'",
        "it with 16-bit q and KV and head dims of 64, 128 or 256; backend='auto' or 'fa2'; or "
        "rotate q and k with apply_rope first");
  }
  if (need.places && !need.variant) {
    throw Error(ErrorCode::kUnsupported, "context_parallel",
                "an encoding of positions over a share of the keys, head_dim " +
                    std::to_string(need.head_dim_qk) + ", q " + dtype_name(need.q) + ", KV " +
                    dtype_name(need.kv) + (need.latent ? ", latent" : "") + " on sm_" +
                    std::to_string(device.cc),
                "on a GPU what kernels of family 'decode' do; keys that are rotated when they are "
                "cached (rope_append_paged_kv_cache); backend='cpu'");
  }
  if (need.latent) {
    throw Error(ErrorCode::kUnsupported, "latent",
                "head_dim_qk " + std::to_string(need.head_dim_qk) + ", head_dim_vo " +
                    std::to_string(need.head_dim_vo) + ", " + std::to_string(need.group) +
                    " heads, q " + dtype_name(need.q) + ", KV " + dtype_name(need.kv) + " on sm_" +
                    std::to_string(device.cc),
                "on a GPU head_dim_vo 512, 384, 320 or 256 and head_dim_qk the same or 64 more, "
                "16-bit q, softmax without RoPE, a variant of the library, KV of q's type or "
                "float8_e4m3fn (576 and 512), compute capability 8.0 or later (backend='fa3': 9.0, "
                "576 and 512, heads up to 64 or a multiple of 64); backend='cpu' runs every one");
  }
  if (need.variant) {
    throw Error(ErrorCode::kUnsupported, "variant",
                *need.variant + ", head_dim " + std::to_string(need.head_dim_qk) + " and " +
                    std::to_string(need.head_dim_vo) + " of v, q " + dtype_name(need.q) + ", KV " +
                    dtype_name(need.kv) + " on sm_" + std::to_string(device.cc),
                need.row_hooks
                    ? "16-bit K and V, compute capability 8.0 or later and backend='auto' or 'fa2' "
                      "for hooks of whole rows; backend='cpu' runs every variant"
                    : "compute capability 8.0 or later (7.5: float16), 9.0 for backend='fa3' and "
                      "float8 queries; backend='cpu' runs every variant");
  }
  if (need.scaled && max_of(need.head_dim_qk, need.head_dim_vo) > 128) refuse_codes(need, device);
  if (need.scaled && need.v != need.kv) refuse_codes(need, device);
  return find(nearest_query(need), device.cc);
}

void check_rotation(const api::AttentionOptions& o, const KernelRow& row, api::Place place) {
  if (o.position == Position::kRopeLlama && row.head_dim != o.head_dim_qk) {
    throw Error(ErrorCode::kUnsupported, "pos_encoding_mode",
                "'ROPE_LLAMA' with head_dim_qk=" + std::to_string(o.head_dim_qk) + " on " +
                    place_text(place),
                "head_dim_qk of 64, 128, 256 or 512, not below head_dim_vo; or rotate q and k with "
                "apply_rope first");
  }
  // Pairs are groups of 16 dims apart: a step of the matrix instructions.
  if (o.position == Position::kRopeLlama && !o.rope.interleave && o.rope.rotary_dim % 32) {
    throw Error(ErrorCode::kUnsupported, "rotary_dim",
                std::to_string(o.rope.rotary_dim) + " on " + place_text(place),
                "a multiple of 32 there without rope_interleave; or apply_rope first");
  }
}

}  // namespace flashbsr::cuda
