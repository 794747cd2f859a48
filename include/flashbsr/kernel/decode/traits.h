// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The decode kernel's shapes: what its template parameters mean in threads and bytes. Constants
// only, so that the host's registry reads them too.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr {

/// @tparam arch      instruction set, 80 or 90
/// @tparam head_dim  64, 128 or 256; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of K and V: that of Q, or float8
/// @tparam rows      packed rows of an item, 8 or 16
template <int arch, int head_dim, DType kv, int rows>
struct DecodeTraits {
  static constexpr int kArch = arch;
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv;
  static constexpr int kRows = rows;

  static constexpr bool kFloat8 = dtype_size(kv) == 1;
  /// What the tensor cores multiply: float8 is exact in fp16.
  static constexpr DType kCompute = kFloat8 ? DType::kF16 : kv;

  static constexpr int kEpilogueWarps = 4;
  /// Eight warps fill an SM of 227 KB. The smaller shared memory of sm_86 and sm_89 (99 KB) holds
  /// four warps' rings, and so do 256-wide rows.
  static constexpr int kWarps = arch >= 90 && head_dim <= 128 ? 8 : 4;
  static constexpr int kThreads = 32 * (kWarps + kEpilogueWarps);
  static constexpr int kBlocksPerSM = 1;

  /// Tokens of a stage, of one warp: 8 KB of K and V each, or what the matrix shape asks for.
  static constexpr int kKvTile = 16 * max_of(1, 8192 / (2 * 16 * head_dim * dtype_size(kv)));
  static constexpr int kStages = 2;
  static constexpr int kRowBytes = head_dim * dtype_size(kv);
  static constexpr int kStageBytes = 2 * kKvTile * kRowBytes;

  /// [ring of every warp][O of every warp: rows x head_dim floats][max, sum][item records]
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;
  static constexpr int kStateBytes = kWarps * rows * (head_dim * 4 + 8);
  static constexpr int kSmemBytes = kRingBytes + kStateBytes + 4096;
};

}  // namespace flashbsr
