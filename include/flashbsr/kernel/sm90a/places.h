// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of K and V tiles are that are gathered: the warp that schedules looks them up, a
// tile or two ahead, and leaves them in shared memory for the warps that copy (gather.h). Those
// have no time for it: look-ups were a third of theirs.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// An entry of the ring of places: a tile of K, then the same of V, and so on. Numbers are
/// args.gather_unit bytes, from row 0 of the head. A lane copies every fourth row of its warp's, or
/// widens every eighth one of the tile: its numbers lie side by side.
template <class Traits>
struct PlaceEntry {
  static constexpr int kRows = Traits::kKvTile / Shared<Traits>::kGatherWarps;  ///< of a warp
  static constexpr int kTurns = kRows / 4;  ///< in which a warp copies them
  static_assert(kRows % 8 == 0);

  /// Byte of a row's number.
  FLASHBSR_DEVICE static int32_t of_row(int32_t row) {
    if constexpr (Traits::kWideners > 0) return 4 * (row % 8 * (Traits::kKvTile / 8) + row / 8);
    const int32_t in_warp = row % kRows;
    return 4 * (row - in_warp + in_warp % 4 * kTurns + in_warp / 4);
  }
  /// Byte of a lane's first.
  FLASHBSR_DEVICE static int32_t of_lane(int32_t warp, int32_t lane) {
    return 4 * (warp * kRows + lane / 8 * kTurns);
  }
};

/// Looks up rows. One warp.
template <class Traits>
class RowFinder {
 public:
  FLASHBSR_DEVICE RowFinder(const HopperArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), lane_(lane) {}

  /// The rows of the item's tile `j`. Those behind its end are not copied: the last is found
  /// instead.
  FLASHBSR_DEVICE void find(const Tile& tile, int32_t j) {
    const KernelArgs& base = args_.base;
    int32_t page[kRuns], slot[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int32_t at =
          min_of(tile.start + j * Traits::kKvTile + lane_ + 32 * i, tile.item.kv_end - 1);
      page[i] = base.page_size.quotient(at);
      slot[i] = base.page_size.remainder(at, page[i]);
      page[i] += tile.request.kv_begin;
      if (base.kv_indices) page[i] = base.kv_indices[page[i]];
    }
    write(args_.key_steps, page, slot);
    write(args_.value_steps, page, slot);
  }

 private:
  static constexpr int kRuns = ceil_div(Traits::kKvTile, 32);

  FLASHBSR_DEVICE void write(const GatherSteps& steps, const int32_t (&page)[kRuns],
                             const int32_t (&slot)[kRuns]) {
    shared_.place_pipeline.wait_empty(at_);
    const uint32_t entry = shared_.places + at_.stage * Traits::kPlaceBytes;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int32_t row = lane_ + 32 * i;
      if (row >= Traits::kKvTile) break;
      ptx::store_shared(entry + PlaceEntry<Traits>::of_row(row),
                        static_cast<uint32_t>(page[i] * steps.page + slot[i] * steps.token));
    }
    ptx::mbarrier_arrive(shared_.place_pipeline.full(at_.stage));
    at_.advance();
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t lane_;
  typename Shared<Traits>::PlacePipeline::Place at_;
};

}  // namespace flashbsr::sm90a
