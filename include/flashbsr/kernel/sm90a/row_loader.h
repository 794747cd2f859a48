// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Whole rows of a latent cache to shared memory, where they lie an odd multiple of 16 bytes apart:
// loads of matrices meet no bank twice, and nothing has to be swizzled. Rows of 576 and 656 bytes
// do not begin at lines, and a copy in columns of 128 bytes asks for two lines each.
//
//   656 bytes   lie there as in memory: 32 of them that follow each other are one bulk copy, others
//               one each. (512 bytes by a warp's lanes and the rest of three rows: pages of one
//               token in 152 us, not 112; H200, 64 x 8192.)
//   576 bytes   512 by a warp's lanes, tails of eight rows at once. (A bulk copy for each row: 106
//               us, not 95, 41 cycles each.) Those of 1152 bytes likewise.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr::sm90a {

/// One warp of three: two copy half of the rows of every tile each; the third loads Q, and tails
/// where they are copied apart.
template <class Traits>
class RowLoader {
 public:
  FLASHBSR_DEVICE RowLoader(const HopperArgs& args, const Shared<Traits>& shared, int32_t warp)
      : args_(args), shared_(shared), warp_(warp) {
    static_assert(Traits::kRowLoaders == 3 && Traits::kKvTile == 2 * kHalf);
  }

