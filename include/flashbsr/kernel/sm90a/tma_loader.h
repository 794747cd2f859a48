// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Who loads Q, K and V by TMA: a warp each for K, with Q, and for V, or one for all of them where
// others prepare what has arrived.
//
// Tiles are loaded from the last to the first, as the consumers need them; Q behind the first K.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>

namespace flashbsr::sm90a {

/// Loads K, and Q, or V, by TMA: one warp each, because boxes cost their warp time. Lane l knows
/// where the box at token l * box_tokens of every tile is.
template <class Traits, bool kKeys>
class TmaLoader {
 public:
  FLASHBSR_DEVICE TmaLoader(const HopperArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), lane_(lane), boxes_(Traits::kKvTile / args.box_tokens) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      const Unowned<Traits> unowned(tile);
      Source next = source(tile, tile.count - 1);
      ptx::wait_for_prerequisites<kArch>();
      if (kKeys && tile.count == 0) let_claim(shared_, tile, -1);
#pragma unroll 1
      for (int32_t j = tile.count - 1; j >= 0; --j) {
        if (kKeys) let_claim(shared_, tile, j);
        const Source now = next;
        next = source(tile, j - 1);
        const bool dirty = kKeys == Traits::kLatent && unowned.in_tile(j, tile.count);
        load(tile, now, dirty, tile.count - 1 - j);
        if (kKeys && j == tile.count - 1) {
          shared_.query_pipeline.wait_empty(query_);
          if (lane_ == 0)
            load_queries(args_, shared_, tile, shared_.query_pipeline.full(0), query_.stage);
          query_.advance();
          // The next K is not needed yet: all blocks begin at once, and the memory takes 5 us for
          // as much as all stages hold.
          if (!begun_) shared_.query_pipeline.wait_full({});
          begun_ = true;
        }
      }
    });
  }

  static constexpr int32_t kOutside = 0x7fffffff;  ///< no page: zeros
  /// Of a stage: a tile, or a part of one.
  static constexpr int kParts = kKeys ? Traits::kKeyParts : 1;
  static constexpr int kColumns =
      (kKeys ? Traits::kLandingColumnsQk : Traits::kLandingColumnsVo) / kParts;
  static constexpr int kBytes =
      (kKeys ? Traits::kLandingKeyBytes : Traits::kLandingValueBytes) / kParts;
  /// Boxes whose coordinates are worked out before their stage is free, where tiles have several. A
  /// loop that does it box by box has no time for that in tiles of 128 tokens: pages of 16 take 344
  /// us, not 357 (2 x q256 over 30000, H200). Where tiles are smaller it is as fast, with less
  /// code.
  static constexpr int kAtOnce =
      Traits::kRows == 128 && Traits::kKvTile == 128 && !Traits::kPreparesValues && !Traits::kMixed
          ? 8
          : 1;

  /// Where a lane's box of a tile is.
  struct Source {
    int32_t token;
    int32_t page;
  };

  FLASHBSR_DEVICE Source source(const Tile& tile, int32_t j) const {
    const int32_t position = tile.start + j * Traits::kKvTile + lane_ * args_.box_tokens;
    if (args_.path == KvPath::kRagged) return {tile.request.kv_begin + position, 0};
    if (j < 0 || lane_ >= boxes_ || position >= tile.item.kv_end) return {0, kOutside};
    const int32_t page = args_.base.page_size.quotient(position);
    const int32_t token = args_.base.page_size.remainder(position, page);
    return {token, args_.base.kv_indices[tile.request.kv_begin + page]};
  }

  /// @param aside  not full when it has arrived: V is to be cleaned, or K to be rotated
  /// @param nth    of the item's tiles, in the order in which they are loaded
  FLASHBSR_DEVICE void load(const Tile& tile, const Source& from, bool aside, int32_t nth = 0) {
#pragma unroll 1
    for (int n = 0; n < kParts; ++n) {
      load_part(tile, from, aside, kKeys ? nth_part<Traits>(n, nth) : 0);
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n) at_.advance();
  }

 private:
  FLASHBSR_DEVICE const auto& pipeline() const {
    if constexpr (kKeys) {
      return shared_.landing_key_pipeline;
    } else {
      return shared_.landing_value_pipeline;
    }
  }

  FLASHBSR_DEVICE void load_part(const Tile& tile, const Source& from, bool aside, int part) {
    if (kAtOnce == 1 || boxes_ == 1) {
      load_boxes<1>(tile, from, aside, part);
    } else {
      load_boxes<kAtOnce>(tile, from, aside, part);
    }
  }

  /// @tparam kCount  boxes whose coordinates are known before the stage is free, if several
  template <int kCount>
  FLASHBSR_DEVICE void load_boxes(const Tile& tile, const Source& from, bool aside, int part) {
    const auto& pipeline = this->pipeline();
    const int32_t stage = at_.stage + part;
    // The same in all lanes, and so in uniform registers, which copies take their coordinates from.
    int32_t token[kCount], page[kCount];
    const auto find = [&](int first) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        token[i] = __shfl_sync(0xffffffffu, from.token, first + i);
        page[i] = __shfl_sync(0xffffffffu, from.page, first + i);
      }
    };
    if (kCount > 1) find(0);
    pipeline.wait_empty({stage, at_.parity});
    const uint32_t full =
        aside ? (kKeys ? shared_.raw_keys : shared_.raw_values) + 8 * stage : pipeline.full(stage);
    if (lane_ == 0) ptx::mbarrier_expect_bytes(full, kBytes);
    __syncwarp();
    const int32_t head = __shfl_sync(0xffffffffu, tile.item.kv_head, 0);
    const uint32_t step = args_.box_tokens * 128;
    uint32_t dst = (kKeys ? shared_.landing_keys : shared_.landing_values) + stage * kBytes;
