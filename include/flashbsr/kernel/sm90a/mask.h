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

/// What a mask makes of a tile for the rows of a consumer.
enum TileKind : uint32_t { kKept = 0, kCut = 1, kHidden = 2 };
inline constexpr int kTileKindBits = 2;

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
  FLASHBSR_DEVICE void sort(const Tile&) const {}
};

template <class Traits, class Variant>
  requires kMasksByBits<Variant>
class TileSorter<Traits, Variant> {
 public:
  FLASHBSR_DEVICE TileSorter(const KernelArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), mask_(Variant(args.params).custom_mask), lane_(lane) {}

  FLASHBSR_DEVICE void sort(const Tile& tile) {
    if (!mask_.active()) return;
#pragma unroll 1
    for (int32_t j = tile.count - 1; j >= 0; --j, at_.advance()) {
      shared_.key_pipeline.wait_empty(at_);
      const int32_t begin = tile.start + j * Traits::kKvTile;
      uint32_t kinds = 0;
      if (begin + Traits::kKvTile > tile.request.mask_begin) {
#pragma unroll 1
        for (int group = 0; group < Traits::kConsumers; ++group) {
          kinds |= kind(tile, group, begin) << kTileKindBits * group;
        }
      }
      if (lane_ == 0) {
        ptx::store_shared(shared_.kinds + 4 * at_.stage, kinds);
        ptx::mbarrier_arrive(shared_.key_pipeline.full(at_.stage));
      }
    }
  }

 private:
  static constexpr int kGroups = Traits::kKvTile / 8;

  /// Rows that do not exist are the last one again.
  FLASHBSR_DEVICE uint32_t kind(const Tile& tile, int group, int32_t begin) const {
    const int32_t end = tile.item.row_begin + tile.item.row_count - 1;
    const int32_t first = tile.item.row_begin + group * 64;
    const int32_t last = args_.group.quotient(min_of(first + 63, end));
    bool all = true, any = false;
#pragma unroll 1
    for (int32_t t = args_.group.quotient(min_of(first, end)); t <= last; t += 32) {
      auto bits = load_mask_bits<kGroups>(mask_, tile.request, min_of(t + lane_, last), begin);
      bits.set_first(tile.request.mask_begin - begin);
#pragma unroll
      for (int i = 0; i < bits.kWords; ++i) {
        const uint32_t used = kGroups - 4 * i >= 4 ? ~0u : (1u << 8 * (kGroups - 4 * i)) - 1;
        all = all && (bits.word[i] & used) == used;
        any = any || (bits.word[i] & used);
      }
    }
    if (!__any_sync(0xffffffffu, any)) return kHidden;
    return __all_sync(0xffffffffu, all) ? kKept : kCut;
  }

  const KernelArgs& args_;
  const Shared<Traits>& shared_;
  const CustomMask mask_;
  const int32_t lane_;
  typename Shared<Traits>::KvPipeline::Place at_;
};

}  // namespace flashbsr::sm90a
