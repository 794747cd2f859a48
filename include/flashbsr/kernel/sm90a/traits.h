// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernels' shapes: what their template parameters mean in threads, registers and bytes.
// Constants only, so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>
#include <flashbsr/kernel/decode/traits.h>

namespace flashbsr::sm90a {

/// What P V is multiplied in, where K and V have no scales of their own. V of e4m3 is widened to
/// fp16, whatever Q is, but in the kernel that is made for products of e4m3.
/// docs/kernels/sm90a_fp8.md.
constexpr DType hopper_weight_type(DType type, DType kv_type, int head_dim_qk, int head_dim_vo,
                                   int rows, bool hooks) {
  if (kv_type != DType::kE4M3) return type;
  const bool all_e4m3 = type == kv_type && head_dim_qk == 128 && head_dim_vo == 128;
  return all_e4m3 && rows == 192 && !hooks ? type : DType::kF16;
}

/// KV tokens of a tile: what registers and shared memory have room for. docs/kernels/sm90a.md.
FLASHBSR_FN constexpr int hopper_kv_tile(int head_dim_qk, int head_dim_vo, int rows, bool hooks,
                                         DType weight_type) {
  if (weight_type == DType::kE4M3) return 128;
  if (head_dim_vo > 128) return hooks ? 48 : 80;
  return rows == 192 && (head_dim_qk > 64 || hooks) ? 80 : 128;
}

/// @tparam head_dim_qk  64, 128, 192 or 256; smaller dims are padded with zeros in shared memory
/// @tparam head_dim_vo  64, 128 or 256
/// @tparam type         of Q
/// @tparam rows         packed rows of an item, 64 per consumer warpgroup
/// @tparam hooks        the variant has hooks, which need registers
/// @tparam kv_type      of K and V in memory: `type`, e4m3 or int8
/// @tparam weight_type  of P V
/// @tparam mixed        consumers may have narrow items before the wide ones (narrow.h)
/// @tparam summed_tiles products of e4m3: tiles that the tensor cores add up by themselves before
///                      fp32 does (long_sums.h); 0: one
/// @tparam scaled       K and V have scales of every token and head (token_scales.h): logits take
///                      K's, weights V's, which makes them of any size, and so bf16. With a
///                      `kv_type` of 16 bits K are codes that a pass before has widened
///                      (ops/dequantize_pages.h), and V are bf16 without scales
/// @tparam halves       the halves of a row of such K have scales of their own
template <int head_dim_qk, int head_dim_vo, DType type, int rows, bool hooks, DType kv_type = type,
          DType weight_type =
              hopper_weight_type(type, kv_type, head_dim_qk, head_dim_vo, rows, hooks),
          int kv_tile = hopper_kv_tile(head_dim_qk, head_dim_vo, rows, hooks, weight_type),
          bool mixed = false, int summed_tiles = 0, bool scaled = false, bool halves = false>
struct HopperTraits {
  static constexpr int kHeadDimQk = head_dim_qk;
  static constexpr int kHeadDimVo = head_dim_vo;
  static constexpr int kOutputDims = head_dim_vo;  ///< of a warpgroup's O
  static constexpr bool kLatent = false;           ///< V is a part of K (latent.h)
  static constexpr int kKeyParts = 1;              ///< of a tile of K, loaded and freed apart
  static constexpr bool kTurnsParts = false;       ///< those of odd tiles come from right to left
  static constexpr int kWideners = 0;              ///< warps that widen what memory has
  /// Q becomes two matrices of e4m3, whose sum it is (split_queries.h).
  static constexpr bool kSplitsQueries = type == DType::kBF16 && kv_type == DType::kE4M3;
  static constexpr DType kType = kSplitsQueries ? kv_type : type;  ///< of Q K^T
  static constexpr DType kKvType = kv_type;
  static constexpr DType kWeightType = weight_type;  ///< of P V
  static constexpr bool kTokenScales = scaled;
  static constexpr int kRowLoaders = 0, kRowWriters = 0;  ///< row_loader.h
  /// What a pass has widened: K's scales lie by tokens, V has none.
  static constexpr bool kPassed = scaled && dtype_size(kv_type) == 2;
  /// The halves of a row of K have scales of their own, `a` and 1 times `b`: S = (S_0 a + S_1) b.
  static constexpr bool kKeyHalves = halves;
  static_assert(!kPassed || kv_type == type);
  static_assert(!halves || kPassed);
  static_assert(scaled ? weight_type == DType::kBF16 : kv_type != DType::kI8);
  static constexpr DType kValueType = kPassed ? weight_type : kv_type;  ///< in memory
  /// What K and V are divided by where they are multiplied (ptx/codes.h).
  static constexpr float kKeyUnit = kv_type == DType::kI8 && kType == DType::kBF16 ? 64.0f : 1.0f;
  static constexpr float kValueUnit = kv_type == DType::kI8 ? 64.0f : 1.0f;
  /// What is not multiplied as it lies in memory: widened on its way (widen.h), or as V in products
  /// of e4m3, transposed (transpose.h).
  static constexpr bool kTransposesValues = weight_type == DType::kE4M3;
  static constexpr int kSummedTiles = summed_tiles;
  static constexpr bool kLongSums = summed_tiles > 0;
  static_assert(!kLongSums || kTransposesValues);
  /// A tile's sum of P V by itself, in the registers of S.
  static constexpr bool kSumsTiles = kTransposesValues && !kLongSums;
  static constexpr bool kPreparesKeys = kv_type != kType;
  static constexpr bool kPreparesValues = kValueType != weight_type || kTransposesValues;
  /// Whether the kernel can do RoPE (rotate.h): 16-bit K are rotated where they land.
  static constexpr bool kRotates =
      hooks && kv_type == type && dtype_size(type) == 2 && head_dim_qk == head_dim_vo;
  static constexpr int kRows = rows;
  static constexpr int kKvTile = kv_tile;

