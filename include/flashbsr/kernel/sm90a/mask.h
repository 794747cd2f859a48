// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Masks in bits: what they make of whole tiles is found out by the warp that schedules, ahead of
// the consumers. These ask for bits where a mask cuts a tile, go without maxima where it keeps all
// of it, and pass over what it hides.
#pragma once

#include <flashbsr/kernel/sm90a/fragment_math.h>
#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::sm90a {

/// Variants whose masks are a plan's bits and nothing else.
template <class Variant>
inline constexpr bool kMasksByBits =
    flashbsr::detail::kSame<Variant, Standard> || flashbsr::detail::kSame<Variant, Sigmoid>;

/// What a mask does to a tile for the rows of consumer i: bit i of these.
enum TileMask : uint32_t { kHides = 1, kShows = 8 };

/// Bits of a row and the tile at `begin`; those before the mask begins are not set right yet.
template <int kGroups>
FLASHBSR_DEVICE RowBits<kGroups> load_mask_bits(const CustomMask& mask, const Request& request,
                                                int32_t token, int32_t begin) {
  return FragmentMath<kGroups>::test_bits(mask.bits + request.mask_offset(),
                                          mask.bit(request, token, begin), 8 * kGroups);
}

/// Says of the tiles of an item what the mask makes of them, as stages for their K become free. One
/// warp.
template <class Traits, class Variant>
class TileSorter {
 public:
  FLASHBSR_DEVICE TileSorter(const KernelArgs&, const Shared<Traits>&, int32_t) {}
  FLASHBSR_DEVICE bool active() const { return false; }
  FLASHBSR_DEVICE void sort(const Tile&, int32_t) const {}
};

template <class Traits, class Variant>
  requires kMasksByBits<Variant>
class TileSorter<Traits, Variant> {
 public:
  FLASHBSR_DEVICE TileSorter(const KernelArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), mask_(Variant(args.params).custom_mask), lane_(lane) {}

  FLASHBSR_DEVICE bool active() const { return mask_.active(); }

  /// The item's tile `j`.
  FLASHBSR_DEVICE void sort(const Tile& tile, int32_t j) {
    const WorkItem& item = tile.item;
    const int32_t first = args_.group.quotient(item.row_begin);
    const int32_t last = args_.group.quotient(item.row_begin + item.row_count - 1);
    const int32_t begin = tile.start + j * Traits::kKvTile;
    uint32_t seen = 0;
    if (begin + Traits::kKvTile <= tile.request.mask_begin) {
      seen = 7 * kShows;
    } else {
      // Two tokens at a time, with all their loads under way; the last one again where there are
      // no more.
#pragma unroll 1
      for (int32_t next = first; next <= last; next += 64) {
        const int32_t a = min_of(next + lane_, last), b = min_of(next + lane_ + 32, last);
        const Bits of_a = load(tile, a, begin), of_b = load(tile, b, begin);
        seen |= judge(tile, a, begin, of_a) | judge(tile, b, begin, of_b);
      }
    }
    seen = __reduce_or_sync(0xffffffffu, seen);
#pragma unroll
    for (int part = 0; part < Traits::kKeyParts; ++part, at_.advance()) {
      shared_.key_pipeline.wait_empty(at_);
      if (lane_ != 0) continue;
      ptx::store_shared(shared_.kinds + 4 * at_.stage, seen);
      ptx::mbarrier_arrive(shared_.key_pipeline.full(at_.stage));
    }
  }

 private:
  static constexpr int kGroups = Traits::kKvTile / 8;

  using Bits = RowBits<kGroups>;

  FLASHBSR_DEVICE Bits load(const Tile& tile, int32_t token, int32_t begin) const {
    return load_mask_bits<kGroups>(mask_, tile.request, token, begin);
  }
  /// What the rows of a query token say of the tile at `begin`.
  FLASHBSR_DEVICE uint32_t judge(const Tile& tile, int32_t token, int32_t begin, Bits bits) const {
    bits.set_first(tile.request.mask_begin - begin);
    uint32_t all = ~0u, any = 0;
#pragma unroll
    for (int i = 0; i < bits.kWords; ++i) {
      const int columns = Traits::kKvTile - 32 * i;
      const uint32_t unused = columns >= 32 ? 0 : ~0u << columns;
      all &= bits.word[i] | unused;
      any |= bits.word[i] & ~unused;
    }
    const int32_t group = static_cast<int32_t>(args_.group.divisor);
    const int32_t row = token * group - tile.item.row_begin;  // in the item, if it is positive
    const int32_t z = min_of(row + group, tile.item.row_count) - 1;
    const uint32_t consumers = (2u << z / 64) - (1u << max_of(row, 0) / 64);
    return (all != ~0u ? consumers * kHides : 0) | (any ? consumers * kShows : 0);
  }

  const KernelArgs& args_;
  const Shared<Traits>& shared_;
  const CustomMask mask_;
  const int32_t lane_;
  typename Shared<Traits>::KeyPipeline::Place at_;
};

}  // namespace flashbsr::sm90a
