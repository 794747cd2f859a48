// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The producer warpgroup's roles but the loaders (tma_loader.h, gather.h): who claims items, who
// cleans V.
#pragma once

#include <flashbsr/kernel/sm90a/mask.h>
#include <flashbsr/kernel/sm90a/narrow.h>
#include <flashbsr/kernel/sm90a/places.h>
#include <flashbsr/kernel/sm90a/token_scales.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

/// Whether K and V come row by row.
template <KvCopies kCopies>
FLASHBSR_DEVICE bool gathers(const HopperArgs& args) {
  if constexpr (kCopies != KvCopies::kEither) return kCopies == KvCopies::kRows;
  return args.path == KvPath::kGather;
}

/// Before the load of which tile the next item is claimed; -1: the item has none.
FLASHBSR_DEVICE int32_t last_claim(const Tile& tile) {
  constexpr int32_t kClaimAhead = 4;
  return min_of(kClaimAhead, tile.count) - 1;
}

/// Claims items and describes them to the other warps. One warp.
///
/// An item is claimed when kClaimAhead tiles of the one before are left to load, early enough for
/// the record to be there when they are. Who claims earlier has an item that others could begin: at
/// the beginning of the one before, 3 x 256 rows over 8192 keys took 277 us, two long items on
/// blocks that had claimed both, beside others that were done (H200; 184 by the model).
///
/// A block's first item is its own number, without a claim, unless it has narrow ones before: those
/// blocks are not counted. Each block that had an item, and each of those, claims until nothing is
/// left. The last of these claims resets the counter.
///
/// Where a mask is bits it sorts an item's tiles, too, where tokens have scales it copies these,
/// and where K and V are gathered it looks up their rows, before the next item is described:
/// loaders hear of that a tile or two later then, and are ahead of the consumers by as many.
template <class Traits, class Variant, KvCopies kCopies>
class Scheduler {
 public:
  FLASHBSR_DEVICE Scheduler(const HopperArgs& args, const Shared<Traits>& shared, int32_t lane)
      : args_(args), shared_(shared), lane_(lane) {}

  FLASHBSR_DEVICE void run() {
    const KernelArgs& base = args_.base;
    const int32_t num_items = base.header->num_wide_items;
    const NarrowBlocks narrow = NarrowBlocks::of<Traits>(base);
    const int32_t late = narrow.count;
    int32_t index =
        narrow.here ? claim(num_items, late) : static_cast<int32_t>(blockIdx.x) - narrow.before;
    TileSorter<Traits, Variant> sorter(base, shared_, lane_);
    RowFinder<Traits> finder(args_, shared_, lane_);
    ScaleCopier<Traits> scales(base, shared_, lane_);
    int32_t word = index < num_items ? record_word(index) : 0;
    const bool walks = Traits::kTokenScales || gathers<kCopies>(args_) || sorter.active();
    for (uint32_t n = 0;; ++n) {  // items
      const auto at = Shared<Traits>::TilePipeline::Place::after(n);
      shared_.tile_pipeline.wait_empty(at);
      // Who gathers says nothing. Who has walked through the item has claimed the next one.
      if (!gathers<kCopies>(args_) && n > 0) {
        ptx::mbarrier_wait<kArch>(shared_.claimable, n - 1 & 1);
      }
      if (!walks && n > 0) word = next_word(index, num_items, late);
      Tile& tile = shared_.tiles[at.stage];
      if (index < num_items) {
        if (lane_ < kWords) reinterpret_cast<int32_t*>(&tile)[lane_] = word;
        __syncwarp();
        if (lane_ == 0) find_tiles(tile);
      } else if (lane_ == 0) {
        tile.count = -1;
      }
      __syncwarp();
      // Loads begin before spans are worked out, which takes 1.5 us the first time. Where they are
      // gathered, the plan says where, which is there before the kernel in front has ended.
      ptx::mbarrier_arrive(shared_.loadable + 8 * at.stage);
      const bool finds = gathers<kCopies>(args_);
      if (finds && tile.count > 0) finder.find(tile, tile.count - 1);
      ptx::wait_for_prerequisites<kArch>();  // before the first claim
      if (index < num_items) describe(tile, shared_.spans + at.stage * Traits::kRows);
      __syncwarp();
      ptx::mbarrier_arrive(shared_.tile_pipeline.full(at.stage));
      if (index >= num_items) return;
      if (!walks) continue;
      int32_t j = tile.count - 1;
      if (j < 0) word = next_word(index, num_items, late);
#pragma unroll 1
      for (; j >= 0; --j) {
        if (j == last_claim(tile)) word = next_word(index, num_items, late);
        if constexpr (Traits::kTokenScales) scales.copy(tile, j);
        if (sorter.active()) sorter.sort(tile, j);
        if (finds && j > 0) finder.find(tile, j - 1);
      }
    }
  }