  // A producer warpgroup and the consumers. Registers of a thread: setmaxnreg hands out what the
  // launch got, threads x kLaunchRegisters, not the whole file.
  static constexpr int kConsumers = rows / 64;
  static constexpr bool kMixed = mixed;
  /// Warps that widen, of a warpgroup of their own: two consumers leave registers for it.
  static constexpr int kSideWideners = scaled && rows == 128 && kPreparesValues ? 4 : 0;
  static constexpr int kThreads = 128 * (kConsumers + 1) + 32 * kSideWideners;
  static constexpr int kBlocksPerSM = 1;
  static constexpr int kLaunchRegisters = kThreads == 512 ? 128 : 168;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kWidenerRegisters = 72;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kSideWideners ? 200 : 232;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters +
                    (kSideWideners ? kWidenerRegisters : 0) <=
                kThreads / 128 * kLaunchRegisters);

  // Tiles are kept as columns of 128 bytes, [column][row][128 bytes], 128-byte swizzle.
  static constexpr int kColumnDims = 128 / dtype_size(type);  ///< of Q
  static constexpr int kColumnsQk = ceil_div(head_dim_qk, kColumnDims);
  static constexpr int kColumnsK = ceil_div(head_dim_qk * dtype_size(kType), 128);
  static constexpr int kColumnsVo = head_dim_vo * dtype_size(weight_type) / 128;
  static constexpr int kQueryBytes = rows * kColumnsQk * 128;
  static constexpr int kKeyBytes = kv_tile * kColumnsK * 128;
  static constexpr int kValueBytes =
      kTransposesValues ? head_dim_vo * 128 : kv_tile * kColumnsVo * 128;
  static_assert(!kTransposesValues || kv_tile <= 128);
  /// As K and V are in memory: where copies land.
  static constexpr int kLandingDims = 128 / dtype_size(kv_type);
  static constexpr int kLandingColumnsQk = ceil_div(head_dim_qk, kLandingDims);
  static constexpr int kLandingColumnsVo = ceil_div(head_dim_vo, kLandingDims);
  static constexpr int kLandingKeyBytes = kv_tile * kLandingColumnsQk * 128;
  static constexpr int kLandingValueBytes = kv_tile * kLandingColumnsVo * 128;
  static constexpr int kLandingBytes =
      (kPreparesKeys ? kLandingKeyBytes : 0) + (kPreparesValues ? kLandingValueBytes : 0);
  /// Stages where they land: two, or 0: as many as there are of what is multiplied. What is read
  /// once, by two warps, is free again early.
  static constexpr int kOwnLandingStages = scaled && !kPassed ? 2 : 0;
  static constexpr int kStageBytes =
      kKeyBytes + kValueBytes + (kOwnLandingStages ? 0 : kLandingBytes);

