// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// RoPE of a stage's keys in the shared memory where they landed, by the warp that waits for them.
// It leaves nothing in registers: those keep the ring going. A lane has two neighbouring pairs of
// dims (two times two at head dim 256) and goes from row to row by angle-sums, as sm90a/rotate.h
// does.
#pragma once

#include <flashbsr/kernel/decode/loader.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/tile/rope.h>

namespace flashbsr {

/// float8 would have to be widened in its place; at head dim 512 there are no registers for it.
template <class Traits, class Variant>
inline constexpr bool kDecodeRotates =
    dtype_size(Traits::kKv) == 2 && Traits::kHeadDim <= 256 && Variant::takes_rope;

template <class Traits>
class DecodeRotator {
 public:
  static constexpr int kHalf = Traits::kHeadDim / 2;
  static constexpr int kPasses = kHalf > 64 ? kHalf / 64 : 1;  ///< of 64 pairs of a row

  /// Angles of the stage at KV position `position`: before its keys are waited for.
  FLASHBSR_DEVICE DecodeRotator(const RopeTables& tables, int32_t position, int lane)
      : tables_(tables), dim_(2 * lane % kHalf % 64), row_(2 * lane / kHalf) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t dim = dim_ + 64 * pass;
      now_[pass] = Angles::of(tables, Traits::kHeadDim, position + row_, dim);
      step_[pass] = Angles::step(tables.fine + dim, Traits::kHeadDim, kStep);
    }
  }

  /// Rotates the tile of K. Rows behind the item's end are masked, whatever they become.
  FLASHBSR_DEVICE void run(uint32_t tile) {
    const Zip zip(tables_);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t dim = dim_ + 64 * pass;
      if (dim >= tables_.half) continue;
#pragma unroll 1
      for (int row = row_; row < Traits::kKvTile; row += kBatch * kStep) {
        turn_rows(tile, dim, row, now_[pass], step_[pass], zip);
      }
    }
    __syncwarp();
  }

 private:
  static constexpr int kStep = kHalf < 64 ? 64 / kHalf : 1;  // rows that a warp has at once
  static constexpr int kBatch = 4;                           // loads under way together
  static_assert(dtype_size(Traits::kKv) == 2 && Traits::kKvTile % (kBatch * kStep) == 0);

  FLASHBSR_DEVICE static uint32_t place(uint32_t tile, int row, int32_t dim) {
    return tile + decode_tile_offset<Traits>(row, dim / 8) + dim % 8 * 2;
  }

  FLASHBSR_DEVICE void turn_rows(uint32_t tile, int32_t dim, int row, Angles& now,
                                 const Angles& step, const Zip& zip) const {
    uint32_t x[kBatch], y[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      x[i] = ptx::load_shared(place(tile, row + i * kStep, dim));
      y[i] = ptx::load_shared(place(tile, row + i * kStep, dim + tables_.half));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      zip(x[i], y[i]);
      turn<Traits::kKv>(now.at, x[i], y[i]);
      now.advance(step);
      ptx::store_shared(place(tile, row + i * kStep, dim), x[i]);
      ptx::store_shared(place(tile, row + i * kStep, dim + tables_.half), y[i]);
    }
  }

  const RopeTables& tables_;
  const int32_t dim_;  // the lower one of the first pair, below 64
  const int32_t row_;  // the first one, among those that a warp has at once
  Angles now_[kPasses];
  Angles step_[kPasses];
};

/// The tile of a stage at key `first` where keys are a share, whose positions do not follow each
/// other: every row has its angles from the tables. Rows from `end` on are masked.
template <class Traits>
FLASHBSR_DEVICE void rotate_share(const KernelArgs& args, uint32_t tile, int32_t first, int32_t end,
                                  int lane) {
  const RopeTables& tables = args.params.rope;
  const Zip zip(tables);
#pragma unroll 1
  for (int row = 0; row < Traits::kKvTile; ++row) {
    const int32_t position = args.share.position(min_of(first + row, end - 1));
#pragma unroll 1
    for (int32_t dim = 2 * lane; dim < tables.half; dim += 64) {
      const auto place = [&](int32_t d) {
        return tile + decode_tile_offset<Traits>(row, d / 8) + d % 8 * 2;
      };
      uint32_t x = ptx::load_shared(place(dim)), y = ptx::load_shared(place(dim + tables.half));
      zip(x, y);
      turn<Traits::kKv>(Angles::of(tables, Traits::kHeadDim, position, dim).at, x, y);
      ptx::store_shared(place(dim), x);
      ptx::store_shared(place(dim + tables.half), y);
    }
  }
  __syncwarp();
}

/// Two dims of a row of Q in global memory, `dim` and the next, as they are after the rotation.
template <DType kType>
FLASHBSR_DEVICE uint32_t rotated_word(const RopeTables& tables, int head_dim, int32_t position,
                                      const char* row, int dim) {
  const auto word = [&](int d) { return __ldg(reinterpret_cast<const uint32_t*>(row + 2 * d)); };
  const bool upper = dim >= tables.half;
  const int first = upper ? dim - tables.half : dim;
  if (first >= tables.half) return word(dim);
  uint32_t x = word(first), y = word(first + tables.half);
  Zip{tables}(x, y);
  turn<kType>(Angles::of(tables, head_dim, position, first).at, x, y);
  return upper ? y : x;
}

}  // namespace flashbsr
