// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Latents of e4m3 on their way to products of fp16: from L2 to registers, from registers to the
// tiles. Q and two tiles fill shared memory, so nothing lands in between; products take most of its
// bandwidth, too.
//
//   scheduler       looks up places of rows, a tile or two ahead
//   4 wideners      16 rows of every tile each: codes of half of the dims are converted and stored
//                   while those of the next half are on their way
//   2 tail warps    32 rows of the tails each
#pragma once

#include <flashbsr/core/latent_row.h>
#include <flashbsr/kernel/sm90a/producer.h>
#include <flashbsr/ptx/codes.h>
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

  /// Shared address of a row's place, in an entry of the ring. Every thread takes or passes every
  /// entry.
  FLASHBSR_DEVICE uint32_t place_of(const Entry& entry, int32_t row) const {
    return shared_.places + entry.stage * Traits::kPlaceBytes +
           static_cast<uint32_t>(PlaceEntry<Traits>::of_row(row));
  }
  FLASHBSR_DEVICE void pass_entry(const Entry& entry) const {
    shared_.place_pipeline.wait_full(entry);
    shared_.place_pipeline.release(entry);
  }

  /// What is at a place, from where row 0 has it on.
  FLASHBSR_DEVICE const char* at(const char* first, int32_t place) const {
    asm volatile("" : "+r"(place));  // kept so, not as 64 bits where it is used twice
    return first + static_cast<int64_t>(place) * args_.gather_unit;
  }

  /// The products see what was written.
  FLASHBSR_DEVICE static void announce(uint32_t full) {
    ptx::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) ptx::mbarrier_arrive(full);
  }

  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }

  /// Four codes to two pairs of fp16.
  FLASHBSR_DEVICE static uint2 widened(uint32_t codes) {
    uint2 r;
    ptx::float8_to_f16<kArch, Traits::kKvType>(codes, r.x, r.y);
    return r;
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
};

/// Widens latents. One warp of several: of every eight rows of a tile it has two, an even one and
/// the next. Four lanes have 64 codes of the one, the next four those of the other, and so on: 16
/// bytes of codes become two pieces of 16, and eight lanes meet no bank twice.
template <class Traits>
class LatentWidener : LatentRows<Traits> {
  using Base = LatentRows<Traits>;
  using Base::lane, Base::args_, Base::shared_, typename Base::Entry;

 public:
  /// @param warp  among the wideners
  FLASHBSR_DEVICE LatentWidener(const HopperArgs& args, const Shared<Traits>& shared, int32_t warp)
      : Base(args, shared), first_(2 * warp + lane() / 4 % 2) {
    const int32_t piece = 2 * chunk();
    to_ = piece / 8 * Traits::kKvTile * 128 + first_ * 128 + ((piece ^ first_) % 8 << 4);
  }

  FLASHBSR_DEVICE void run() {
    ptx::wait_for_prerequisites<kArch>();
    for_each_tile(shared_, [&](const Tile& tile) {
      if (tile.count > 0) widen(tile);
    });
  }

 private:
  static constexpr int kRows = Traits::kKvTile / 8;  ///< of a lane, in a tile
  static constexpr int kBatch = 2;                   ///< stored before the next are asked for
  static constexpr int kFlight = Traits::kWidenedAhead / 2;  ///< rows that are under way
  static constexpr int kPartDims = Traits::kHeadDimVo / Traits::kKeyParts;
  static constexpr int kPartBytes = Traits::kKeyBytes / Traits::kKeyParts;
  static constexpr int kPartScales = kPartDims / PackedLatent::kGroupDims;
  static_assert(kPartDims == 16 * 16 && Traits::kKeyParts == 2);  // 16 codes of a lane
  static_assert(kRows == 8 && Traits::kWideners == 4 && kPartScales == 2);

  /// Which 16 codes of a part of a row are the lane's.
  FLASHBSR_DEVICE static int32_t chunk() { return lane() / 8 * 4 + lane() % 4; }

