// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The prefill kernel's shapes on Turing: fp16 only, 64 KB of shared memory per SM. Constants only,
// so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr::sm75 {

/// @tparam head_dim  64, 128 or 256; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of Q, K and V: fp16
/// @tparam rows      packed rows of an item, 64
template <int head_dim, DType kv, int rows>
struct PrefillTraits {
  static_assert(kv == DType::kF16 && rows == 64);
  static constexpr int kArch = 75;
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv, kV = kv;
  static constexpr int kRows = rows;
  static constexpr bool kBytes = false, kValueBytes = false;
  static constexpr bool kPacked = false, kValuePacked = false, kTokenScales = false;
  static constexpr DType kKeyCompute = kv, kCompute = kv;
  static constexpr float kKeyUnit = 1.0f, kValueUnit = 1.0f;
  static constexpr int kScaleSize = 4, kValueScaleSize = 4, kScaleWords = 1;
  static constexpr int kSources = 2;

  static constexpr int kWarps = 4;
  static constexpr int kRowWarps = kWarps, kParts = 1;  ///< as in kernel/sm80/traits.h
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = head_dim == 256 ? 1 : 2;
  /// Tokens of a tile of K or V.
  static constexpr int kKvTile = head_dim == 256 ? 16 : 32;
  static constexpr int kScoreTokens = kKvTile, kPageSlots = kThreads;
  static constexpr bool kLatent = false;

  static constexpr int kQueryBytes = rows * head_dim * 2;
  static constexpr int kRowBytes = head_dim * 2, kValueRowBytes = kRowBytes;
  static constexpr int kTileBytes = kKvTile * kRowBytes;
  static constexpr int kSourceBytes = 32;      ///< sizeof(KvSource)
  static constexpr int kRowRecordBytes = 16;   ///< sizeof(PrefillRow)
  static constexpr int kVisibilityBytes = 16;  ///< sizeof(Visibility)
  static constexpr int kTaskBytes = 80;        ///< sizeof(Task)
  /// [Q][K][V][where K and V rows are, of two tiles][and in general][pages][rows]
  /// [scale of every row][what each warp sees][this item and the next]
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kTileBytes;
  static constexpr int kKvRowOffset = kValueOffset + kTileBytes;
  static constexpr int kSourceOffset = kKvRowOffset + 2 * 2 * kKvTile * 8;
  static constexpr int kPageOffset = kSourceOffset + 2 * kSourceBytes;
  static constexpr int kRowOffset = kPageOffset + 2 * kThreads * 4;
  static constexpr int kScaleOffset = kRowOffset + rows * kRowRecordBytes;
  static constexpr int kTokenScaleOffset = kScaleOffset + rows * 4;  ///< there are none
  static constexpr int kVisibleOffset = kTokenScaleOffset;
  static constexpr int kTaskOffset = kVisibleOffset + kWarps * kVisibilityBytes;
  static constexpr int kSmemBytes = kTaskOffset + 2 * kTaskBytes;
};

}  // namespace flashbsr::sm75
