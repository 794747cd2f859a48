// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The prefill kernel's shapes: what its template parameters mean in threads and bytes. Constants
// only, so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr::sm80 {

/// Half as many tokens where O takes half of the registers.
FLASHBSR_FN constexpr int prefill_kv_tile(int head_dim, int rows) {
  return head_dim * rows < 128 * 128 ? 64 : 32;
}

/// As many as two blocks of an SM have room for: on sm_80 with short tiles only, and not of e4m3,
/// of which two blocks with one buffer find room on sm_86. (Of e5m2 one buffer spills on sm_90.)
FLASHBSR_FN constexpr int prefill_stages(int head_dim, DType kv, int rows, int arch) {
  return arch >= 90 || kv == DType::kE5M2 || (head_dim == 128 && rows == 128 && dtype_size(kv) == 2)
             ? 2
             : 1;
}

FLASHBSR_FN constexpr bool is_byte(DType t) { return dtype_size(t) == 1 && !is_packed(t); }

/// Of codes: bytes of a scale, and words of those of a row at most.
FLASHBSR_FN constexpr int scale_size(DType t) { return t == DType::kE2M1 ? 1 : 4; }
FLASHBSR_FN constexpr int scale_words(DType t, int head_dim) {
  return t == DType::kE2M1 ? head_dim / 64 : is_packed(t) ? head_dim / 32 : 1;
}

/// Warps that share rows, each with its part of O's columns and all of S: 16 rows of 512 columns
/// would be 256 of a thread's 255 registers.
FLASHBSR_FN constexpr int prefill_parts(int head_dim) { return head_dim > 256 ? 2 : 1; }

/// @tparam head_dim  64, 128, 256 or 512; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of K and V: that of Q, float8 or codes
/// @tparam rows      packed rows of an item, 64 or 128
/// @tparam arch      what the kernel is compiled for, 80 or more: the host need not know
/// @tparam kv_tile   tokens of a tile of K or V
/// @tparam stages    buffers for K, and for V: 1 or 2
/// @tparam scaled    K and V have scales of every token and head: logits take K's, weights V's
/// @tparam v         type of V, where it has other codes than K
template <int head_dim, DType kv, int rows, int arch = 80,
          int kv_tile = prefill_kv_tile(head_dim, rows),
          int stages = prefill_stages(head_dim, kv, rows, arch), bool scaled = false, DType v = kv>
struct PrefillTraits {
  /// Whose instructions the kernel uses: what the pass of the compiler makes code for, where that
  /// is more. From sm_89 on that is a conversion of float8; others are one for all GPUs from sm_80
  /// on, whose PTX is made once (cmake/instances.cmake).
  static constexpr int kArch = max_of(FLASHBSR_ARCH, arch);
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv, kV = v;
  static constexpr int kRows = rows;

  /// Elements of a byte, which are widened on their way to the tensor cores.
  static constexpr bool kBytes = is_byte(kv), kValueBytes = is_byte(v);
  /// Two of them in a byte (tile/packed.h).
  static constexpr bool kPacked = is_packed(kv), kValuePacked = is_packed(v);
  static constexpr bool kTokenScales = scaled;
  static_assert(scaled || (kv != DType::kI8 && !kPacked));
  static_assert(v == kv || (scaled && dtype_size(kv) == 1 && dtype_size(v) == 1));
  /// What the tensor cores multiply with Q: codes are exact in fp16.
  static constexpr DType kKeyCompute = dtype_size(kv) == 1 ? DType::kF16 : kv;
  /// And with weights. V's scales make these of any size, and so bf16; NVFP4's are in its codes.
  static constexpr DType kCompute = scaled && v != DType::kE2M1 ? DType::kBF16 : kKeyCompute;
  /// What K and V are divided by where they are multiplied (ptx/codes.h).
  static constexpr float kKeyUnit = kv == DType::kE2M1 ? 128.0f : kPacked ? 512.0f : 1.0f;
  static constexpr float kValueUnit = v == DType::kE2M1                    ? 128.0f
                                      : v == DType::kI4 || v == DType::kI8 ? 64.0f
                                                                           : 1.0f;
  /// Bytes of a scale of packed codes, and words that there are for those of a row of K or V.
  static constexpr int kScaleSize = scale_size(kv), kValueScaleSize = scale_size(v);
  static constexpr int kScaleWords = max_of(scale_words(kv, head_dim), scale_words(v, head_dim));

