// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// K and V row by row through cp.async: for pages and blocks that are no multiple of 8 tokens, which
// TMA cannot put into a swizzled tile.
//
// Each of the gathering warps copies a run of a tile's rows, four rows of 128 bytes at a time. Lane
// l knows where row l of the run is; its page id was loaded a tile earlier. Three tiles are in
// flight: copies are waited for, made visible to the products and announced two tiles later.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr::sm90a {

/// @tparam kWarps  warps that gather
template <class Traits, int kWarps>
class Gather {
 public:
  /// @param query_barriers, key_barriers  where Q and parts of K announce that they have arrived,
  ///                                      by stage
  FLASHBSR_DEVICE Gather(const HopperArgs& args, const Shared<Traits>& shared,
                         uint32_t query_barriers, uint32_t key_barriers, int32_t warp, int32_t lane)
      : args_(args),
        shared_(shared),
        query_barriers_(query_barriers),
        key_barriers_(key_barriers),
        warp_(warp),
        lane_(lane) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count > 0) load(tile);
    });
  }

 private:
  using Place = typename Shared<Traits>::KvPipeline::Place;
  /// What is copied is widened or rotated next, by another warp: every thread arrives
  /// (Shared::init_barriers).
  static constexpr bool kPrepared = kWarps == Shared<Traits>::kSharingGatherWarps;
  static constexpr bool kRotated = kPrepared && !Traits::kPreparesValues;
  static constexpr int kRowsPerWarp = round_up(ceil_div(Traits::kKvTile, kWarps), 4);
  static constexpr int kRuns = ceil_div(kRowsPerWarp, 32);  ///< of rows that a lane knows one of

  /// The pages of a lane's rows of a tile, -1 outside of the item.
  struct Rows {
    int32_t page[kRuns];
  };

  FLASHBSR_DEVICE void load(const Tile& tile) {
    const int32_t last = tile.count - 1;
    Rows key = rows(tile, last), next = rows(tile, last - 1);
    copy_keys(tile, last, key);
    if (warp_ == 0) {
      shared_.query_pipeline.wait_empty(query_);
      if (lane_ == 0) load_queries(args_, shared_, tile, query_barriers_, query_.stage);
      query_.advance();
    }
    for (int32_t j = last; j >= 0; --j) {
      const Rows value = key;
      key = next;
      if (j > 0) {
        next = rows(tile, j - 2);
        copy_keys(tile, j - 1, key);
      }
      shared_.landing_value_pipeline.wait_empty(value_);
      copy<Traits::kLandingColumnsVo>(shared_.landing_value_pipeline.full(0), value_,
                                      shared_.landing_values, Traits::kLandingValueBytes,
                                      args_.base.params.v, tile, j, value);
    }
    // The next item may depend on the end of this one.
    ptx::cp_async_wait_all();
    announce(pending_[0]);
    announce(pending_[1]);
    pending_[0] = pending_[1] = 0;
  }

  /// KV position of a lane's row `i`.
  FLASHBSR_DEVICE int32_t position(const Tile& tile, int32_t j, int i) const {
    return tile.start + j * Traits::kKvTile + warp_ * kRowsPerWarp + 32 * i + lane_;
  }

  FLASHBSR_DEVICE Rows rows(const Tile& tile, int32_t j) const {
    Rows r;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int32_t at = position(tile, j, i);
      r.page[i] = -1;
      if (j < 0 || at >= tile.item.kv_end) continue;
      const int32_t page = args_.base.page_size.quotient(at);
      r.page[i] = tile.request.kv_begin + page;
      if (args_.base.kv_indices) r.page[i] = args_.base.kv_indices[r.page[i]];
    }
    return r;
  }

  FLASHBSR_DEVICE void copy_keys(const Tile& tile, int32_t j, const Rows& rows) {
    shared_.landing_key_pipeline.wait_empty(key_);
    if constexpr (kRotated) {
      // Who rotated the tile before has been waited for, through the consumers; race detectors do
      // not see that far.
      ptx::mbarrier_wait<kArch>(shared_.key_pipeline.full(key_.stage), key_.parity ^ 1);
    }
    copy<Traits::kLandingColumnsQk>(key_barriers_, key_, shared_.landing_keys,
                                    Traits::kLandingKeyBytes, args_.base.params.k, tile, j, rows);
  }

  template <int kColumns>
  FLASHBSR_DEVICE void copy(uint32_t barriers, Place& at, uint32_t tiles, int32_t tile_bytes,
                            const PagedView& from, const Tile& tile, int32_t j, const Rows& rows) {
    const uint32_t tile_address = tiles + at.stage * tile_bytes;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      uint64_t mine = 0;  // of the lane's own row
      if (rows.page[i] >= 0) {
        const int32_t p = position(tile, j, i);
        const int32_t slot = args_.base.page_size.remainder(p, args_.base.page_size.quotient(p));
        mine = reinterpret_cast<uint64_t>(from.row(rows.page[i], slot, tile.item.kv_head));
      }
      const int32_t row_bytes = from.dim * dtype_size(Traits::kKvType);
      // Two warps that gather have no registers for both.
      if (kWarps == 3 && row_bytes == kColumns * 128 &&
          tile.start + (j + 1) * Traits::kKvTile <= tile.item.kv_end) {
        copy_run<kColumns, true>(i, tile_address, mine, row_bytes);
      } else {
        copy_run<kColumns, false>(i, tile_address, mine, row_bytes);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<2>();
    announce(pending_[0]);
    pending_[0] = pending_[1];
    pending_[1] = barriers + 8 * at.stage;
    at.advance();
  }

  /// Rows [32 i, 32 i + 32) of this warp's part of a tile; lane l knows the address of the l-th.
  /// @tparam kWhole  every row and every column exists
  template <int kColumns, bool kWhole>
  FLASHBSR_DEVICE void copy_run(int i, uint32_t tile, uint64_t mine, int32_t row_bytes) const {
    const int32_t chunk = lane_ % 8, first = warp_ * kRowsPerWarp + 32 * i + lane_ / 8;
    const int32_t rows = min_of(min_of(kRowsPerWarp - 32 * i, 32),
                                Traits::kKvTile - (warp_ * kRowsPerWarp + 32 * i));
    // The next row of a lane is four on: the swizzle takes two forms in turn.
    uint32_t dst = tile + first * 128 + ((chunk ^ first & 7) << 4);
    constexpr int kUnroll = kRuns > 1 ? 2 : 4;  // as far as 32 registers go
#pragma unroll kUnroll
    for (int r = 0; r < rows; r += 4) {
      const uint64_t source = __shfl_sync(0xffffffffu, mine, r + lane_ / 8);
      const char* from = reinterpret_cast<const char*>(source) + chunk * 16;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kWhole) {
          ptx::cp_async_16(dst + c * Traits::kKvTile * 128, from + c * 128);
        } else {
          const bool inside = source != 0 && c * 128 + chunk * 16 < row_bytes;
          ptx::cp_async_16_if(dst + c * Traits::kKvTile * 128, from + c * 128, inside);
        }
      }
      dst = (dst ^ 64) + 512;
    }
  }

  /// This warp's part of a tile has arrived.
  FLASHBSR_DEVICE void announce(uint32_t full) const {
    if (full == 0) return;
    ptx::fence_async_proxy();
    __syncwarp();
    if (kPrepared || lane_ == 0) ptx::mbarrier_arrive(full);
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const uint32_t query_barriers_, key_barriers_;
  const int32_t warp_;
  const int32_t lane_;
  Place key_, value_;
  typename Shared<Traits>::QueryPipeline::Place query_;
  uint32_t pending_[2] = {0, 0};  ///< barriers of tiles whose copies are under way
};

}  // namespace flashbsr::sm90a
