// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// V for products of e4m3: they want both operands along their rows, so V lands as [key][128 bytes
// of dims] and two warps make it [dim][128 bytes of keys], 128-byte swizzle on both sides.
//
// ldmatrix.trans moves pairs of bytes: of 8 keys and 16 dims a lane gets two keys of two dims.
// Bytes picked from the registers of keys t and t + 8 are keys t, t + 1, t + 8, t + 9 of one dim:
// the order in which a thread holds S, so that P needs no shuffle.
#pragma once

#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/mma.h>

namespace flashbsr::sm90a {

template <class Traits>
class Transposer {
 public:
  /// @param warp   among the `warps`, one or two
  FLASHBSR_DEVICE Transposer(const Shared<Traits>& shared, int32_t warp, int32_t warps,
                             int32_t lane)
      : shared_(shared), lane_(lane), warp_(warp), warps_(warps) {
    const int32_t row = lane % 8, tile = lane / 8;
    from_ = (tile % 2 * 8 + row) * 128 + ((tile / 2 ^ row) << 4);
    // Even dims and odd ones change places in the lower half of a tile: all phases of the swizzle
    // are met at once.
    const int32_t dim = tile / 2 * 16 + row * 2 + (tile % 2 ^ row / 4);
    to_ = dim * 128 + (dim % 8 << 4);
    even_ = lane < 16 ? kEven : kOdd;
  }

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      const Unowned<Traits> unowned(tile);
      for (int32_t j = tile.count - 1; j >= 0; --j) {
        // Beside a gather, which one warp is, K has to be made visible, too.
        if (warps_ == 1) relay(shared_.raw_keys, shared_.key_pipeline, at_);
        shared_.landing_value_pipeline.wait_full(at_);
        shared_.value_pipeline.wait_empty(at_);
#pragma unroll 1
        for (int32_t half = warp_; half < 2; half += warps_) {
          if (unowned.in_tile(j, tile.count)) {
            transpose<true>(half, j == 0 ? unowned.head : 0,
                            j == tile.count - 1 ? unowned.owned : Traits::kKvTile);
          } else {
            transpose<false>(half, 0, 0);
          }
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(shared_.value_pipeline.full(at_.stage));
        // Beside a gather, where one warp does this, all threads do (Shared::init_barriers).
        if (warps_ == 1 || lane_ == 0) shared_.landing_value_pipeline.release(at_);
        at_.advance();
      }
    });
  }

 private:
  static constexpr int kGroups = Traits::kKvTile / 32;  ///< of a half
  static_assert(Traits::kKvTile % 32 == 0);
  static_assert(Traits::kHeadDimVo == 128);
  static constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;  ///< bytes of two registers

  /// Half of the tile's groups of 16 keys. kCut: keys outside of [head, end) belong to others, or
  /// to nobody; their weights are zero, but what lies there may be NaN.
  template <bool kCut>
  FLASHBSR_DEVICE void transpose(int32_t half, int32_t head, int32_t end) const {
    const uint32_t from = shared_.landing_values + at_.stage * Traits::kLandingValueBytes + from_;
    const uint32_t to = shared_.values + at_.stage * Traits::kValueBytes + to_;
    constexpr int kUnroll = kCut ? 1 : kGroups;
#pragma unroll kUnroll
    for (int g = 0; g < kGroups; ++g) {
      const int32_t group = half * kGroups + g;
      uint32_t low = ~0u, high = ~0u;
      if constexpr (kCut) {
        low = kept(group * 16 + lane_ % 4 * 2, head, end);
        high = kept(group * 16 + lane_ % 4 * 2 + 8, head, end);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {  // 32 dims
        uint32_t x[4];
        ptx::ldmatrix_x4_trans(x, (from ^ c << 5) + group * 2048);
        if constexpr (kCut) {
          x[0] &= low;
          x[1] &= high;
          x[2] &= low;
          x[3] &= high;
        }
        const uint32_t odd = kEven ^ kOdd ^ even_;
        ptx::stmatrix_x4(
            (to ^ group << 4) + c * 4096,
            {ptx::permute_bytes(x[0], x[1], even_), ptx::permute_bytes(x[0], x[1], odd),
             ptx::permute_bytes(x[2], x[3], even_), ptx::permute_bytes(x[2], x[3], odd)});
      }
    }
  }

  /// Bits of the keys `key` and `key` + 1 in a register of pairs.
  FLASHBSR_DEVICE static uint32_t kept(int32_t key, int32_t head, int32_t end) {
    return (key >= head && key < end ? 0xffffu : 0u) |
           (key + 1 >= head && key + 1 < end ? 0xffff0000u : 0u);
  }

  const Shared<Traits>& shared_;
  const int32_t lane_;
  const int32_t warp_, warps_;
  int32_t from_, to_;  ///< this lane's line of the first tiles, in V and in its transpose
  uint32_t even_;      ///< bytes of the dims that this lane's first register takes
  typename Shared<Traits>::KvPipeline::Place at_;
};

}  // namespace flashbsr::sm90a