  FLASHBSR_DEVICE void widen(const Tile& tile) {
    row_ = args_.base.params.k.row(0, 0, tile.item.kv_head) + chunk() * 16;
    take_places(2 * tile_);
    const char* const from = codes_of(0);
#pragma unroll
    for (int i = 0; i < kFlight; ++i) load_codes(i, from);
    load_scales();
#pragma unroll 1
    for (int32_t nth = 0; nth < tile.count; ++nth, ++tile_) {
      widen_part<0>(nth, tile.count);
      widen_part<1>(nth, tile.count);
    }
  }

  /// Converts and stores a part of the tile while codes of the next one are asked for. Behind the
  /// item's last one it comes once more, for nothing.
  /// @tparam kNumber  of the part, as parts come
  /// @param nth       of the item's tiles
  template <int kNumber>
  FLASHBSR_DEVICE void widen_part(int32_t nth, int32_t count) {
    constexpr int kTurn = kRows - kFlight;  // from this row on others' codes are asked for
    const int part = nth_part<Traits>(kNumber, nth);
    const auto at = Shared<Traits>::KvPipeline::Place::after(tile_);
    const int32_t stage = 2 * at.stage + part;
    const char* from = codes_of(part);
    const auto turn = [&] {
      if (kNumber == 1) pass(nth + 1 < count);
      from = codes_of(kNumber == 0 ? 1 - part : nth_part<Traits>(0, nth + 1));
      ask(from);
    };
    if (kTurn == 0) turn();
    shared_.key_pipeline.wait_empty({stage, at.parity});
    take_scales(part);
    const uint32_t to = shared_.keys + stage * kPartBytes + to_;
#pragma unroll
    for (int first = 0; first < kRows; first += kBatch) {
      if (first > 0 && first == kTurn) turn();
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) store_codes(i, to);
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) load_codes((i + kFlight) % kRows, from);
      // Behind the wait for all that is under way, and early: the next one waits for these, too.
      if (kNumber == 1 && first == kTurn) load_scales();
      __syncwarp();  // so that ptxas leaves these loads here
    }
    Base::announce(shared_.key_pipeline.full(stage));
  }

  /// To the next tile's rows, if the item has `more`.
  FLASHBSR_DEVICE void pass(bool more) {
    Base::pass_entry(Entry::after(2 * tile_ + 1));  // of the tails
    if (more) take_places(2 * tile_ + 2);
  }
  /// Of the lane's rows of a tile.
  FLASHBSR_DEVICE void take_places(uint32_t n) {
    const auto entry = Entry::after(n);
    shared_.place_pipeline.wait_full(entry);
    const uint32_t first = Base::place_of(entry, first_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      place_[i] = static_cast<int32_t>(ptx::load_shared(first + (lane() % 4 + 4 * i) * 4));
    }
    shared_.place_pipeline.release(entry);
  }

  /// The lane's codes of a part, of row 0.
  FLASHBSR_DEVICE const char* codes_of(int part) const {
    const char* from = row_ + part * kPartDims;
    asm volatile("" : "+l"(from));  // in registers: otherwise it is added up anew for every row
    return from;
  }
  /// Asks L1 for the warp's codes of a part, all at once: registers have room for those of a row
  /// when those before have gone out of them, and all loads are waited for together. Four groups
  /// of eight lanes have the same rows: one line of 128 bytes each.
  FLASHBSR_DEVICE void ask(const char* from) const {
    if constexpr (Traits::kPacked) {
      const int32_t line = min_of(lane() / 8 * 128, kPartDims - 1);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::prefetch_l1(Base::at(from - chunk() * 16 + line, place_[i]));
      }
    }
  }
  /// Of the lane's row `i`.
  FLASHBSR_DEVICE void load_codes(int i, const char* from) {
    const int32_t place = __shfl_sync(0xffffffffu, place_[i / 4], i % 4, 4);
    codes_[i % kFlight] = ptx::load_once_16(Base::at(from, place));
  }

  /// Of the lane's group of either part.
  FLASHBSR_DEVICE void load_scales() {
    if constexpr (Traits::kPacked) {
      const char* from = row_ - chunk() * 16 + PackedLatent::kScaleOffset + lane() / 16 * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const char* const scales = Base::at(from, place_[i]);
        next_scale_[0][i] = ptx::load_once(scales);
        next_scale_[1][i] = ptx::load_once(scales + kPartScales * 4);
      }
    }
  }
  /// Those of a part in fp16, twice. It is off by 2^-12 at most and in the same direction for 128
  /// dims, which makes logits wrong by a fifth of what bf16 would: the sum of two numbers of fp16
  /// was two instructions for two codes, not one.
  FLASHBSR_DEVICE void take_scales(int part) {
    if constexpr (Traits::kPacked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = (part ? next_scale_[1][i] : next_scale_[0][i]) * (1.0f / Traits::kKeyUnit);
        scale_[i] = ptx::pack2<DType::kF16>(x, x);
      }
    }
  }

  FLASHBSR_DEVICE void store_codes(int i, uint32_t to) const {
    const uint4 codes = codes_[i % kFlight];
    const uint32_t scale = Traits::kPacked ? __shfl_sync(0xffffffffu, scale_[i / 4], i % 4, 4) : 0;
    ptx::store_shared_16(to + i * 1024, widened(codes.x, codes.y, scale));
    ptx::store_shared_16((to ^ 16) + i * 1024, widened(codes.z, codes.w, scale));
  }
  /// Eight codes as they are multiplied.
  FLASHBSR_DEVICE static uint4 widened(uint32_t a, uint32_t b, uint32_t scale) {
    const uint2 x = Base::widened(a), y = Base::widened(b);
    return {scaled(x.x, scale), scaled(x.y, scale), scaled(y.x, scale), scaled(y.y, scale)};
  }
  FLASHBSR_DEVICE static uint32_t scaled(uint32_t pair, uint32_t scale) {
    if constexpr (!Traits::kPacked) return pair;
    return ptx::mul2<DType::kF16>(pair, scale);
  }

  const int32_t first_;  ///< the lane's first row of a tile
  int32_t to_;           ///< where its codes go, in a part of a tile; the second piece at ^ 16
  const char* row_;      ///< the lane's codes of row 0 of the head
  uint4 codes_[kFlight];
  /// Of every fourth of the lane's rows from lane % 4 on, whom a shuffle asks: places, scales of a
  /// tile's parts, and as they are multiplied, of the part at hand.
  int32_t place_[2];
  float next_scale_[2][2];
  uint32_t scale_[2];
  uint32_t tile_ = 0;  ///< of all
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
    const auto entry = Entry::after(2 * tile_ + 1);
    shared_.place_pipeline.wait_full(entry);
    const auto place =
        static_cast<int32_t>(ptx::load_shared(Base::place_of(entry, first_ + lane())));
    shared_.place_pipeline.release(entry);
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
    if constexpr (!Traits::kPacked) {
      const uint2 codes = ptx::load_once_8(from);
      const uint2 x = Base::widened(codes.x), y = Base::widened(codes.y);
      return {x.x, x.y, y.x, y.y};
    }
    const uint4 x = ptx::load_once_16(from);
    if constexpr (Traits::kTailType == DType::kBF16) return x;
    return {narrowed(x.x), narrowed(x.y), narrowed(x.z), narrowed(x.w)};
  }
  FLASHBSR_DEVICE static uint32_t narrowed(uint32_t pair) {
    return ptx::pack2<Traits::kTailType>(ptx::unpack_low<DType::kBF16>(pair),
                                         ptx::unpack_high<DType::kBF16>(pair));
  }

  const int32_t first_;  ///< row of a tile
  uint32_t tile_ = 0;    ///< of all
};

}  // namespace flashbsr::sm90a