  static constexpr int kSpanBytes = rows * 8;   ///< what every row of an item sees
  static constexpr int kTileRecordBytes = 128;  ///< sizeof(Tile)
  static constexpr int kTileSlots = 2;
  static constexpr int kBarrierBytes = kPreparesValues ? 384 : scaled ? 304 : 272;
  /// Of a tile's tokens: K's, then V's if they have some; or `a`, then `b`. As many as stages,
  /// three at most.
  static constexpr int kScaleBytes = !scaled ? 0 : (kPassed && !halves ? 1 : 2) * kv_tile * 4;
  /// Where rows are gathered from (places.h), of a tile of K or of V; its barriers.
  static constexpr int kPlaceBytes = kv_tile * 4, kPlaceBarrierBytes = 16;
  static constexpr int kRestBytes = kTileSlots * (kSpanBytes + kTileRecordBytes) + 3 * kScaleBytes +
                                    kBarrierBytes + kPlaceBytes + kPlaceBarrierBytes;

  /// What decodes. Each consumer has memory of its own for it, where Q, K and V of wide items are
  /// afterwards.
  using Narrow = DecodeTraits<90, head_dim_vo, kv_type, 8, 2, DecodeHost::kWarpgroup, scaled>;
  static constexpr int kNarrowBytes = mixed ? round_up(Narrow::kSmemBytes, 1024) : 0;

  /// Sums of O in fp32, beside what the tensor cores are adding up.
  static constexpr int kSumBytes = kLongSums ? rows * head_dim_vo * 4 : 0;

  static constexpr int kMostBytes = 227 * 1024;  ///< of a block on sm_90
  FLASHBSR_FN static constexpr int stages_with(int queries) {
    return (kMostBytes - kRestBytes - kSumBytes - kOwnLandingStages * kLandingBytes -
            queries * kQueryBytes) /
           kStageBytes;
  }
  /// A second buffer for Q pays where it costs no stage that is needed: of three, where both K and
  /// V are widened, which is one after the other.
  static constexpr int kQueryStages = stages_with(2) >= (scaled && kPreparesValues ? 3 : 2) ? 2 : 1;
  static constexpr int kStages = min_of(stages_with(kQueryStages), 3);
  static constexpr int kLandingStages = kOwnLandingStages ? kOwnLandingStages : kStages;
  /// Whether O goes out through the memory of Q: not where the next Q waits for it, or it is too
  /// small for 16 bits. Or through that of its sums.
  static constexpr bool kStoresInQueries =
      kQueryStages == 2 && rows * head_dim_vo * 2 <= kQueryBytes;
  static constexpr bool kStoreBoxes = kStoresInQueries || kLongSums;
  static_assert(kStages >= 2);