  static constexpr int kRowWarps = 4;  ///< that rows are dealt to
  static constexpr int kParts = prefill_parts(head_dim);
  static constexpr int kWarps = kRowWarps * kParts;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = 2 / kParts;
  static constexpr int kKvTile = kv_tile;
  static constexpr int kStages = stages;
  static constexpr int kScoreTokens = kKvTile;  ///< of S that a warp makes weights of
  static constexpr int kPageSlots = kThreads;   ///< threads that look up pages
  static constexpr bool kLatent = false;        ///< V is a part of K

  static constexpr int kQueryBytes = rows * head_dim * 2;
  static constexpr int kRowBytes = static_cast<int>(row_bytes(kv, head_dim));
  static constexpr int kValueRowBytes = static_cast<int>(row_bytes(v, head_dim));
  static constexpr int kTileBytes = kKvTile * kRowBytes;
  static constexpr int kValueTileBytes = kKvTile * kValueRowBytes;
  /// Arrays that a token has a row in: K, V and the scales of both.
  static constexpr int kSources = scaled ? 4 : 2;
  static constexpr int kSourceBytes = 32;      ///< sizeof(KvSource)
  static constexpr int kRowRecordBytes = 16;   ///< sizeof(PrefillRow)
  static constexpr int kVisibilityBytes = 16;  ///< sizeof(Visibility)
  static constexpr int kTaskBytes = 80;        ///< sizeof(Task)
  static constexpr int kTokenScaleBytes =
      scaled ? 2 * 2 * kKvTile * kScaleWords * 4 : 0;  ///< of two tiles
  /// [Q][K ...][V ...][where rows of K and V, and their scales, are, of two tiles][and in general]
  /// [pages][rows][scale of every row][scales of two tiles' tokens][what each warp sees][this item
  /// and the next]
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kTileBytes;
  static constexpr int kKvRowOffset = kValueOffset + kStages * kValueTileBytes;
  static constexpr int kSourceOffset = kKvRowOffset + 2 * kSources * kKvTile * 8;
  static constexpr int kPageOffset = kSourceOffset + kSources * kSourceBytes;
  static constexpr int kRowOffset = kPageOffset + 2 * kThreads * 4;
  static constexpr int kScaleOffset = kRowOffset + rows * kRowRecordBytes;
  static constexpr int kTokenScaleOffset = kScaleOffset + rows * 4;
  static constexpr int kVisibleOffset = kTokenScaleOffset + kTokenScaleBytes;
  static constexpr int kTaskOffset = kVisibleOffset + kWarps * kVisibilityBytes;
  static constexpr int kSmemBytes = kTaskOffset + 2 * kTaskBytes;
};

/// A kernel for codes with scales of every token. With 128 rows and tiles of 64 tokens int4 spills
/// 32 bytes at head dim 64.
template <int head_dim, DType kv, int rows, int arch = 80, DType v = kv>
using ScaledPrefillTraits =
    PrefillTraits<head_dim, kv, rows, arch,
                  is_packed(kv) && rows == 128 ? 32 : prefill_kv_tile(head_dim, rows),
                  prefill_stages(head_dim, kv, rows, arch), true, v>;

/// A kernel for latent K and V (latent.h): a row of K is its latent, which is V too, and a tail
/// that RoPE has turned. A warp has S of 16 rows, of some tokens and some dims; afterwards O of up
/// to 32 rows and its share of the dims.
/// @tparam latent_dim  256, 320, 384 or 512
/// @tparam tail_dim    64 or 0
/// @tparam rows  packed rows of an item: 16, of which two blocks find room on an SM, 32 or 64
/// @tparam arch  as in PrefillTraits; from 90 on there is room for three tiles
/// @tparam row_scales  rows of 656 bytes (core/latent_row.h); otherwise codes have one scale
template <int latent_dim, int tail_dim, DType type, int rows, int arch = 80,
          bool row_scales = false>
struct LatentTraits {
  static constexpr int kArch = max_of(FLASHBSR_ARCH, arch);
  static constexpr int kHeadDim = latent_dim + tail_dim;  ///< of Q and K
  static constexpr int kValueDim = latent_dim;
  /// Codes, which are widened on their way to the tensor cores (latent_codes.h).
  static constexpr bool kBytes = dtype_size(type) == 1, kRowScales = row_scales;
  static constexpr DType kKv = type, kCompute = kBytes ? DType::kF16 : type, kKeyCompute = kCompute;
  static constexpr DType kV = kKv;
  static constexpr bool kPacked = false, kTokenScales = false, kLatent = true;
  static constexpr bool kValueBytes = kBytes, kValuePacked = kPacked;
  static constexpr float kKeyUnit = 1.0f, kValueUnit = 1.0f;
  static constexpr int kRows = rows;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = rows == 16 ? 2 : 1;
  static constexpr int kKvTile = 32;
  /// With three the weights of a tile are made between the products of the one before. With 64 rows
  /// two take 156 KB of the 163 of sm_80, three 200 KB.
  static constexpr int kStages = rows > 16 && arch >= 90 ? 3 : 2;

