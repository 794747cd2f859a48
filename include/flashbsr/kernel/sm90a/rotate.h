// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// RoPE inside attention: 16-bit rows of K and Q are rotated in shared memory, where they landed.
//
//   warp 0          K, V by TMA             -> `raw` barriers for K, value_pipeline
//   warp 0          Q by TMA                -> `raw` barriers for Q
//   warps 1 and 2   K and Q rotated         -> key_pipeline, query_pipeline
//
// Heads that are rotated whole, in halves, have a loop of their own for K: the other one's two
// permutations and an address for each row are a tenth more instructions.
//
// A lane has two neighbouring pairs of dims (two times two at head dim 256) and goes from row to
// row: the angles of the first row of half a tile come from the tables, the next ones by angle-sum
// with a step of constant cosine and sine. That is as many operations as the tables ask for and no
// loads; 40 steps in fp32 lose 5e-6 at most, a thousandth of what bf16 rounds off.
#pragma once

#include <flashbsr/kernel/sm90a/gather.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/tile/rope.h>

namespace flashbsr::sm90a {

/// Where a lane's pairs of dims are in a swizzled row of 16-bit elements, and in the partner half.
template <class Traits>
struct PairPlace {
  static constexpr int kHalf = Traits::kHeadDimQk / 2;
  static constexpr int kPasses = kHalf > 64 ? kHalf / 64 : 1;  ///< of 64 pairs of a row
  static constexpr int kRowsAtOnce = kHalf < 64 ? 64 / kHalf : 1;

  int32_t dim;    ///< the lower one of the first pair, below 64
  int32_t row;    ///< among those that a warp has at once
  int32_t bytes;  ///< within the line of row 0

  FLASHBSR_DEVICE explicit PairPlace(int32_t lane)
      : dim(2 * lane % kHalf % 64), row(2 * lane / kHalf), bytes(2 * dim) {}

  /// Byte of the first pair in row `r` of a column.
  FLASHBSR_DEVICE int32_t in_row(int32_t r) const { return r * 128 + (bytes ^ ((r & 7) << 4)); }

  /// The word of the partners: in another column, or in the other half of the line.
  template <int kColumnBytes>
  FLASHBSR_DEVICE static uint32_t partner(uint32_t address) {
    return kHalf >= 64 ? address + kHalf / 64 * kColumnBytes : address ^ 64;
  }