  /// [Q ...][sums][K ...][V ...][K that lands ...][V that lands ...][spans of two items][two
  /// items][scales of tokens ...][barriers]
  static constexpr int kSumOffset = kQueryStages * kQueryBytes;
  static constexpr int kKeyOffset = kSumOffset + kSumBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kLandingKeyOffset = kValueOffset + kStages * kValueBytes;
  static constexpr int kLandingValueOffset =
      kLandingKeyOffset + (kPreparesKeys ? kLandingStages * kLandingKeyBytes : 0);
  static constexpr int kSpanOffset =
      max_of(kLandingValueOffset + (kPreparesValues ? kLandingStages * kLandingValueBytes : 0),
             kConsumers* kNarrowBytes);
  static constexpr int kTileOffset = kSpanOffset + kTileSlots * kSpanBytes;
  static constexpr int kTokenScaleOffset = kTileOffset + kTileSlots * kTileRecordBytes;
  static constexpr int kBarrierOffset = kTokenScaleOffset + kStages * kScaleBytes;
  static_assert(kBarrierOffset + kBarrierBytes <= kMostBytes);

  /// As many entries of places as there is room for, up to K and V of two tiles. Head dim 256 has
  /// room for one.
  static constexpr int kPlaceOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kPlaceSlots =
      min_of((kMostBytes - kPlaceOffset) / (kPlaceBytes + kPlaceBarrierBytes), 4);
  static_assert(kPlaceSlots >= 1);
  static constexpr int kPlaceBarrierOffset = kPlaceOffset + kPlaceSlots * kPlaceBytes;
  static constexpr int kSmemBytes = kPlaceBarrierOffset + kPlaceSlots * kPlaceBarrierBytes;
};

/// A kernel for latent K and V (latent.h): a row of K is its latent, which is V too, and a tail
/// that RoPE has turned, from an array of its own or from behind the latent. Two consumers have the
/// same 64 rows and half of the latent dims of O each. The producers' "keys" are latents, their
/// "values" tails: what a tail occupies holds the tile's weights once its products are done.
///
/// Of e4m3 there is no room for copies to land in. A third kind of warps, a warpgroup of them,
/// reads codes to registers and writes what products read (latent_widen.h).
/// @tparam latent_dim  512
/// @tparam tail_dim    64
/// @tparam type        of Q
/// @tparam kv_type     in memory: `type`, which is that of products then, or e4m3
/// @tparam packed      rows of 656 bytes with scales of their own (core/latent_row.h)
/// @tparam hooks       the variant has hooks, which need registers
template <int latent_dim, int tail_dim, DType type, DType kv_type = type, bool packed = false,
          bool hooks = false>
