// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Operands of the matrix instructions, read from swizzled tiles. Layouts: ptx/mma.h.
//
// A tile of K or V in codes of a byte (float8, int8) is kept as it is and widened here. A thread then gets four
// neighbouring bytes of a row, which are two pairs of operands only if the contraction runs over
// the columns in another order: column_of() says which column of Q or O a position is.
//
//   16-bit:  position of a group of 16     0 1 2 3 4 5 6 7  8 9 ...
//            column                        0 1 2 3 4 5 6 7  8 9 ...
//   bytes:   column of Q's position        0 1 4 5 8 9 12 13   2 3 6 7 10 11 14 15
//            column of O's position        0 2 4 6 8 10 12 14  1 3 5 7 9 11 13 15
#pragma once

#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>
#include <flashbsr/tile/swizzle.h>

namespace flashbsr {

/// c += a b on 16 x 8 x 16; sm_75 does it in two halves.
template <int kArch, DType kType>
FLASHBSR_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kArch >= 80) {
    ptx::mma_m16n8k16<kType>(c, a, b0, b1);
  } else {
    static_assert(kType == DType::kF16);
    ptx::mma_m16n8k8_f16(c, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(c, a[2], a[3], b1);
  }
}

/// The address `bytes` (a multiple of 16) further along a row than `base`, which lies in the row's
/// first 32 bytes: only within a line of 128 bytes are chunks permuted. The rest is left to be an
/// immediate offset.
FLASHBSR_DEVICE uint32_t swizzled(uint32_t base, uint32_t bytes) {
  return (base ^ (bytes & 127)) + (bytes & ~127u);
}

/// Rows of Q as A operands.
template <int kRowBytes>
struct QueryFragments {
  uint32_t base;

  /// `first_row` is a multiple of 16.
  FLASHBSR_DEVICE QueryFragments(uint32_t tile, uint32_t first_row, uint32_t lane)
      : base(tile + Swizzle<kRowBytes>::offset(first_row + lane % 16, lane / 16)) {}

  /// 16 rows from `row` (relative, a multiple of 16), columns [16 step, 16 step + 16).
  FLASHBSR_DEVICE void load(uint32_t (&a)[4], int row, int step) const {
    ptx::ldmatrix_x4(a, swizzled(base, step * 32) + row * kRowBytes);
  }
};

/// K as B operands of Q K^T: the contraction runs along a row.
template <int kArch, int kHeadDim, DType kKv>
struct KeyFragments {
  static constexpr bool kBytes = dtype_size(kKv) == 1;
  static constexpr int kRowBytes = kHeadDim * dtype_size(kKv);
  /// Tokens that one load covers.
  static constexpr int kTokens = kBytes ? 32 : 16;
  uint32_t base;

  FLASHBSR_DEVICE KeyFragments(uint32_t tile, uint32_t lane) {
    if constexpr (kBytes) {
      base = tile + Swizzle<kRowBytes>::offset(lane, 0);
    } else {
      base = tile + Swizzle<kRowBytes>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
  }

  /// b[i]: tokens token + 8 i + [0, 8), dims [16 step, 16 step + 16).
  FLASHBSR_DEVICE void load(uint32_t (&b)[kTokens / 8][2], int token, int step) const {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, swizzled(base, step * (kBytes ? 16 : 32)) + token * kRowBytes);
    if constexpr (kBytes) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::widen_bytes<kArch, kKv, DType::kF16>(r[i], b[i][0], b[i][1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
    }
  }

  /// The first of the two columns that half `half` of a thread's operand holds.
  FLASHBSR_DEVICE static int column_of(int step, int half, int32_t lane) {
    return 16 * step + (kBytes ? lane % 4 * 4 + half * 2 : lane % 4 * 2 + half * 8);
  }
};

/// V as B operands of P V: the contraction runs down a column.
/// @tparam kTo  what bytes are widened to
template <int kArch, int kHeadDim, DType kKv, DType kTo = DType::kF16>
struct ValueFragments {
  static constexpr bool kBytes = dtype_size(kKv) == 1;
  static constexpr int kRowBytes = kHeadDim * dtype_size(kKv);
  /// Dims that one load covers.
  static constexpr int kDims = kBytes ? 32 : 16;
  uint32_t base;

  FLASHBSR_DEVICE ValueFragments(uint32_t tile, uint32_t lane)
      : base(tile + Swizzle<kRowBytes>::offset(lane % 16, lane / 16)) {}

  /// Tokens [token, token + 16), dims [d, d + kDims) as kDims / 8 operands.
  FLASHBSR_DEVICE void load(uint32_t (&b)[kDims / 8][2], int token, int d) const {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, swizzled(base, d * dtype_size(kKv)) + token * kRowBytes);
    if constexpr (kBytes) {
      // A register holds [token 2t: d, d + 1][token 2t + 1: d, d + 1].
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pairs = ptx::permute_bytes(r[i], 0, 0x3120);
        ptx::widen_bytes<kArch, kKv, kTo>(pairs, b[i / 2 * 2][i % 2], b[i / 2 * 2 + 1][i % 2]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
    }
  }
};

}  // namespace flashbsr