  FLASHBSR_DEVICE void run() {
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count == 0) return;
      if (warp_ < kTailWarp) {
        load_halves(tile);
      } else {
        load_item_queries(tile);
        load_tails(tile);
      }
    });
    if constexpr (!Traits::kWholeRows) ptx::cp_async_wait_all();
  }

 private:
  static constexpr int kHalf = 32;  ///< rows, of which each lane knows one
  static constexpr int kTailWarp = 2;

  FLASHBSR_DEVICE void load_item_queries(const Tile& tile) {
    shared_.query_pipeline.wait_empty(query_);
    if (lane() == 0) {
      load_queries(args_, shared_, tile, shared_.query_pipeline.full(0), query_.stage);
    }
    query_.advance();
  }

  FLASHBSR_DEVICE void load_halves(const Tile& tile) {
    const char* const rows = args_.base.params.k.row(0, 0, tile.item.kv_head);
    const int32_t first = warp_ * kHalf;
#pragma unroll 1
    for (int32_t j = tile.count - 1; j >= 0; --j, at_.advance()) {
      const int32_t owned = owned_of(tile, j) - first, count = max_of(min_of(owned, kHalf), 0);
      const int32_t place = take_place(first);
      pass_entry();
      shared_.key_pipeline.wait_empty(at_);
      const uint32_t to = tile_memory() + first * Traits::kRowStride;
      if constexpr (Traits::kWholeRows) {
        if (count < kHalf) zero(to + count * Traits::kRowStride, to + kHalf * Traits::kRowStride);
        // Every lane says so that has written zeros: race detectors see no further.
        if (lane() == 0) {
          ptx::mbarrier_expect_bytes(full(), count * Traits::kRowBytes);
        } else {
          ptx::mbarrier_arrive(full());
        }
        __syncwarp();
        copy_rows(rows, place, to, owned);
      } else {
        const char* const from = rows + lane() * 16;
#pragma unroll 8
        for (int r = 0; r < kHalf; ++r) {
          const char* const row = at(from, __shfl_sync(0xffffffffu, place, r));
#pragma unroll
          for (int i = 0; i < Traits::kLatentBytes; i += 512) {
            ptx::cp_async_16_if(to + r * Traits::kRowStride + lane() * 16 + i, row + i, r < count);
          }
        }
        ptx::cp_async_arrive(full());
      }
    }
  }

  /// Rows by bulk copies: `owned`, or a half of a tile.
  FLASHBSR_DEVICE void copy_rows(const char* from, int32_t place, uint32_t to,
                                 int32_t owned) const {
    static_assert(!Traits::kWholeRows || Traits::kRowStride == Traits::kRowBytes);
    const int64_t further = place - __shfl_sync(0xffffffffu, place, 0);
    const bool follows = further * args_.gather_unit == lane() * Traits::kRowBytes;
    // Not of the number of rows in [0, 32] whether it is 32: ptxas (13.0) makes that and the limits
    // one instruction with two predicates in one register, by which it never is, 109 us, not 95.
    if (__all_sync(0xffffffffu, follows) && owned >= kHalf) {
      if (lane() == 0) ptx::bulk_load(to, at(from, place), kHalf * Traits::kRowBytes, full());
      return;
    }
    // Places the same in all lanes, by shuffles, and so in uniform registers: otherwise a warp's
    // copies are a loop over its lanes. Several shuffles in front of the first copy: one by one
    // they are waited for.
    constexpr int kAtOnce = 8;
    const int32_t count = min_of(owned, kHalf);
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      int32_t places[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) places[i] = __shfl_sync(0xffffffffu, place, first + i);
      if (ptx::elect_one()) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= count) break;
          ptx::bulk_load(to + (first + i) * Traits::kRowStride, at(from, places[i]),
                         Traits::kRowBytes, full());
        }
      }
    }
    __syncwarp();
  }

  /// What an item does not own: what lies there may be NaN.
  FLASHBSR_DEVICE static void zero(uint32_t begin, uint32_t end) {
#pragma unroll 1
    for (uint32_t at = begin + lane() * 16; at < end; at += 32 * 16) ptx::zero_shared(at);
    ptx::fence_async_proxy();  // copies come to this place again
    __syncwarp();
  }

  FLASHBSR_DEVICE void load_tails(const Tile& tile) {
    constexpr int kChunks = Traits::kTailBytes / 16, kAtOnce = 32 / kChunks;  // rows
    const int32_t chunk = lane() % kChunks;
    const char* const from = args_.base.params.k_tail.row(0, 0, tile.item.kv_head) + chunk * 16;
#pragma unroll 1
    for (int32_t j = tile.count - 1; j >= 0; --j, at_.advance()) {
      pass_entry();
      if constexpr (Traits::kWholeRows) {
        pass_entry();
      } else {
        const int32_t owned = owned_of(tile, j), low = place_of(0), high = take_place(kHalf);
        shared_.key_pipeline.wait_empty(at_);
        const uint32_t to = tile_memory() + Traits::kTailOffset + chunk * 16;
#pragma unroll
        for (int first = 0; first < Traits::kKvTile; first += kAtOnce) {
          const int32_t row = first + lane() / kChunks;
          const int32_t place = __shfl_sync(0xffffffffu, first < kHalf ? low : high, row % kHalf);
          ptx::cp_async_16_if(to + row * Traits::kRowStride, at(from, place), row < owned);
        }
        ptx::cp_async_arrive(full());
      }
    }
  }

  FLASHBSR_DEVICE static int32_t owned_of(const Tile& tile, int32_t j) {
    return tile.item.kv_end - tile.start - j * Traits::kKvTile;
  }
  FLASHBSR_DEVICE const char* at(const char* from, int32_t place) const {
    return from + static_cast<int64_t>(place) * args_.gather_unit;
  }
  FLASHBSR_DEVICE uint32_t tile_memory() const {
    return shared_.keys + at_.stage * Traits::kKeyBytes;
  }
  FLASHBSR_DEVICE uint32_t full() const { return shared_.key_pipeline.full(at_.stage); }

  /// Of this lane's row of the half from `first` on.
  FLASHBSR_DEVICE int32_t place_of(int32_t first) const {
    shared_.place_pipeline.wait_full(entry_);
    const uint32_t entry = shared_.places + entry_.stage * Traits::kPlaceBytes;
    return static_cast<int32_t>(
        ptx::load_shared(entry + PlaceEntry<Traits>::of_row(first + lane())));
  }
  FLASHBSR_DEVICE int32_t take_place(int32_t first) {
    const int32_t place = place_of(first);
    shared_.place_pipeline.release(entry_);
    entry_.advance();
    return place;
  }
  /// Places of what others copy.
  FLASHBSR_DEVICE void pass_entry() {
    shared_.place_pipeline.wait_full(entry_);
    shared_.place_pipeline.release(entry_);
    entry_.advance();
  }

  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t warp_;
  typename Shared<Traits>::KvPipeline::Place at_;
  typename Shared<Traits>::PlacePipeline::Place entry_;
  typename Shared<Traits>::QueryPipeline::Place query_;
};

}  // namespace flashbsr::sm90a