#pragma unroll 1  // less code to be fetched when a kernel begins: 5 KB
    for (int b = 0; b < boxes_; b += kCount, dst += kCount * step) {
      if (kCount == 1 || b > 0) find(b);
      if (ptx::elect_one()) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i > 0 && b + i >= boxes_) break;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            ptx::tma_load(dst + i * step + c * Traits::kKvTile * 128, kKeys ? args_.k : args_.v,
                          full, (part * kColumns + c) * Traits::kLandingDims, token[i], head,
                          page[i]);
          }
        }
      }
    }
    __syncwarp();
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t lane_;
  const int32_t boxes_;  ///< of a tile
  typename Shared<Traits>::template LandingOf<kKeys>::Place at_;
  typename Shared<Traits>::QueryPipeline::Place query_;
  bool begun_ = false;
};

/// Loads Q, K and V by TMA. One warp, where others prepare what has arrived.
template <class Traits>
class PairLoader {
 public:
  FLASHBSR_DEVICE PairLoader(const HopperArgs& args, const Shared<Traits>& shared, bool rotates,
                             int32_t lane)
      : args_(args),
        shared_(shared),
        lane_(lane),
        rotates_(rotates),
        keys_(args, shared, lane),
        values_(args, shared, lane) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      const Unowned<Traits> unowned(tile);
      auto next = keys_.source(tile, tile.count - 1);
      ptx::wait_for_prerequisites<kArch>();
      if (tile.count == 0) let_claim(shared_, tile, -1);
#pragma unroll 1
      for (int32_t j = tile.count - 1; j >= 0; --j) {
        let_claim(shared_, tile, j);
        const auto now = next;
        next = keys_.source(tile, j - 1);
        keys_.load(tile, now, rotates_);
        if (j == tile.count - 1) {
          shared_.query_pipeline.wait_empty(query_);
          const uint32_t full = rotates_ ? shared_.raw_queries : shared_.query_pipeline.full(0);
          if (lane_ == 0) load_queries(args_, shared_, tile, full, query_.stage);
          query_.advance();
        }
        // Who prepares V cleans it, too.
        const bool dirty = !Traits::kPreparesValues && unowned.in_tile(j, tile.count);
        values_.load(tile, {now.token, now.page}, dirty);
      }
    });
  }

 private:
  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t lane_;
  const bool rotates_;
  TmaLoader<Traits, true> keys_;
  TmaLoader<Traits, false> values_;
  typename Shared<Traits>::QueryPipeline::Place query_;
};

}  // namespace flashbsr::sm90a