 private:
  /// Claims the next item. Returns the lane's word of it.
  FLASHBSR_DEVICE int32_t next_word(int32_t& index, int32_t num_items, int32_t late) const {
    index = claim(num_items, late);
    return index < num_items ? record_word(index) : 0;
  }
  FLASHBSR_DEVICE int32_t claim(int32_t num_items, int32_t late) const {
    int32_t claimed = 0;
    if (lane_ == 0) {
      claimed = atomicAdd(args_.base.counters, 1);
      if (claimed == num_items + late - 1) *args_.base.counters = 0;
    }
    return static_cast<int32_t>(gridDim.x) - late + __shfl_sync(0xffffffffu, claimed, 0);
  }

  /// An item and its request, a word per lane, on their way to shared memory.
  static constexpr int kItemWords = sizeof(WorkItem) / 4;
  static constexpr int kWords = kItemWords + sizeof(Request) / 4;
  FLASHBSR_DEVICE int32_t record_word(int32_t index) const {
    const WorkItem& item = args_.base.items[index];
    const Request& request = args_.base.requests[item.request];
    if (lane_ < kItemWords) return reinterpret_cast<const int32_t*>(&item)[lane_];
    if (lane_ < kWords) return reinterpret_cast<const int32_t*>(&request)[lane_ - kItemWords];
    return 0;
  }

  /// How the item's KV falls into tiles.
  FLASHBSR_DEVICE void find_tiles(Tile& tile) const {
    const int32_t begin = tile.item.kv_begin, end = tile.item.kv_end;
    const int32_t align = args_.path == KvPath::kPaged ? args_.box_tokens : 1;
    tile.start = begin - begin % align;
    tile.count = end > begin ? ceil_div(end - tile.start, Traits::kKvTile) : 0;
  }

  /// What its rows see of them.
  FLASHBSR_DEVICE void describe(Tile& tile, Span* spans) const {
    for (int32_t r = lane_; r < Traits::kRows; r += 32) spans[r] = span_of(tile, r);
    __syncwarp();
    if (lane_ < Traits::kConsumers) tile.ranges[lane_] = range_of(tile, spans, tile.start);
  }

  /// What a row sees of the item: tiles may begin before it does, and rows may not exist.
  FLASHBSR_DEVICE Span span_of(const Tile& tile, int32_t r) const {
    if (r >= tile.item.row_count) return {0, 0};
    const int32_t token = args_.base.group.quotient(tile.item.row_begin + r);
    const Span seen = visible_keys(*args_.base.header, tile.request, token);
    const int32_t begin = max_of(seen.begin, tile.item.kv_begin);
    return {begin, max_of(min_of(seen.end, tile.item.kv_end), begin)};
  }

  /// Of the rows of the lane's consumer. Spans move right from row to row, so the outer rows tell.
  FLASHBSR_DEVICE TileRange range_of(const Tile& tile, const Span* spans, int32_t start) const {
    const int32_t first = lane_ * 64;
    const int32_t last = min_of(tile.item.row_count, first + 64) - 1;
    if (first > last) return {};
    const Span a = spans[first], z = spans[last];
    if (a.begin >= z.end) return {};
    return {(z.end - 1 - start) / Traits::kKvTile, (a.begin - start) / Traits::kKvTile,
            (a.end - start) / Traits::kKvTile - 1, ceil_div(z.begin - start, Traits::kKvTile)};
  }

  const HopperArgs& args_;
  const Shared<Traits>& shared_;
  const int32_t lane_;
};

/// Says that it is time to claim the next item. One warp, that loads K, before each tile, and
/// before an item without any.
template <class Traits>
FLASHBSR_DEVICE void let_claim(const Shared<Traits>& shared, const Tile& tile, int32_t j) {
  if (j == last_claim(tile) && ptx::thread_index() % 32 == 0)
    ptx::mbarrier_arrive(shared.claimable);
}

/// Calls visit(tile) for every item of the block, in all threads of a warp. The tile stays in
/// shared memory: producers have no registers for it.
template <class Traits, class Visit>
FLASHBSR_DEVICE void for_each_tile(const Shared<Traits>& shared, const Visit& visit) {
  using Place = typename Shared<Traits>::TilePipeline::Place;
  for (uint32_t n = 0;; ++n) {
    const Place at = Place::after(n);
    ptx::mbarrier_wait<kArch>(shared.loadable + 8 * at.stage, at.parity);
    const Tile& tile = shared.tiles[at.stage];
    if (tile.count < 0) return;
    visit(tile);
    uint32_t same = n;
    asm volatile("" : "+r"(same));  // worked out anew: kept over the visit it may be spilled
    shared.tile_pipeline.release(Place::after(same));
  }
}

/// Which tiles of V have rows that the item does not own. Their weights are zero, but what lies
/// there may be NaN: rows of other requests, freed slots.
template <class Traits>
struct Unowned {
  int32_t head;   ///< rows of tile 0 before the item
  int32_t owned;  ///< rows of the last tile up to the item's end

