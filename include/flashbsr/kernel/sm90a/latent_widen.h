// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Latents of e4m3 on their way to 16-bit products: from L2 to registers, from registers to the
// tiles. Q and two tiles fill shared memory, so nothing lands in between; products take most of its
// bandwidth, too.
//
//   scheduler       looks up places of rows, a tile or two ahead, and asks L2 for them
//   4 wideners      16 rows of every tile each: codes of half of the dims are converted and stored
//                   while those of the next half are on their way, four rows at a time
//   2 tail warps    32 rows of the tails each
//
// A lane has 8 dims of each row of its warp: 8 bytes come, 16 go, and neither side meets a bank or
// a sector twice.
#pragma once

#include <flashbsr/core/latent_row.h>
#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/global.h>

namespace flashbsr::sm90a {

/// What both kinds of warps do: they take entries of the ring of places, of latents and of tails by
/// turns, and announce what they have written.
template <class Traits>
class LatentRows {
 public:
  FLASHBSR_DEVICE LatentRows(const HopperArgs& args, const Shared<Traits>& shared)
      : args_(args), shared_(shared) {}

 protected:
  using Entry = typename Shared<Traits>::PlacePipeline::Place;

  /// The place of a row by an entry of the ring. Every thread takes or passes every entry.
  FLASHBSR_DEVICE int32_t take_place(const Entry& entry, int32_t row) const {
    shared_.place_pipeline.wait_full(entry);
    const uint32_t first = shared_.places + entry.stage * Traits::kPlaceBytes;
    const uint32_t place =
        ptx::load_shared(first + static_cast<uint32_t>(PlaceEntry<Traits>::of_row(row)));
    shared_.place_pipeline.release(entry);
    return static_cast<int32_t>(place);
  }
  FLASHBSR_DEVICE void pass_entry(const Entry& entry) const {
    shared_.place_pipeline.wait_full(entry);
    shared_.place_pipeline.release(entry);
  }

  /// What is at a place, from where row 0 has it on.
  FLASHBSR_DEVICE const char* at(const char* first, int32_t place) const {
    return first + static_cast<int64_t>(place) * args_.gather_unit;
  }

  /// The products see what was written.
  FLASHBSR_DEVICE static void announce(uint32_t full) {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full);
  }

  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }

  /// Eight codes as they are multiplied.
  FLASHBSR_DEVICE static uint4 widened(uint2 codes, float scale) {
    uint4 r;
    ptx::float8_to_f16<kArch, Traits::kKvType>(codes.x, r.x, r.y);
    ptx::float8_to_f16<kArch, Traits::kKvType>(codes.y, r.z, r.w);
    if constexpr (Traits::kType == DType::kF16 && !Traits::kPacked) {
      return r;
    } else {
      return {rounded(r.x, scale), rounded(r.y, scale), rounded(r.z, scale), rounded(r.w, scale)};
    }
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;

 private:
  FLASHBSR_DEVICE static uint32_t rounded(uint32_t pair, float scale) {
    const float low = ptx::unpack_low<DType::kF16>(pair),
                high = ptx::unpack_high<DType::kF16>(pair);
    if constexpr (!Traits::kPacked) return ptx::pack2<Traits::kType>(low, high);
    return ptx::pack2<Traits::kType>(low * scale, high * scale);
  }
};

/// Widens latents. One warp of several.
template <class Traits>
class LatentWidener : LatentRows<Traits> {
  using Base = LatentRows<Traits>;
  using Base::lane, Base::args_, Base::shared_, typename Base::Entry;

 public:
  /// @param warp  among the wideners
  FLASHBSR_DEVICE LatentWidener(const HopperArgs& args, const Shared<Traits>& shared, int32_t warp)
      : Base(args, shared), first_(2 * warp) {
    to_ = lane() / 8 * Traits::kKvTile * 128 + first_ * 128 + ((lane() ^ first_) % 8 << 4);
  }