struct LatentTraits {
  static constexpr int kHeadDimQk = latent_dim + tail_dim;
  static constexpr int kHeadDimVo = latent_dim;
  static constexpr int kOutputDims = latent_dim / 2;
  static constexpr bool kLatent = true;
  /// Each warpgroup frees its half of the dims as soon as it is done with them.
  static constexpr int kKeyParts = 2;
  /// Of every other tile the second half is freed first: it is loaded and multiplied first.
  static constexpr bool kTurnsParts = true;
  static constexpr int kWideners = kv_type == type ? 0 : 4, kSideWideners = 0;
  /// Codes are multiplied in fp16, which one instruction makes of two: Q of bf16 is fitted to it
  /// (fit_queries.h). The bf16 tails of packed rows stay what they are.
  static constexpr bool kFitsQueries = kWideners > 0 && type == DType::kBF16;
  static constexpr DType kType = kWideners ? DType::kF16 : type;
  static constexpr DType kKvType = kv_type, kWeightType = kType;
  static constexpr DType kTailType = packed && kFitsQueries ? DType::kBF16 : kType;
  static constexpr bool kPacked = packed;
  static constexpr int kRowLoaders = 0, kRowWriters = 0;
  static constexpr int kTailBytes = packed ? 128 : tail_dim * dtype_size(kv_type);
  static constexpr bool kPreparesKeys = false, kPreparesValues = false, kRotates = false;
  static constexpr bool kTransposesValues = false, kSplitsQueries = false, kMixed = false;
  static constexpr bool kKeyHalves = false;
  static constexpr bool kLongSums = false, kSumsTiles = false, kTokenScales = false;
  /// Latents with scales are multiplied 16 times as large as they are: scales from 2^-18 on have
  /// all bits of fp16, and latents below 4094 are finite.
  static constexpr float kKeyUnit = packed && kFitsQueries ? 0.0625f : 1.0f, kValueUnit = kKeyUnit;
  static constexpr int kRows = 64;
  static constexpr int kKvTile = 64;
  static_assert(latent_dim % 128 == 0 && tail_dim == 64 && dtype_size(type) == 2);
  static_assert(!packed || (kv_type == DType::kE4M3 && latent_dim == 512));

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1) + 32 * kWideners;
  static constexpr int kBlocksPerSM = 1;
  static constexpr int kLaunchRegisters = kWideners ? 128 : 168;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = !kWideners ? 232 : hooks ? 208 : 200;
  static constexpr int kWidenerRegisters = hooks ? 56 : 72;
  /// Rows of a widener that are under way to registers.
  static constexpr int kWidenedAhead = hooks ? 8 : 16;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters +
                    (kWideners ? kWidenerRegisters : 0) <=
                kThreads / 128 * kLaunchRegisters);

  // Columns of 128 bytes, as in HopperTraits.
  static constexpr int kColumnDims = 64, kLandingDims = 64;
  static constexpr int kColumnsQk = kHeadDimQk / kColumnDims;
  static constexpr int kLandingColumnsQk = latent_dim / kColumnDims;
  static constexpr int kLandingColumnsVo = tail_dim / kColumnDims;
  static constexpr int kQueryBytes = kRows * kColumnsQk * 128;
  static constexpr int kKeyBytes = kKvTile * kLandingColumnsQk * 128;
  static constexpr int kValueBytes = kKvTile * 128;
  static constexpr int kLandingKeyBytes = kKeyBytes, kLandingValueBytes = kValueBytes;
  static_assert(kRows * kKvTile * dtype_size(type) <= kValueBytes);

  static constexpr int kSpanBytes = kRows * 8;
  static constexpr int kTileRecordBytes = 128;
  static constexpr int kTileSlots = 2;
  static constexpr int kBarrierBytes = 272;
  static constexpr int kPlaceBytes = kKvTile * 4, kPlaceBarrierBytes = 16;
  /// Of a row: the reference of its weights, and each consumer's part of the denominators of two
  /// items.
  static constexpr int kStateBytes = kRows * 5 * 4;
  static constexpr int kFitBytes = kFitsQueries ? kRows * 4 : 0;  ///< what Q was divided by
  /// Barriers: what either consumer, or both, have written may be read.
  static constexpr int kHandBytes = 32;
  static constexpr int kMostBytes = 227 * 1024;
  static constexpr int kQueryStages = 1, kStages = 2,
                       kLandingStages = kStages;  // Q and two tiles are 216 KB

  static constexpr int kSumOffset = kQueryStages * kQueryBytes;
  static constexpr int kKeyOffset = kSumOffset;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kSpanOffset = kValueOffset + kStages * kValueBytes;
  static constexpr int kTileOffset = kSpanOffset + kTileSlots * kSpanBytes;
  static constexpr int kTokenScaleOffset = kTileOffset + kTileSlots * kTileRecordBytes;  ///< none
  static constexpr int kStateOffset = kTokenScaleOffset;
  static constexpr int kFitOffset = kStateOffset + kStateBytes;
  static constexpr int kHandOffset = kFitOffset + kFitBytes;
  static constexpr int kBarrierOffset = kHandOffset + kHandBytes;
  static constexpr int kPlaceOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kPlaceSlots = 4;
  static constexpr int kPlaceBarrierOffset = kPlaceOffset + kPlaceSlots * kPlaceBytes;
  static constexpr int kSmemBytes = kPlaceBarrierOffset + kPlaceSlots * kPlaceBarrierBytes;
  static_assert(kSmemBytes <= kMostBytes);
};