  FLASHBSR_DEVICE explicit Unowned(const Tile& t)
      : head(t.item.kv_begin - t.start),
        owned(t.item.kv_end - t.start - (t.count - 1) * Traits::kKvTile) {}
  FLASHBSR_DEVICE bool in_tile(int32_t j, int32_t count) const {
    return (j == count - 1 && owned < Traits::kKvTile) || (j == 0 && head > 0);
  }
};

/// The rows of an item's Q, by one thread: a box (dims, heads of the group, tokens) of all tokens
/// that a tile has room for; of one, where requests share KV whose rows of Q are not together: 32
/// of those take 6 us.
/// @param barriers  where they announce that they have arrived, by stage
template <class Traits>
FLASHBSR_DEVICE void load_queries(const HopperArgs& args, const Shared<Traits>& shared,
                                  const Tile& tile, uint32_t barriers, int32_t stage) {
  const int32_t token = args.base.group.quotient(tile.item.row_begin);
  const int32_t head = args.base.group.remainder(tile.item.row_begin, token);
  const bool together = tile.request.rows_together();
  const TensorMap& map = together ? args.q : args.q_token;
  const int32_t boxes = together ? 1 : args.query_tokens;
  const int32_t heads = static_cast<int32_t>(args.base.group.divisor);  // of a tile, if several
  const uint32_t full = barriers + 8 * stage;
  ptx::mbarrier_expect_bytes(full, args.query_bytes);
  const uint32_t to = shared.queries + stage * Traits::kQueryBytes;
#pragma unroll 1
  for (int32_t box = 0; box < boxes; ++box) {
    // The last token again where there is none: all bytes arrive, and nobody looks at those rows.
    const int32_t nth = together ? token : min_of(token + box, tile.request.q_len - 1);
    const int32_t row = query_row(tile.request, nth, args.base.q_rows);
#pragma unroll
    for (int c = 0; c < Traits::kColumnsQk; ++c) {
      ptx::tma_load(to + c * Traits::kRows * 128 + box * heads * 128, map, full,
                    c * Traits::kColumnDims, head, row, tile.item.kv_head);
    }
  }
}

/// Which part of K comes as number `n`, of the tile that an item loads as number `nth`.
template <class Traits>
FLASHBSR_DEVICE int nth_part(int n, int32_t nth) {
  static_assert(!Traits::kTurnsParts || Traits::kKeyParts == 2);
  if constexpr (Traits::kTurnsParts) return n ^ static_cast<int>(nth & 1);
  return n;
}

/// Zeroes the rows of V tiles that an item does not own, once they have arrived; of latents, which
/// are K and V. One warp.
template <class Traits>
class Cleaner {
 public:
  FLASHBSR_DEVICE explicit Cleaner(const Shared<Traits>& shared) : shared_(shared) {}

  FLASHBSR_DEVICE void run() {
    for_each_tile(shared_, [&](const Tile& tile) {
      for (int32_t j = tile.count - 1; j >= 0; --j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part, at_.advance()) visit(tile, j, at_.stage);
      }
    });
  }

  /// V of the item's tile `j`, or a part of it, which is to be in `stage`.
  FLASHBSR_DEVICE void visit(const Tile& tile, int32_t j, int32_t stage) {
    const Unowned<Traits> unowned(tile);
    if (!unowned.in_tile(j, tile.count)) return;
    clean(stage, j == 0 ? unowned.head : 0, j == tile.count - 1 ? unowned.owned : Traits::kKvTile);
  }

 private:
  static constexpr bool kKeys = Traits::kLatent;
  static constexpr int kParts = kKeys ? Traits::kKeyParts : 1;

  /// Rows [0, head) and [owned, kKvTile).
  FLASHBSR_DEVICE void clean(int32_t stage, int32_t head, int32_t owned) {
    const uint32_t raw = kKeys ? shared_.raw_keys : shared_.raw_values;
    ptx::mbarrier_wait<kArch>(raw + 8 * stage, parities_ >> stage & 1);
    parities_ ^= 1u << stage;
    uint32_t tile = kKeys ? shared_.keys + stage * (Traits::kKeyBytes / kParts)
                          : shared_.values + stage * Traits::kValueBytes;
#pragma unroll 1
    for (int c = 0; c < Traits::kHeadDimVo / 64 / kParts; ++c, tile += Traits::kKvTile * 128) {
      zero(tile, 0, head);
      zero(tile, owned, Traits::kKvTile);
    }
    ptx::fence_async_proxy();
    __syncwarp();
    const uint32_t full =
        kKeys ? shared_.key_pipeline.full(stage) : shared_.value_pipeline.full(stage);
    if (lane() == 0) ptx::mbarrier_arrive(full);
  }
  FLASHBSR_DEVICE void zero(uint32_t tile, int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t i = begin * 8 + lane(); i < end * 8; i += 32) ptx::zero_shared(tile + 16 * i);
  }

  FLASHBSR_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }

  const Shared<Traits>& shared_;
  typename Shared<Traits>::template PipelineOf<kKeys>::Place at_;
  uint32_t parities_ = 0;  ///< of the barriers of dirty tiles, by stage
};

}  // namespace flashbsr::sm90a
