// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Scales of every token and head, beside the tiles of K and V: the warp that schedules looks tokens
// up and copies their scales. Consumers multiply logits by K's, and weights by V's before these are
// packed. A stage of K is full when its scales have arrived, too. They are free when weights have
// taken them, a step before V of the stage is, and have barriers that say so: e4m3 is 2.5 % faster
// than with those of V.
//
// Where a pass has widened the codes (ops/dequantize_pages.h) they are K's factors, which lie by
// tokens: no look-ups.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// Copies scales of tokens. One warp.
template <class Traits>
class ScaleCopier {
 public:
  FLASHBSR_DEVICE ScaleCopier(const KernelArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), lane_(lane) {}

  /// Of the item's tile `j`. Those that are not the item's are zeros: weights of nothing stay
  /// nothing.
  FLASHBSR_DEVICE void copy(const Tile& tile, int32_t j) {
    if constexpr (Traits::kPassed) {
      copy_in_order(tile, j);
    } else {
      copy_by_pages(tile, j);
    }
  }

 private:
  using Place = typename Shared<Traits>::KvPipeline::Place;
  static constexpr int kRuns = ceil_div(Traits::kKvTile, 32);

  FLASHBSR_DEVICE void copy_in_order(const Tile& tile, int32_t j) {
    const PagedView &a = args_.params.k_scales, &b = args_.params.v_scales;
    const int32_t first = first_of(tile, j);
    const int64_t nth =
        tile.item.kv_head * a.stride_head + int64_t{tile.request.kv_begin} * a.stride_page + first;
    const PagedView& first_side = Traits::kKeyHalves ? a : b;
    const char* from = static_cast<const char*>(first_side.data) + 4 * nth;
    const int64_t to_b = static_cast<const char*>(b.data) - static_cast<const char*>(a.data);
    const Place at = Place::after(tiles_++);
    wait_empty(at);
    const uint32_t to = shared_.token_scales + at.stage * Traits::kScaleBytes + 4 * lane_;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (Traits::kKvTile % 32 && lane_ + 32 * i >= Traits::kKvTile) break;
      const int32_t token = first + 32 * i;
      const bool owned = token >= tile.item.kv_begin && token < tile.item.kv_end;
      ptx::cp_async_4_if(to + 128 * i, from + 128 * i, owned);
      if (!Traits::kKeyHalves) continue;
      ptx::cp_async_4_if(to + 128 * i + Traits::kScaleBytes / 2, from + 128 * i + to_b, owned);
    }
    ptx::cp_async_arrive(shared_.key_pipeline.full(at.stage));
  }

  FLASHBSR_DEVICE void copy_by_pages(const Tile& tile, int32_t j) {
    int32_t page[kRuns], slot[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {  // all look-ups are under way before one is waited for
      const int32_t at =
          max_of(min_of(first_of(tile, j) + 32 * i, tile.item.kv_end - 1), tile.item.kv_begin);
      page[i] = args_.page_size.quotient(at);
      slot[i] = args_.page_size.remainder(at, page[i]);
      page[i] += tile.request.kv_begin;
      if (args_.kv_indices) page[i] = args_.kv_indices[page[i]];
    }
    const Place at = Place::after(tiles_++);
    wait_empty(at);
    const uint32_t to = shared_.token_scales + at.stage * Traits::kScaleBytes;
    copy_side(args_.params.k_scales, tile, j, to, page, slot);
    copy_side(args_.params.v_scales, tile, j, to + Traits::kScaleBytes / 2, page, slot);
    ptx::cp_async_arrive(shared_.key_pipeline.full(at.stage));
  }

  FLASHBSR_DEVICE void wait_empty(const Place& at) const {
    ptx::mbarrier_wait<kArch>(shared_.scales_empty + 8 * at.stage, at.parity ^ 1);
  }

  FLASHBSR_DEVICE int32_t first_of(const Tile& tile, int32_t j) const {
    return tile.start + j * Traits::kKvTile + lane_;
  }

  FLASHBSR_DEVICE void copy_side(const PagedView& view, const Tile& tile, int32_t j, uint32_t to,
                                 const int32_t (&page)[kRuns], const int32_t (&slot)[kRuns]) const {
    const char* head =
        static_cast<const char*>(view.data) + 4 * tile.item.kv_head * view.stride_head;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (Traits::kKvTile % 32 && lane_ + 32 * i >= Traits::kKvTile) break;
      const int32_t at = first_of(tile, j) + 32 * i;
      const int64_t offset = page[i] * view.stride_page + slot[i] * view.stride_token;
      ptx::cp_async_4_if(to + 4 * (lane_ + 32 * i), head + 4 * offset,
                         at >= tile.item.kv_begin && at < tile.item.kv_end);
    }
  }

  const KernelArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t lane_;
  uint32_t tiles_ = 0;  ///< of the block, so far
};

}  // namespace flashbsr::sm90a
