// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The prefill kernel's shapes on Turing: products in fp16 only, 64 KB of shared memory per SM.
// Constants only, so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>
#include <flashbsr/kernel/sm80/traits.h>

namespace flashbsr::sm75 {

/// @tparam head_dim  64, 128 or, of fp16, 256; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of K and V: fp16, float8, or `scaled` codes
/// @tparam rows      packed rows of an item, 64
/// @tparam scaled    K and V are codes with scales of every token and head
template <int head_dim, DType kv, int rows, bool scaled = false>
struct PrefillTraits {
  static_assert(rows == 64 && (kv == DType::kF16 || (dtype_size(kv) == 1 && head_dim <= 128)));
  static_assert(scaled ? kv != DType::kF16 : kv != DType::kI8 && !is_packed(kv));
  static constexpr int kArch = 75;
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv, kV = kv;
  static constexpr int kRows = rows;
  static constexpr bool kBytes = sm80::is_byte(kv), kValueBytes = kBytes;
  static constexpr bool kPacked = is_packed(kv), kValuePacked = kPacked, kTokenScales = scaled;
  static constexpr DType kKeyCompute = DType::kF16, kCompute = DType::kF16;
  /// What K and V are divided by where they are multiplied (ptx/codes.h).
  static constexpr float kKeyUnit = kv == DType::kE2M1 ? 128.0f : kPacked ? 512.0f : 1.0f;
  static constexpr float kValueUnit = kKeyUnit;
  static constexpr int kScaleSize = sm80::scale_size(kv), kValueScaleSize = kScaleSize;
  static constexpr int kScaleWords = scaled ? sm80::scale_words(kv, head_dim) : 1;
  static constexpr int kSources = scaled ? 4 : 2;  ///< as in kernel/sm80/traits.h
  /// Weights take scales of V, which may be of any size: those are made small first (scales.h).
  static constexpr bool kHasUnit = scaled && kv != DType::kE2M1;

  static constexpr int kWarps = 4;
  static constexpr int kRowWarps = kWarps, kParts = 1;  ///< as in kernel/sm80/traits.h
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = head_dim == 256 ? 1 : 2;
  /// Tokens of a tile of K or V.
  static constexpr int kKvTile = head_dim == 256 ? 16 : 32;
  static constexpr int kScoreTokens = kKvTile, kPageSlots = kThreads;
  static constexpr bool kLatent = false;

  static constexpr int kQueryBytes = rows * head_dim * 2;
  static constexpr int kRowBytes = static_cast<int>(row_bytes(kv, head_dim));
  static constexpr int kValueRowBytes = kRowBytes;
  static constexpr int kTileBytes = kKvTile * kRowBytes;
  static constexpr int kSourceBytes = 32;      ///< sizeof(KvSource)
  static constexpr int kRowRecordBytes = 16;   ///< sizeof(PrefillRow)
  static constexpr int kVisibilityBytes = 16;  ///< sizeof(Visibility)
  static constexpr int kTaskBytes = 80;        ///< sizeof(Task)
  static constexpr int kTokenScaleBytes =
      scaled ? 2 * 2 * kKvTile * kScaleWords * 4 : 0;  ///< of two tiles
  static constexpr int kUnitBytes = kHasUnit ? 16 : 0;
  /// [Q][K][V][where rows of K and V, and their scales, are, of two tiles][and in general][pages]
  /// [rows][scale of every row][scales of two tiles' tokens][units of two tiles][what each warp
  /// sees][this item and the next]
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kTileBytes;
  static constexpr int kKvRowOffset = kValueOffset + kTileBytes;
  static constexpr int kSourceOffset = kKvRowOffset + 2 * kSources * kKvTile * 8;
  static constexpr int kPageOffset = kSourceOffset + kSources * kSourceBytes;
  static constexpr int kRowOffset = kPageOffset + 2 * kThreads * 4;
  static constexpr int kScaleOffset = kRowOffset + rows * kRowRecordBytes;
  static constexpr int kTokenScaleOffset = kScaleOffset + rows * 4;
  static constexpr int kUnitOffset = kTokenScaleOffset + kTokenScaleBytes;
  static constexpr int kVisibleOffset = kUnitOffset + kUnitBytes;
  static constexpr int kTaskOffset = kVisibleOffset + kWarps * kVisibilityBytes;
  static constexpr int kSmemBytes = kTaskOffset + 2 * kTaskBytes;
};

template <int head_dim, DType kv, int rows>
using ScaledPrefillTraits = PrefillTraits<head_dim, kv, rows, true>;

}  // namespace flashbsr::sm75
