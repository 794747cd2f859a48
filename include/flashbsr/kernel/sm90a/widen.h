// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// e4m3 and int8 on their way to 16-bit products: copies land in one ring, two warps write the tiles
// of another.
//
//   warp 0         K, V in bytes        -> landing pipelines; K multiplied as it is: its own
//   warps 1 and 2  bytes -> fp16, bf16  -> key_, value_pipeline; or four warps of their own
//
// Lines of both are 128 bytes in 128-byte swizzle, so a line of 128 dims becomes two of 64. A lane
// takes 8 bytes to 16, half a warp a line: neither side meets a bank twice.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/codes.h>

namespace flashbsr::sm90a {

/// Widens tiles, in units of eight lines: two warps have half of every unit each, or four a
/// quarter.
template <class Traits>
class Widener {
 public:
  /// @param warp   among the `warps`, one, two or four
  FLASHBSR_DEVICE Widener(const Shared<Traits>& shared, int32_t warp, int32_t warps, bool gather,
                          int32_t lane)
      : shared_(shared),
        gather_(gather),
        lane_(lane),
        begin_(warp * (4 / warps)),
        end_(begin_ + 4 / warps) {
    const int32_t line = lane / 16, piece = lane % 16;
    from_ = line * 128 + ((piece / 2 ^ line) << 4) + piece % 2 * 8;
    to_ = piece / 8 * kTileLines * 128 + line * 128 + ((piece % 8 ^ line) << 4);
  }

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      const Unowned<Traits> unowned(tile);
      for (int32_t j = tile.count - 1; j >= 0; --j) {
        if constexpr (Traits::kPreparesKeys) {
          widen_keys();
        } else if (gather() && begin_ == 0) {
          relay(shared_.raw_keys, shared_.key_pipeline, at_);
        }
        const int32_t head = j == 0 ? unowned.head : 0;
        const int32_t end = j == tile.count - 1 ? unowned.owned : kTileLines;
        widen_values(head, end);
        at_.advance();
        landing_.advance();
      }
    });
  }

 private:
  using Place = typename Shared<Traits>::KvPipeline::Place;
  using Ring = typename Shared<Traits>::KvPipeline;
  static constexpr int kTileLines = Traits::kKvTile;
  static constexpr int kUnits = kTileLines / 8;
  /// Loads under way, the next one asked for when one is taken: as far as 32 registers go. Batches
  /// of four, which a warp waits for, were 30 % of its time (H200).
  static constexpr int kAhead = Traits::kSideWideners > 0              ? 12
                                : Traits::kTokenScales && kUnits <= 10 ? 6
                                                                       : 4;
  /// A lane has a part of every other line of a unit: the next is two lines on, where the swizzle
  /// has another phase.
  static constexpr int kToNext = 2 * 128 + (2 << 4);
  static_assert(kTileLines % 8 == 0);

  FLASHBSR_DEVICE void widen_keys() {
    char* memory = shared_.memory;
    shared_.landing_key_pipeline.wait_full(landing_);
    shared_.key_pipeline.wait_empty(at_);
    static_assert(dtype_size(Traits::kType) == 2 || !Traits::kPreparesKeys);
    widen<Traits::kType, Traits::kColumnsK>(
        memory + Traits::kLandingKeyOffset + landing_.stage * Traits::kLandingKeyBytes,
        memory + Traits::kKeyOffset + at_.stage * Traits::kKeyBytes);
    announce(shared_.landing_key_pipeline, shared_.key_pipeline);
  }

  /// Lines outside of [head, end) belong to others, or to nobody: their weights are zero, but what
  /// lies there may be NaN.
  FLASHBSR_DEVICE void widen_values(int32_t head, int32_t end) {
    char* memory = shared_.memory;
    shared_.landing_value_pipeline.wait_full(landing_);
    shared_.value_pipeline.wait_empty(at_);
    char* tile = memory + Traits::kValueOffset + at_.stage * Traits::kValueBytes;
    widen<Traits::kWeightType, Traits::kColumnsVo>(
        memory + Traits::kLandingValueOffset + landing_.stage * Traits::kLandingValueBytes, tile);
    if (head > 0 || end < kTileLines) zero(tile, head, end);
    announce(shared_.landing_value_pipeline, shared_.value_pipeline);
  }

  /// To `kColumns` columns of 64 dims.
  template <DType kTo, int kColumns>
  FLASHBSR_DEVICE void widen(const char* from, char* to) const {
    if (kColumns == 1 && lane_ % 16 >= 8) return;  // head dim 64: half a line lands
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
#pragma unroll 1
      for (int32_t i = begin_; i < end_; ++i) {
        const char* src = from + (from_ ^ i * kToNext) + c / 2 * kTileLines * 128;
        char* dst = to + (to_ ^ i * kToNext) + c * kTileLines * 128;
        const auto load = [&](int unit) {
          return *reinterpret_cast<const uint2*>(src + unit * 1024);
        };
        uint2 bytes[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) bytes[u] = load(u);
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          const uint2 unit = bytes[u % kAhead];
          if (u + kAhead < kUnits) bytes[u % kAhead] = load(u + kAhead);
          *reinterpret_cast<uint4*>(dst + u * 1024) = widened<kTo>(unit);
        }
      }
    }
  }

  template <DType kTo>
  FLASHBSR_DEVICE static uint4 widened(uint2 bytes) {
    uint4 r;
    ptx::widen_bytes<kArch, Traits::kKvType, kTo>(bytes.x, r.x, r.y);
    ptx::widen_bytes<kArch, Traits::kKvType, kTo>(bytes.y, r.z, r.w);
    return r;
  }

  /// What this lane wrote of lines outside of [head, end).
  FLASHBSR_DEVICE void zero(char* tile, int32_t head, int32_t end) const {
    if (Traits::kColumnsVo == 1 && lane_ % 16 >= 8) return;
#pragma unroll 1
    for (int32_t i = begin_; i < end_; ++i) {
#pragma unroll 1
      for (int u = 0; u < kUnits; ++u) {
        const int32_t at = to_ ^ i * kToNext, line = at / 128 % 8 + 8 * u;
        if (line >= head && line < end) continue;
#pragma unroll
        for (int c = 0; c < Traits::kColumnsVo; c += 2) {
          *reinterpret_cast<uint4*>(tile + at + (c * kTileLines + 8 * u) * 128) = {};
        }
      }
    }
  }

  /// The products see what was written; the copies may overwrite what was read.
  template <class Landing>
  FLASHBSR_DEVICE void announce(const Landing& landing, const Ring& ring) const {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) ptx::mbarrier_arrive(ring.full(at_.stage));
    // Beside a gather all threads do (Shared::init_barriers).
    if (gather() || lane_ == 0) landing.release(landing_);
  }

  /// One warp alone is beside a gather.
  FLASHBSR_DEVICE bool gather() const {
    if constexpr (Traits::kSideWideners > 0) return gather_;
    return end_ - begin_ == 4;
  }

  const Shared<Traits>& shared_;
  const bool gather_;
  const int32_t lane_;
  const int32_t begin_, end_;  ///< of a unit's four pairs of lines
  /// Where this lane's part of the first is, in a tile that lands and in a wide one.
  int32_t from_, to_;
  // Of K and V in turn: their rings have as many stages, four registers fewer.
  Place at_;
  typename Shared<Traits>::template LandingOf<false>::Place landing_;
};

}  // namespace flashbsr::sm90a
