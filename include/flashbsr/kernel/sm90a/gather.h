// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// K and V row by row through cp.async: for pages and blocks of so few tokens that their boxes would
// be too many for TMA.
//
// Two warps copy half of a tile's rows each, four rows of 128 bytes at a time. They wait for free
// stages and for the places of rows, which the scheduler looks up (places.h), but not for copies:
// those announce themselves where they land. A third warp makes visible to the products what has
// landed (Relay), or prepares it. An instruction costs a warp that has so few of them 7 to 13
// cycles: 190 of them for a part of K or V were the limit of pages of one token.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr::sm90a {

template <class Traits>
class Gather {
 public:
  /// @param query_barriers  where Q announces that it has arrived, by stage
  FLASHBSR_DEVICE Gather(const HopperArgs& args, const Shared<Traits>& shared,
                         uint32_t query_barriers, int32_t warp)
      : args_(args), shared_(shared), query_barriers_(query_barriers), warp_(warp) {}

  FLASHBSR_DEVICE void run() {
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count > 0) load(tile);
    });
    ptx::cp_async_wait_all();
  }

 private:
  using Entry = PlaceEntry<Traits>;

  FLASHBSR_DEVICE void load(const Tile& tile) {
    const char* const keys = first_row(args_.base.params.k, tile);
    const char* const values = first_row(second(), tile);
#pragma unroll 1
    for (int32_t j = tile.count - 1; j >= 0; --j, at_.advance()) {
      const int32_t owned = tile.item.kv_end - tile.start - j * Traits::kKvTile;
      wait_for_rotation();
#pragma unroll 1
      for (int n = 0; n < Traits::kKeyParts; ++n) {
        const int part = nth_part<Traits>(n, tile.count - 1 - j);
        copy_keys(keys, owned, part, n + 1 == Traits::kKeyParts);
      }
#pragma unroll
      for (int n = 0; n < Traits::kKeyParts; ++n) key_at_.advance();
      if (warp_ == 0 && j == tile.count - 1) {
        shared_.query_pipeline.wait_empty(query_);
        if (lane() == 0) load_queries(args_, shared_, tile, query_barriers_, query_.stage);
        query_.advance();
      }
      copy_values(values, owned);
    }
  }

  /// The lane's 16 bytes of a head's row 0.
  FLASHBSR_DEVICE const char* first_row(const PagedView& from, const Tile& tile) const {
    const char* row = from.row(0, 0, tile.item.kv_head) + (lane() & 7) * 16;
    asm volatile("" : "+l"(row));  // in registers: otherwise it is added up anew for every row
    return row;
  }

  FLASHBSR_DEVICE void wait_for_rotation() const {
    if constexpr (Traits::kRotates) {
      // Who rotated the tile before has been waited for, through the consumers; race detectors do
      // not see that far.
      ptx::mbarrier_wait<kArch>(shared_.key_pipeline.full(at_.stage), at_.parity ^ 1);
    }
  }

  FLASHBSR_DEVICE void copy_keys(const char* from, int32_t owned, int part, bool last) {
    constexpr int kColumns = Traits::kLandingColumnsQk / Traits::kKeyParts;
    auto at = key_at_;
    at.stage += part;
    copy<kColumns>(shared_.landing_key_pipeline, at,
                   Traits::kPreparesKeys ? shared_.landing_key_pipeline.full(0) : shared_.raw_keys,
                   shared_.landing_keys + at.stage * (Traits::kLandingKeyBytes / Traits::kKeyParts),
                   args_.base.params.k.dim - part * kColumns * Traits::kLandingDims,
                   from + part * kColumns * 128, owned, last);
  }

  FLASHBSR_DEVICE void copy_values(const char* from, int32_t owned) {
    copy<Traits::kLandingColumnsVo>(
        shared_.landing_value_pipeline, at_,
        Traits::kPreparesValues ? shared_.landing_value_pipeline.full(0) : shared_.raw_values,
        shared_.landing_values + at_.stage * Traits::kLandingValueBytes, second().dim, from, owned,
        true);
  }
  /// What comes beside K: V, or where that is a part of K, the rest of K.
  FLASHBSR_DEVICE const PagedView& second() const {
    return Traits::kLatent ? args_.base.params.k_tail : args_.base.params.v;
  }

  /// @param landed  where copies announce themselves, by stage
  /// @param dim     elements of a row from the first column on
  /// @param owned   rows of the tile up to the item's end
  /// @param last    the places of the rows are not needed again
  template <int kColumns, class Ring>
  FLASHBSR_DEVICE void copy(const Ring& ring, const typename Ring::Place& at, uint32_t landed,
                            uint32_t to, int32_t dim, const char* from, int32_t owned, bool last) {
    const int32_t row_bytes =
        min_of(dim * dtype_size(Traits::kKvType), Traits::kLatent ? kColumns * 128 : 0x7fffffff);
    const int32_t chunk = lane() & 7, row = lane() >> 3;
    const int32_t first = warp_ * Entry::kRows + row;
    to += first * 128 + ((chunk ^ row) << 4);
    shared_.place_pipeline.wait_full(entry_);
    ring.wait_empty(at);
    if (owned >= Traits::kKvTile && row_bytes == kColumns * 128) {
      copy_rows<kColumns, true>(to, from, 0, 0, last);
    } else {
      copy_rows<kColumns, false>(to, from, owned - first, row_bytes - chunk * 16, last);
    }
    ptx::cp_async_arrive(landed + 8 * at.stage);
    if (last) entry_.advance();
  }

  /// @tparam kWhole       every row and every column exists; otherwise zeros where there is none
  /// @param  rows, bytes  that exist from the lane's first ones on
  template <int kColumns, bool kWhole>
  FLASHBSR_DEVICE void copy_rows(uint32_t to, const char* from, int32_t rows, int32_t bytes,
                                 bool last) const {
    constexpr int kBatch = min_of(Entry::kTurns, 10);  // places read at once
    const uint32_t places =
        shared_.places + entry_.stage * Traits::kPlaceBytes + Entry::of_lane(warp_, lane());
#pragma unroll
    for (int t = 0; t < Entry::kTurns; t += kBatch) {
      int32_t units[kBatch];
#pragma unroll
      for (int b = 0; b < min_of(kBatch, Entry::kTurns - t); b += 2) {
        ptx::load_shared(places + 4 * (t + b), units[b], units[b + 1]);
      }
      if (last && t + kBatch >= Entry::kTurns) shared_.place_pipeline.release(entry_);
#pragma unroll
      for (int b = 0; b < min_of(kBatch, Entry::kTurns - t); ++b) {
        const char* const src = from + static_cast<int64_t>(units[b]) * args_.gather_unit;
        const uint32_t dst = to + (t + b) * 512;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if constexpr (kWhole) {
            ptx::cp_async_16(dst + c * Traits::kKvTile * 128, src + c * 128);
          } else {
            ptx::cp_async_16_if(dst + c * Traits::kKvTile * 128, src + c * 128,
                                (t + b) * 4 < rows && c * 128 < bytes);
          }
        }
        // The next row of a lane is four on: the swizzle takes two forms in turn.
        to ^= 64;
      }
    }
  }

  /// Asked for anew: 32 registers are few.
  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() & 31; }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const uint32_t query_barriers_;
  const int32_t warp_;
  typename Shared<Traits>::template LandingOf<false>::Place at_;
  typename Shared<Traits>::template LandingOf<true>::Place key_at_;
  typename Shared<Traits>::PlacePipeline::Place entry_;
  typename Shared<Traits>::QueryPipeline::Place query_;
};