/// A kernel for latent K and V and few rows (latent_few.h): tokens and dims are the rows of
/// products, the 16 heads or fewer their columns. Two consumers take tiles in turn, each with O of
/// all dims.
/// @tparam latent_dim  512
/// @tparam tail_dim    64
/// @tparam type        of Q
/// @tparam kv_type     in memory: e4m3, of which fp16 is made on the way to products, or `type`
/// @tparam packed      rows of 656 bytes with scales of their own (core/latent_row.h)
template <int latent_dim, int tail_dim, DType type, DType kv_type, bool packed = false>
struct FewLatentTraits {
  static constexpr int kHeadDimQk = latent_dim + tail_dim;
  static constexpr int kHeadDimVo = latent_dim;
  static constexpr bool kLatent = true;
  static constexpr int kKeyParts = 1, kWideners = 0, kSideWideners = 0;
  static constexpr bool kTurnsParts = false;
  static constexpr bool kRowScales = packed;
  static constexpr bool kCodes = kv_type != type;
  static constexpr DType kType = kCodes ? DType::kF16 : type;  ///< of products
  static constexpr DType kKvType = kv_type, kWeightType = kType;
  static constexpr DType kTailType = packed ? DType::kBF16 : kType;
  static constexpr bool kPreparesKeys = false, kPreparesValues = false, kRotates = false;
  static constexpr bool kTransposesValues = false, kSplitsQueries = false, kMixed = false;
  static constexpr bool kKeyHalves = false;
  static constexpr bool kLongSums = false, kSumsTiles = false, kTokenScales = false;
  static constexpr int kRows = 16;
  static constexpr int kKvTile = 64;
  static_assert(latent_dim == 512 && tail_dim == 64);
  static_assert(type == DType::kBF16 && (kv_type == DType::kE4M3 || (kv_type == type && !packed)));

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocksPerSM = 1;
  static constexpr int kLaunchRegisters = 168;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  // Q in columns of 128 bytes, as in HopperTraits.
  static constexpr int kColumnDims = 64, kColumnsQk = kHeadDimQk / kColumnDims;
  static constexpr int kQueryBytes = kRows * kColumnsQk * 128;
  /// A row in memory, and from one to the next in a tile: an odd multiple of 16, so that eight of
  /// them meet no bank twice. Tails lie behind the latents, or behind their scales.
  static constexpr int kLatentBytes = latent_dim * dtype_size(kv_type);
  static constexpr int kTailOffset = kLatentBytes + (packed ? 16 : 0);
  static constexpr int kTailBytes = packed ? 128 : tail_dim * dtype_size(kv_type);
  static constexpr int kRowBytes = kTailOffset + kTailBytes;
  static constexpr int kRowStride = kRowBytes / 16 % 2 ? kRowBytes : kRowBytes + 16;
  static constexpr int kKeyBytes = kKvTile * kRowStride, kValueBytes = 0;  ///< tails are there
  /// Warps that copy rows, whole or latents and tails apart, and how many arrivals a tile has.
  static constexpr int kRowLoaders = 3;
  static constexpr bool kWholeRows = packed;
  static constexpr int kRowWriters = 32 * (packed ? 2 : kRowLoaders);
  /// Weights of two tiles of each consumer, once for each scale of a row. At an item's end O in
  /// fp32.
  static constexpr int kWeightSets = packed ? latent_dim / 128 : 1;
  static constexpr int kWeightBytes = kWeightSets * kRows * kKvTile * 2;
  static constexpr int kAllWeightBytes =
      max_of(2 * kConsumers * kWeightBytes, kRows * latent_dim * 4);