  FLASHBSR_DEVICE void run() {
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count > 0) widen(tile);
    });
  }

 private:
  static constexpr int kRows = Traits::kKvTile / Traits::kWideners;  ///< of a warp, in a tile
  static constexpr int kBatch = 4;  ///< rows whose loads are waited for at once
  static constexpr int kFlight = Traits::kWidenedAhead;  ///< rows that are under way
  static constexpr int kPartDims = Traits::kHeadDimVo / Traits::kKeyParts;
  static constexpr int kPartBytes = Traits::kKeyBytes / Traits::kKeyParts;
  static constexpr int kPartScales = kPartDims / PackedLatent::kGroupDims;
  static_assert(kPartDims == 32 * 8 && Traits::kKeyParts == 2);  // 8 codes of a lane
  static_assert(kRows == 16 && kPartScales == 2);  // the lanes know a scale and a place each

  FLASHBSR_DEVICE void widen(const Tile& tile) {
    row_ = args_.base.params.k.row(0, 0, tile.item.kv_head);
    take_places(part_);
    float scale = load_scale(0);
    const char* from = codes_of(0);
#pragma unroll
    for (int i = 0; i < kFlight; ++i) load_codes(i, from);
#pragma unroll 1
    for (int32_t left = 2 * tile.count - 1; left >= 0; --left, ++part_) {
      const auto at = Shared<Traits>::KeyPipeline::Place::after(part_);
      shared_.key_pipeline.wait_empty(at);
      float after;
#pragma unroll
      for (int first = 0; first < kRows; first += kBatch) {
        if (first == kRows - kFlight) {
          after = begin_next(left);
          from = codes_of(left % 2);
        }
        store_codes(first, shared_.keys + at.stage * kPartBytes, scale);
#pragma unroll
        for (int i = first; i < first + kBatch; ++i) load_codes((i + kFlight) % kRows, from);
        __syncwarp();  // so that ptxas leaves these loads here
      }
      Base::announce(shared_.key_pipeline.full(at.stage));
      scale = after;
    }
  }

  /// Turns to the part after this one, of which there are `left` in the item: to its rows, which
  /// may be another tile's. Behind the last one it comes once more, for nothing. Returns scales.
  FLASHBSR_DEVICE float begin_next(int32_t left) {
    if (left % 2 == 0) {
      Base::pass_entry(Entry::after(part_));  // of the tails
      if (left > 0) take_places(part_ + 1);
    }
    return load_scale(left % 2);
  }

  /// Of the warp's rows of the next tile: lane l has that of its row l % 16.
  FLASHBSR_DEVICE void take_places(uint32_t entry) {
    place_ = Base::take_place(Entry::after(entry), first_ + lane() % kRows / 2 * 8 + lane() % 2);
  }

  /// The lane's codes of a part, of row 0.
  FLASHBSR_DEVICE const char* codes_of(int32_t part) const {
    const char* from = row_ + lane() * 8 + part * kPartDims;
    asm volatile("" : "+l"(from));  // in registers: otherwise it is added up anew for every row
    return from;
  }
  /// Of the warp's row `i`.
  FLASHBSR_DEVICE void load_codes(int i, const char* from) {
    const int32_t place = __shfl_sync(0xffffffffu, place_, i);
    codes_[i % kFlight] = ptx::load_once_8(Base::at(from, place));
  }

  /// Scales of a part: lanes 0 to 15 have those of 16 rows and its first 128 dims, the others of
  /// the rest.
  FLASHBSR_DEVICE float load_scale(int32_t part) const {
    if constexpr (!Traits::kPacked) return 1.0f;
    const int32_t group = part * kPartScales + lane() / 16;
    return ptx::load_once(Base::at(row_ + PackedLatent::kScaleOffset + group * 4, place_));
  }
  FLASHBSR_DEVICE static float scale_of(float scale, int row) {
    if constexpr (!Traits::kPacked) return scale;
    return __shfl_sync(0xffffffffu, scale, row + (ptx::thread_index() & 16));
  }

  /// A batch of rows of a part whose memory is at `part`.
  FLASHBSR_DEVICE void store_codes(int first, uint32_t part, float scale) const {
#pragma unroll
    for (int i = first; i < first + kBatch; ++i) {
      const uint32_t to = part + (i % 2 ? to_ ^ (128 | 16) : to_) + i / 2 * 1024;
      ptx::store_shared_16(to, Base::widened(codes_[i % kFlight], scale_of(scale, i)));
    }
  }

  /// The warp's first row of a tile, even; it has that and the next one of every eight, which takes
  /// two forms of the swizzle only.
  const int32_t first_;
  int32_t to_;       ///< where the lane's part of it goes, in a part of a tile
  const char* row_;  ///< row 0 of the head
  int32_t place_;
  uint2 codes_[kFlight];
  uint32_t part_ = 0;  ///< of all tiles; entries of places are as many
};