/// Waits for what cp.async wrote, a tile of K or V, and announces it to the products, which go
/// another way. One warp that has no copies under way: the fence would wait for them.
/// @param landed  where the copies arrive, by stage
template <class Ring>
FLASHBSR_DEVICE void relay(uint32_t landed, const Ring& ring, const typename Ring::Place& at) {
  ptx::mbarrier_wait<kArch>(landed + 8 * at.stage, at.parity);
  ptx::fence_async_proxy();
  __syncwarp();
  if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ring.full(at.stage));
}

/// Announces what has been gathered. One warp.
template <class Traits>
class Relay {
 public:
  FLASHBSR_DEVICE explicit Relay(const Shared<Traits>& shared) : shared_(shared) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      for (int32_t j = 0; j < tile.count; ++j, at_.advance()) {
#pragma unroll
        for (int n = 0; n < Traits::kKeyParts; ++n) {
          auto at = key_at_;
          at.stage += nth_part<Traits>(n, j);
          relay(shared_.raw_keys, shared_.key_pipeline, at);
        }
#pragma unroll
        for (int n = 0; n < Traits::kKeyParts; ++n) key_at_.advance();
        relay(shared_.raw_values, shared_.value_pipeline, at_);
      }
    });
  }

 private:
  const Shared<Traits>& shared_;
  typename Shared<Traits>::KvPipeline::Place at_;
  typename Shared<Traits>::KeyPipeline::Place key_at_;
};

}  // namespace flashbsr::sm90a
