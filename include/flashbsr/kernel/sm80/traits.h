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

/// Warps that share rows, each with its part of O's columns and all of S: 16 rows of 512 columns
/// would be 256 of a thread's 255 registers.
FLASHBSR_FN constexpr int prefill_parts(int head_dim) { return head_dim > 256 ? 2 : 1; }

/// @tparam head_dim  64, 128, 256 or 512; smaller dims are padded with zeros in shared memory
/// @tparam kv        type of K and V: that of Q, or float8
/// @tparam rows      packed rows of an item, 64 or 128
/// @tparam arch      what the kernel is compiled for, 80 or more: the host need not know
/// @tparam kv_tile   tokens of a tile of K or V
/// @tparam stages    buffers for K, and for V: 1 or 2
template <int head_dim, DType kv, int rows, int arch = 80,
          int kv_tile = prefill_kv_tile(head_dim, rows),
          int stages = prefill_stages(head_dim, kv, rows, arch)>
struct PrefillTraits {
  /// Whose instructions the kernel uses: what the pass of the compiler makes code for, where that
  /// is more. On sm_90 that is the wait for the kernel before (PDL) and a conversion of e4m3.
  static constexpr int kArch = max_of(FLASHBSR_ARCH, arch);
  static constexpr int kHeadDim = head_dim;
  static constexpr DType kKv = kv;
  static constexpr int kRows = rows;

  static constexpr bool kFloat8 = dtype_size(kv) == 1;
  /// What the tensor cores multiply: float8 is exact in fp16.
  static constexpr DType kCompute = kFloat8 ? DType::kF16 : kv;

  static constexpr int kRowWarps = 4;  ///< that rows are dealt to
  static constexpr int kParts = prefill_parts(head_dim);
  static constexpr int kWarps = kRowWarps * kParts;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSM = 2 / kParts;
  static constexpr int kKvTile = kv_tile;
  static constexpr int kStages = stages;

  static constexpr int kQueryBytes = rows * head_dim * 2;
  static constexpr int kTileBytes = kKvTile * head_dim * dtype_size(kv);
  static constexpr int kSourceBytes = 32;      ///< sizeof(KvSource)
  static constexpr int kRowRecordBytes = 16;   ///< sizeof(PrefillRow)
  static constexpr int kVisibilityBytes = 16;  ///< sizeof(Visibility)
  static constexpr int kTaskBytes = 80;        ///< sizeof(Task)
  /// [Q][K ...][V ...][where K and V rows are, of two tiles][and in general][pages][rows]
  /// [scale of every row][what each warp sees][this item and the next]
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kTileBytes;
  static constexpr int kKvRowOffset = kValueOffset + kStages * kTileBytes;
  static constexpr int kSourceOffset = kKvRowOffset + 2 * 2 * kKvTile * 8;
  static constexpr int kPageOffset = kSourceOffset + 2 * kSourceBytes;
  static constexpr int kRowOffset = kPageOffset + 2 * kThreads * 4;
  static constexpr int kScaleOffset = kRowOffset + rows * kRowRecordBytes;
  static constexpr int kVisibleOffset = kScaleOffset + rows * 4;
  static constexpr int kTaskOffset = kVisibleOffset + kWarps * kVisibilityBytes;
  static constexpr int kSmemBytes = kTaskOffset + 2 * kTaskBytes;
};

}  // namespace flashbsr::sm80