/// Writes tails, which are codes, or of packed rows bf16. One warp of two: 8 lanes have a row.
template <class Traits>
class TailWriter : LatentRows<Traits> {
  using Base = LatentRows<Traits>;
  using Base::lane, Base::args_, Base::shared_, typename Base::Entry;

 public:
  /// @param warp  among the tails'
  FLASHBSR_DEVICE TailWriter(const HopperArgs& args, const Shared<Traits>& shared, int32_t warp)
      : Base(args, shared), first_(warp * kRows) {}

  FLASHBSR_DEVICE void run() {
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared_, [&](const Tile& tile) {
      const char* const from = args_.base.params.k_tail.row(0, 0, tile.item.kv_head) +
                               lane() % 8 * (Traits::kTailBytes / 8);
#pragma unroll 1
      for (int32_t j = tile.count; j > 0; --j) {
        Base::pass_entry(Entry::after(2 * tile_));  // of the latents
        write(from);
        ++tile_;
      }
    });
  }

 private:
  static constexpr int kRows = Traits::kKvTile / Shared<Traits>::kTailWarps;  ///< of a warp
  static constexpr int kBatch = 4;  ///< loads under way, of four rows each
  static_assert(kRows == 32);       // the lanes know a place each

  FLASHBSR_DEVICE void write(const char* from) {
    const int32_t place = Base::take_place(Entry::after(2 * tile_ + 1), first_ + lane());
    const auto at = Shared<Traits>::KvPipeline::Place::after(tile_);
    const uint32_t to = shared_.values + at.stage * Traits::kValueBytes + first_ * 128;
#pragma unroll 1
    for (int32_t begin = 0; begin < kRows; begin += 4 * kBatch) {
      const int32_t row = begin + lane() / 8;
      uint4 pieces[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pieces[i] = load(Base::at(from, __shfl_sync(0xffffffffu, place, row + 4 * i)));
      }
      if (begin == 0) shared_.value_pipeline.wait_empty(at);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int32_t swizzled = (lane() ^ (row + 4 * i)) % 8 << 4;
        ptx::store_shared_16(to + (row + 4 * i) * 128 + swizzled, pieces[i]);
      }
    }
    Base::announce(shared_.value_pipeline.full(at.stage));
  }

  /// Eight dims as they are multiplied.
  FLASHBSR_DEVICE static uint4 load(const char* from) {
    if constexpr (!Traits::kPacked) return Base::widened(ptx::load_once_8(from), 1.0f);
    const uint4 x = ptx::load_once_16(from);
    if constexpr (Traits::kType == DType::kBF16) return x;
    return {narrowed(x.x), narrowed(x.y), narrowed(x.z), narrowed(x.w)};
  }
  FLASHBSR_DEVICE static uint32_t narrowed(uint32_t pair) {
    return ptx::pack2<Traits::kType>(ptx::unpack_low<DType::kBF16>(pair),
                                     ptx::unpack_high<DType::kBF16>(pair));
  }

  const int32_t first_;  ///< row of a tile
  uint32_t tile_ = 0;    ///< of all
};

}  // namespace flashbsr::sm90a