  static constexpr int kRowWarps = rows / 16;             ///< whose rows are others
  static constexpr int kParts = kWarps / kRowWarps;       ///< warps that share 16 rows of S
  static constexpr int kTokenWarps = rows == 16 ? 2 : 1;  ///< of these: whose tokens are others
  static constexpr int kKeyWarps = kParts / kTokenWarps;  ///< of those: whose dims are others
  static constexpr int kWarpTokens = kKvTile / kTokenWarps;
  static constexpr int kScoreTokens = 16;  ///< of S that a warp makes weights of
  static constexpr int kBlocks = kKvTile / kScoreTokens;
  /// Steps of the product of S, of a warp, whose part of Q stays in registers.
  static constexpr int kMostSteps = row_scales                   ? 3
                                    : rows == 16                 ? 4
                                    : rows == 64 && kStages == 3 ? 7
                                                                 : 8;
  static constexpr int kKeptSteps = min_of(kMostSteps, kHeadDim / 16 / kKeyWarps);
  static constexpr int kPageSlots = 2 * kKvTile;
  static constexpr int kOutputBands = rows == 16 ? 1 : 2;  ///< of 16 rows, of O in a warp
  static constexpr int kDimWarps = kWarps / (kRowWarps / kOutputBands);
  static_assert(latent_dim % 64 == 0 && tail_dim % 64 == 0);
  static_assert(!kBytes || (rows == 16 && latent_dim == 512 && tail_dim == 64));
  static_assert(kBytes ? type == DType::kE4M3 : !row_scales);

  static constexpr int kQueryBytes = rows * kHeadDim * 2;
  /// Of codes the latents, behind which a tile has its tails, and scales behind these.
  static constexpr int kRowBytes = kBytes ? latent_dim : kHeadDim * 2;
  static constexpr int kValueRowBytes = kRowBytes;  ///< a loader's; latents are K's own
  static constexpr int kTailRowBytes = !kBytes ? 0 : tail_dim * (row_scales ? 2 : 1);
  static constexpr int kTileTailOffset = kKvTile * kRowBytes;
  static constexpr int kTileScaleOffset = kTileTailOffset + kKvTile * kTailRowBytes;
  static constexpr int kTileBytes = kTileScaleOffset + (row_scales ? kKvTile * 16 : 0);
  /// S of 16 rows and 16 tokens, of each warp but one of those that share them; then P.
  static constexpr int kUnitBytes = (kKeyWarps - 1) * 1024;
  static constexpr int kExchangeBytes = kRowWarps * kBlocks * kUnitBytes;  ///< of a tile
  static constexpr int kSources = 2;
  static constexpr int kSourceBytes = 32, kRowRecordBytes = 16, kVisibilityBytes = 16;
  static constexpr int kTaskBytes = 80;
  /// [Q][K ...][units][as in PrefillTraits][of every row: maxima or sums of each block of tokens,
  /// what O shrinks by, its reference]
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kExchangeOffset = kKeyOffset + kStages * kTileBytes;
  static constexpr int kKvRowOffset = kExchangeOffset + (kStages - 1) * kExchangeBytes;
  static constexpr int kSourceOffset = kKvRowOffset + 2 * kSources * kKvTile * 8;
  static constexpr int kPageOffset = kSourceOffset + kSources * kSourceBytes;
  static constexpr int kRowOffset = kPageOffset + 2 * kPageSlots * 4;
  static constexpr int kScaleOffset = kRowOffset + rows * kRowRecordBytes;
  static constexpr int kTokenScaleOffset = kScaleOffset + rows * 4;  ///< of none
  static constexpr int kVisibleOffset = kTokenScaleOffset;
  static constexpr int kTaskOffset = kVisibleOffset + kWarps * kVisibilityBytes;
  static constexpr int kStateOffset = kTaskOffset + 2 * kTaskBytes;
  static constexpr int kSmemBytes = kStateOffset + (kBlocks + 2) * rows * 4;
  static_assert(kSmemBytes <= (rows == 16 ? 99 : kStages == 2 ? 163 : 227) * 1024);
};

}  // namespace flashbsr::sm80