  static constexpr int kSpanBytes = kRows * 8;
  static constexpr int kTileRecordBytes = 128;
  static constexpr int kTileSlots = 2;
  static constexpr int kBarrierBytes = 320;
  static constexpr int kPlaceBytes = kKvTile * 4, kPlaceBarrierBytes = 16;
  /// Of a row: what Q was divided by; of each consumer its reference, and of each warp the largest
  /// logit of a tile, or the sum of weights.
  static constexpr int kStateBytes = kRows * (1 + kConsumers * 5) * 4;
  /// Of a row: its LSE, and what it weighs in each part of a cluster (few_merge.h).
  static constexpr int kMostParts = 16, kMergeBytes = kRows * (1 + kMostParts) * 4;
  static constexpr int kMeetBytes = 16;  ///< a barrier of all consumers
  static constexpr int kMostBytes = 227 * 1024;
  static constexpr int kQueryStages = 1, kStages = kCodes ? 4 : 2, kLandingStages = kStages;

  /// [Q][weights][K ...][...]
  static constexpr int kWeightOffset = kQueryStages * kQueryBytes;
  static constexpr int kSumOffset = kWeightOffset + kAllWeightBytes;  ///< none
  static constexpr int kKeyOffset = kSumOffset;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;  ///< none
  static constexpr int kSpanOffset = kValueOffset;
  static constexpr int kTileOffset = kSpanOffset + kTileSlots * kSpanBytes;
  static constexpr int kTokenScaleOffset = kTileOffset + kTileSlots * kTileRecordBytes;  ///< none
  static constexpr int kStateOffset = kTokenScaleOffset;
  static constexpr int kMergeOffset = kStateOffset + kStateBytes;
  static constexpr int kMeetOffset = kMergeOffset + kMergeBytes;
  static constexpr int kBarrierOffset = kMeetOffset + kMeetBytes;
  static constexpr int kPlaceOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kPlaceSlots = 4;
  static constexpr int kPlaceBarrierOffset = kPlaceOffset + kPlaceSlots * kPlaceBytes;
  static constexpr int kSmemBytes = kPlaceBarrierOffset + kPlaceSlots * kPlaceBarrierBytes;
  static_assert(kWeightOffset % 1024 == 0 && kSmemBytes <= kMostBytes);
};

/// Tiles of codes with scales of every token: what the warp which schedules has registers for, who
/// copies their scales, and hooks; in tiles of 128 rows what there is room for, widened twice.
FLASHBSR_FN constexpr int scaled_kv_tile(int head_dim, int rows, bool hooks, DType kv_type) {
  if (hooks) return 64;
  if (rows == 192) return head_dim > 64 ? 80 : 96;
  return dtype_size(kv_type) == 1 ? 112 : 128;
}

/// A kernel for codes with scales of every token.
template <int head_dim_qk, int head_dim_vo, DType type, int rows, bool hooks, DType kv_type>
using ScaledTraits =
    HopperTraits<head_dim_qk, head_dim_vo, type, rows, hooks, kv_type, DType::kBF16,
                 scaled_kv_tile(head_dim_qk, rows, hooks, kv_type), false, 0, true>;

/// The same for codes that a pass has widened, with two scales of a row of K.
template <int head_dim_qk, int head_dim_vo, DType type, int rows>
using HalvesTraits =
    HopperTraits<head_dim_qk, head_dim_vo, type, rows, false, type, DType::kBF16,
                 scaled_kv_tile(head_dim_qk, rows, false, type), false, 0, true, true>;

/// A kernel for mixed batches.
template <int head_dim, DType type, int rows>
using MixedTraits = HopperTraits<head_dim, head_dim, type, rows, false, type, type,
                                 hopper_kv_tile(head_dim, head_dim, rows, false, type), true>;

/// A kernel for products of e4m3 with fp8_accumulation="fast": sums of 8 tiles of 96 tokens, at
/// most 1.2 % too low where all V are of one sign (test_accuracy.py). docs/kernels/sm90a_fp8.md.
template <int head_dim, int rows>
using FastTraits = HopperTraits<head_dim, head_dim, DType::kE4M3, rows, false, DType::kE4M3,
                                DType::kE4M3, 96, false, 8>;

}  // namespace flashbsr::sm90a