  /// Byte of any even dim in row `r`.
  template <int kColumnBytes>
  FLASHBSR_DEVICE static int32_t of_dim(int32_t dim, int32_t r) {
    return dim / 64 * kColumnBytes + r * 128 + (dim % 64 * 2 ^ ((r & 7) << 4));
  }
};

/// Rotates K tiles and an item's Q, and cleans V, which Cleaner has no warp for then. One warp or
/// two: each has half of the rows, the first one V. What follows from the lane is worked out anew
/// for every tile: 32 registers are few.
template <class Traits>
class Rotator {
 public:
  FLASHBSR_DEVICE Rotator(const HopperArgs& args, const Shared<Traits>& shared)
      : args_(args), shared_(shared), cleaner_(shared) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count == 0) return;
      rotate_queries(tile);
      for (int32_t j = tile.count - 1; j >= 0; --j, ++tiles_) {
        rotate_keys(tile, j);
        const KvPlace at = KvPlace::after(tiles_);
        if (gathers()) {
          relay(shared_.raw_values, shared_.value_pipeline, at);
        } else if (half() == 0) {
          cleaner_.visit(tile, j, at.stage);
        }
      }
    });
  }

 private:
  using Place = PairPlace<Traits>;
  using KvPlace = typename Shared<Traits>::KvPipeline::Place;
  static constexpr int kDim = Traits::kHeadDimQk;
  static constexpr int kStep = Place::kRowsAtOnce;
  static constexpr int kKeyColumnBytes = Traits::kKvTile * 128;
  static constexpr int kQueryColumnBytes = Traits::kRows * 128;
  static_assert(Traits::kKvTile % 16 == 0);  // the loop toggles the swizzle an even number of times

  /// Both halves of a tile, or this warp's. The same operations whoever does it: bits must not
  /// depend on where pages lie.
  FLASHBSR_DEVICE void rotate_keys(const Tile& tile, int32_t j) {
    const KvPlace at = KvPlace::after(tiles_);
    if (gathers()) rotate_half(tile, j, 0, at);
    rotate_half(tile, j, gathers() ? 1 : half(), at);
    announce(shared_.key_pipeline.full(at.stage), gathers());
  }

  FLASHBSR_DEVICE void rotate_half(const Tile& tile, int32_t j, int32_t half, const KvPlace& at) {
    constexpr int kHalfRows = Traits::kKvTile / 2;
    const RopeTables& tables = args_.base.params.rope;
    const Place place(lane());
    const int32_t begin = half * kHalfRows;
    const uint32_t keys = shared_.keys + at.stage * Traits::kKeyBytes;
    // Rows behind the item's end are masked; the tables end there.
    const int32_t position = min_of(tile.start + j * Traits::kKvTile + begin, tile.item.kv_end - 1);
#pragma unroll 1
    for (int pass = 0; pass < Place::kPasses; ++pass) {
      const int32_t dim = place.dim + 64 * pass;
      Angles now = Angles::of(tables, kDim, position + place.row, dim);
      const Angles step = Angles::step(tables.fine + dim, kDim, kStep);
      ptx::mbarrier_wait<kArch>(shared_.raw_keys + 8 * at.stage, at.parity);
      const uint32_t first = keys + pass * kKeyColumnBytes + place.in_row(begin + place.row);
      if (tables.half == kDim / 2 && !tables.interleave) {
        rotate_pass(first, first + kHalfRows * 128, now, step);
        continue;
      }
      if (dim >= tables.half) continue;
#pragma unroll 1
      for (int32_t r = begin + place.row; r < begin + kHalfRows; r += kStep) {
        turn_row<kKeyColumnBytes>(keys, dim, r, now);
        now.advance(step);
      }
    }
  }

  /// The lane's words of a row, wherever the partners are.
  template <int kColumnBytes>
  FLASHBSR_DEVICE void turn_row(uint32_t rows, int32_t dim, int32_t r, const Angles& angles) const {
    const RopeTables& tables = args_.base.params.rope;
    const uint32_t at = rows + Place::template of_dim<kColumnBytes>(dim, r);
    const uint32_t other = rows + Place::template of_dim<kColumnBytes>(dim + tables.half, r);
    uint32_t x = ptx::load_shared(at), y = ptx::load_shared(other);
    Zip{tables}(x, y);
    turn<Traits::kType>(angles.at, x, y);
    ptx::store_shared(at, x);
    ptx::store_shared(other, y);
  }

  /// Words of the next rows are on their way while one is rotated.
  FLASHBSR_DEVICE static void rotate_pass(uint32_t at, uint32_t end, Angles& now,
                                          const Angles& step) {
    constexpr int kBatch = 4;  // rows; the swizzle of every other four differs by 64
    constexpr int kAhead = kBatch / kStep;
    uint32_t x[kAhead], y[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(below(at, i * kStep), x[i], y[i]);
#pragma unroll 1
    for (;;) {
      const uint32_t next = (at ^ 64) + kBatch * 128;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        turn<Traits::kType>(now.at, x[i], y[i]);
        now.advance(step);
        ptx::store_shared(below(at, i * kStep), x[i]);
        ptx::store_shared(partner(below(at, i * kStep)), y[i]);
        if (next != end) load(below(next, i * kStep), x[i], y[i]);
      }
      if (next == end) return;
      at = next;
    }
  }
  FLASHBSR_DEVICE static void load(uint32_t at, uint32_t& x, uint32_t& y) {
    x = ptx::load_shared(at);
    y = ptx::load_shared(partner(at));
  }
  FLASHBSR_DEVICE static uint32_t partner(uint32_t address) {
    return Place::template partner<kKeyColumnBytes>(address);
  }
  /// The lane's word `rows` further than the one at `at`: every row has another swizzle.
  FLASHBSR_DEVICE static uint32_t below(uint32_t at, int rows) {
    return (at ^ (rows << 4)) + rows * 128;
  }

  FLASHBSR_DEVICE void rotate_queries(const Tile& tile) {
    const auto query = Shared<Traits>::QueryPipeline::Place::after(items_++);
    const uint32_t rows = shared_.queries + query.stage * Traits::kQueryBytes;
    ptx::mbarrier_wait<kArch>(shared_.raw_queries + 8 * query.stage, query.parity);
    if (gathers()) rotate_query_half(tile, 0, rows);
    rotate_query_half(tile, gathers() ? 1 : half(), rows);
    announce(shared_.query_pipeline.full(query.stage), false);
  }

  FLASHBSR_DEVICE void rotate_query_half(const Tile& tile, int32_t half, uint32_t rows) {
    const RopeTables& tables = args_.base.params.rope;
    const FastDiv& group = args_.base.group;
    const int32_t heads = static_cast<int32_t>(group.divisor);
    const Place place(lane());
    const int32_t first = half * (Traits::kRows / 2) + place.row;
    const int32_t end = min_of((half + 1) * (Traits::kRows / 2), tile.item.row_count);
    const int32_t offset = tile.request.kv_len - tile.request.q_len;
#pragma unroll 1
    for (int pass = 0; pass < Place::kPasses; ++pass) {
      const int32_t dim = place.dim + 64 * pass;
      if (first >= end || dim >= tables.half) break;
      const int32_t packed = tile.item.row_begin + first, token = group.quotient(packed);
      Angles angles = Angles::of(tables, kDim, offset + token, dim);
      const Angles step = Angles::step(tables.fine + dim, kDim, 1);
      int32_t head = group.remainder(packed, token);
#pragma unroll 2
      for (int32_t r = first; r < end; r += kStep) {
        turn_row<kQueryColumnBytes>(rows, dim, r, angles);
        for (head += kStep; head >= heads; head -= heads) angles.advance(step);
      }
    }
  }

  FLASHBSR_DEVICE bool gathers() const { return args_.path == KvPath::kGather; }
  /// Which half of the rows this warp has, uniform. All threads call it.
  FLASHBSR_DEVICE int32_t half() const {
    return gathers() ? 0 : __shfl_sync(0xffffffffu, ptx::thread_index() / 32 - 1, 0);
  }
  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }
  FLASHBSR_DEVICE static void announce(uint32_t full, bool by_all) {
    ptx::fence_async_proxy();
    __syncwarp();
    if (by_all || lane() == 0) ptx::mbarrier_arrive(full);
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  uint32_t tiles_ = 0, items_ = 0;  ///< so far
  Cleaner<Traits> cleaner_;
};

}  // namespace flashbsr::sm90a
