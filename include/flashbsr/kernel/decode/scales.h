// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a streaming warp keeps of its ring in shared memory beside K and V: where rows are, and
// scales of every token with the ways they come there.
#pragma once

#include <flashbsr/core/view.h>
#include <flashbsr/kernel/decode/traits.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr {

/// Where 16-byte chunk `chunk` of row `row` lies in a tile of shared memory: rows of 128 bytes
/// (64 or 32 for shorter ones), chunks exchanged so that ldmatrix meets every bank once. TMA's
/// swizzle of 128 bytes is the same.
template <class Traits>
FLASHBSR_DEVICE uint32_t decode_tile_offset(int row, int chunk) {
  if constexpr (Traits::kTokenBytes >= 128) {
    return (chunk >> 3) * (Traits::kStageRows * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  } else if constexpr (Traits::kTokenBytes == 64) {
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  } else {
    static_assert(Traits::kTokenBytes == 32);
    return row * 32 + ((chunk ^ ((row >> 2) & 1)) << 4);
  }
}

/// Byte offsets of a token's rows from the beginning of K and of V.
struct alignas(16) DecodeOffsets {
  int64_t k;
  int64_t v;
};

/// Where a token of a KV head is.
struct DecodePlace {
  uint32_t page;
  uint32_t token;  ///< in the page
  uint32_t head;

  /// Elements from a view's beginning to its row. Unsigned: half the instructions.
  FLASHBSR_DEVICE int64_t offset(const PagedView& view) const {
    return static_cast<int64_t>(page * static_cast<uint64_t>(view.stride_page) +
                                token * static_cast<uint64_t>(view.stride_token) +
                                head * static_cast<uint64_t>(view.stride_head));
  }
};

/// Scales of the tokens of every stage in the ring.
template <class Traits, bool = Traits::kTokenScales>
struct DecodeScales {};
template <class Traits>
struct DecodeScales<Traits, true> {
  static constexpr int kAlign = Traits::kBoxes ? 128 : 16;  // as TMA wants it
  alignas(kAlign) float k_scales[Traits::kStages][Traits::kStageRows][Traits::kScaleWords];
  alignas(kAlign) float v_scales[Traits::kStages][Traits::kStageRows][Traits::kScaleWords];
};

/// Where those of V are, in scales, of the stage that is being copied: where K is copied before it.
template <class Traits, bool = Traits::kTokenScales && !Traits::kTogether>
struct DecodeScaleOffsets {};
template <class Traits>
struct DecodeScaleOffsets<Traits, true> {
  int64_t v_scale_offsets[Traits::kStageRows];
};

/// Where a warp's next rows are, in shared memory.
template <class Traits, bool = Traits::kBoxes>
struct DecodeRows : DecodeScales<Traits>, DecodeScaleOffsets<Traits> {
  DecodeOffsets offsets[Traits::kStageRows];  // of the stage that is being copied
  int32_t pages[2][Traits::kStageRows];       // of it and the one after it
};
/// Of a stage in boxes: coordinates in their arrays.
struct alignas(16) PairBox {
  int32_t page;
  int32_t token;
  int32_t codes, scales;  ///< bytes of a token before the heads'
};
/// Of boxes: where those of two batches of stages are, and the barriers of the ring's stages.
template <class Traits>
struct DecodeRows<Traits, true> : DecodeScales<Traits> {
  PairBox boxes[2][32];
  uint64_t full[Traits::kStages];  // completed when they have arrived
};

/// Scales of a token's row of packed codes to `to`, zeros where not `inside`. Two words at once
/// where they lie so: each copy of a lane is a line to look up. A single scale is there twice
/// (packed.h).
/// @param offset  from the view's beginning, in scales
template <class Traits>
FLASHBSR_DEVICE void copy_packed_scales(const float (&to)[Traits::kScaleWords],
                                        const PagedView& view, int64_t offset, bool inside) {
  const char* from = static_cast<const char*>(view.data) + offset * Traits::kScaleSize;
  const uint32_t place = ptx::shared_address(&to[0]);
  if constexpr (Traits::kScaleWords == 1) {
    ptx::cp_async_4_if(place, from, inside);
    return;
  }
  const int bytes = view.dim * Traits::kScaleSize;
  const bool pairs = bytes > 4 && (reinterpret_cast<uint64_t>(from) & 7) == 0;
#pragma unroll
  for (int word = 0; word < Traits::kScaleWords; word += 2) {
    if (word > 0 && 4 * word >= bytes) continue;
    if (pairs) {
      ptx::cp_async_8_if(place + 4 * word, from + 4 * word, inside);
    } else {
      const bool single = word == 0 && bytes == 4;
      ptx::cp_async_4_if(place + 4 * word, from + 4 * word, inside);
      ptx::cp_async_4_if(place + 4 * word + 4, single ? from : from + 4 * word + 4, inside);
    }
  }
}

/// Scales of one float or half a token. No copy has two bytes: of halves the word comes that has
/// them, which never reaches beyond the memory, and which half it is a bit says until the stage has
/// arrived.
class HalfScales {
 public:
  /// `offset`: from the view's beginning, in scales; `number`: of the scale among the lane's.
  FLASHBSR_DEVICE void copy(const float& to, const PagedView& view, int64_t offset, bool inside,
                            int number) {
    const char* data = static_cast<const char*>(view.data);
    const uint32_t place = ptx::shared_address(&to);
    if (view.dtype != DType::kF16) return ptx::cp_async_4_if(place, data + 4 * offset, inside);
    const uint64_t from = reinterpret_cast<uint64_t>(data) + 2 * offset;
    ptx::cp_async_4_if(place, reinterpret_cast<const char*>(from & ~uint64_t{3}), inside);
    const uint32_t bit = 1u << number;
    upper_ = from & 2 ? upper_ | bit : upper_ & ~bit;
  }

  FLASHBSR_DEVICE void settle(float& scale, int number) const {
    const uint32_t word = float_bits(scale);
    scale = upper_ >> number & 1 ? ptx::unpack_high<DType::kF16>(word)
                                 : ptx::unpack_low<DType::kF16>(word);
  }

 private:
  uint32_t upper_ = 0;
};

}  // namespace flashbsr
