// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Where a 16-byte chunk of a row lies in a shared-memory tile.
//
// Rows follow one another without padding, and the chunks of each 128-byte line are permuted by
// XOR with the line's number: eight rows' chunks of one column, which is what ldmatrix reads at
// once, fall into eight different bank groups, and so do a line's chunks, which is what a copy
// writes at once.
//
//   kRowBytes = 128, chunk column 0 marked:      kRowBytes = 64 (two rows in a line):
//   row 0   [0 . . . . . . .]                    rows 0, 1  [0 . . . 1 . . .]
//   row 1   [. 1 . . . . . .]                    rows 2, 3  [. 2 . . . 3 . .]
//   row 2   [. . 2 . . . . .]                    rows 4, 5  [. . 4 . . . 5 .]
#pragma once

#include <flashbsr/config.h>

namespace flashbsr {

template <int kRowBytes>
struct Swizzle {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes % 128 == 0);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kInLine = kRowBytes < 128 ? 128 / kRowBytes : 1;  ///< rows of a line
  /// Of rows of 32 bytes two lines' chunks of a column are eight already.
  static constexpr int kLines = kRowBytes == 32 ? 2 : 8;
  /// Rows after which the permutation repeats: address(row + n * kPeriod) is n * kPeriod rows on.
  static constexpr int kPeriod = kLines * kInLine;

  /// Byte offset of a chunk. XOR with 16 * x gives that of chunk ^ x in the same row.
  FLASHBSR_FN static constexpr uint32_t offset(uint32_t row, uint32_t chunk) {
    const uint32_t line = row / kInLine;
    return row * kRowBytes + chunk * 16 ^ line % kLines * 16;
  }
};

}  // namespace flashbsr
