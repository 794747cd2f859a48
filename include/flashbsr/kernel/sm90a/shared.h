// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the warps of a block share: the tiles, the barriers around them, the items they work on.
#pragma once

#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/mbarrier.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/ptx/tma.h>
#include <flashbsr/tile/rows.h>

namespace flashbsr::sm90a {

inline constexpr int kArch = 90;

/// A place in a ring of buffers, and the parity of its barriers' phase. Producers and consumers
/// each keep their own and go round the same way.
template <int kStages>
struct RingPlace {
  int32_t stage = 0;
  uint32_t parity = 0;

  /// The place after `n` steps: one register instead of two where few are left.
  FLASHBSR_DEVICE static RingPlace after(uint32_t n) {
    return {static_cast<int32_t>(n % kStages), n / kStages & 1};
  }
  FLASHBSR_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The barriers of a ring of buffers: full when what belongs into a stage has arrived, empty when
/// nobody reads it any more.
template <int kStages>
struct Pipeline {
  using Place = RingPlace<kStages>;
  static constexpr int kBytes = 16 * kStages;
  uint32_t barriers;  ///< shared address: full ..., empty ...

  FLASHBSR_DEVICE uint32_t full(int32_t stage) const { return barriers + 8 * stage; }
  FLASHBSR_DEVICE uint32_t empty(int32_t stage) const { return barriers + 8 * (kStages + stage); }

  FLASHBSR_DEVICE void init(int writers, int readers) const {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(full(i), writers);
      ptx::mbarrier_init(empty(i), readers);
    }
  }
  FLASHBSR_DEVICE void wait_full(const Place& at) const {
    ptx::mbarrier_wait<kArch>(full(at.stage), at.parity);
  }
  /// A fresh ring is empty: a barrier lets a wait for the phase before its first pass.
  FLASHBSR_DEVICE void wait_empty(const Place& at) const {
    ptx::mbarrier_wait<kArch>(empty(at.stage), at.parity ^ 1);
  }
  FLASHBSR_DEVICE void release(const Place& at) const { ptx::mbarrier_arrive(empty(at.stage)); }
};

/// How the rows of one warpgroup see an item's tiles: nothing of tiles above `top`; some of `top`
/// to `bottom`; everything of `whole_top` to `whole_bottom`. top < bottom: nothing at all.
struct TileRange {
  int32_t top = -1;
  int32_t bottom = 0;
  int32_t whole_top = -1;
  int32_t whole_bottom = 0;
};

/// A claimed item, and how its KV positions fall into tiles: tile j begins at start + j kKvTile.
struct Tile {
  WorkItem item;
  Request request;
  TileRange ranges[3];  ///< of every consumer
  int32_t start;
  int32_t count;  ///< of KV tiles; -1: no item is left
  int32_t pad[2];
};

/// Query token and head of packed row `r` of an item.
struct RowName {
  int32_t token;
  int32_t q_head;

  FLASHBSR_DEVICE RowName(const KernelArgs& args, const WorkItem& item, int32_t r) {
    token = args.group.quotient(item.row_begin + r);
    q_head = item.kv_head * static_cast<int32_t>(args.group.divisor) +
             args.group.remainder(item.row_begin + r, token);
  }
};

/// A block's shared memory.
template <class Traits>
struct Shared {
  using KvPipeline = Pipeline<Traits::kStages>;
  using KeyPipeline = Pipeline<Traits::kStages * Traits::kKeyParts>;
  /// Of K, or of what comes beside it.
  template <bool kKeys>
  using PipelineOf = Pipeline<Traits::kStages*(kKeys ? Traits::kKeyParts : 1)>;
  /// Of where it lands.
  template <bool kKeys>
  using LandingOf = Pipeline<(kKeys ? Traits::kPreparesKeys : Traits::kPreparesValues)
                                 ? Traits::kLandingStages
                                 : Traits::kStages * (kKeys ? Traits::kKeyParts : 1)>;
  using QueryPipeline = Pipeline<Traits::kQueryStages>;
  using TilePipeline = Pipeline<Traits::kTileSlots>;
  using PlacePipeline = Pipeline<Traits::kPlaceSlots>;

  char* memory;                    ///< all of it
  uint32_t queries, keys, values;  ///< addresses of the tiles' first buffers
  Span* spans;                     ///< of the rows of every slot's item
  Tile* tiles;
  KeyPipeline key_pipeline;
  KvPipeline value_pipeline;
  /// Where K, V and Q arrive that a producer warp has work with before they are full: what is to be
  /// rotated, V with rows to clean, what cp.async wrote.
  uint32_t raw_keys, raw_values, raw_queries;
  QueryPipeline query_pipeline;
  uint32_t narrow_done;  ///< completed when consumers are done with narrow items
  TilePipeline tile_pipeline;
  uint32_t loadable;   ///< by slot: producers know the item, which consumers wait for more of
  uint32_t claimable;  ///< few tiles of the item are left to load: it is time for the next one
  /// Where copies of K and V land: the tiles themselves, or what is made into them.
  uint32_t landing_keys, landing_values;
  uint32_t places;        ///< of rows that are gathered
  uint32_t sums;          ///< of O (long_sums.h)
  uint32_t token_scales;  ///< of every stage of K, and so of V: K's, then V's (token_scales.h)
  uint32_t scales_empty;  ///< by stage: consumers are done with them
  PlacePipeline place_pipeline;
  /// A word per stage of K: what a mask in bits makes of the tile, TileKinds of the consumers.
  uint32_t kinds;
  LandingOf<true> landing_key_pipeline;
  LandingOf<false> landing_value_pipeline;

  FLASHBSR_DEVICE explicit Shared(char* memory) : memory(memory) {
    static_assert(sizeof(Span) * Traits::kRows == Traits::kSpanBytes);
    static_assert(sizeof(Tile) == Traits::kTileRecordBytes);
    queries = ptx::shared_address(memory);
    keys = queries + Traits::kKeyOffset;
    values = queries + Traits::kValueOffset;
    spans = reinterpret_cast<Span*>(memory + Traits::kSpanOffset);
    tiles = reinterpret_cast<Tile*>(memory + Traits::kTileOffset);
    key_pipeline = {queries + Traits::kBarrierOffset};
    value_pipeline = {key_pipeline.barriers + KeyPipeline::kBytes};
    raw_values = value_pipeline.barriers + KvPipeline::kBytes;
    raw_keys = raw_values + 8 * Traits::kStages;
    raw_queries = raw_keys + 8 * Traits::kStages * Traits::kKeyParts;
    query_pipeline = {raw_queries + 8 * Traits::kQueryStages};
    tile_pipeline = {query_pipeline.barriers + QueryPipeline::kBytes};
    loadable = tile_pipeline.barriers + TilePipeline::kBytes;
    claimable = loadable + 8 * Traits::kTileSlots;
    narrow_done = claimable + 8;
    constexpr int kBarriers = 3 * (1 + Traits::kKeyParts) * Traits::kStages +
                              3 * Traits::kQueryStages + 3 * Traits::kTileSlots + 1 +
                              Traits::kMixed;
    // The last of the barriers' bytes.
    constexpr int kKindBytes = 4 * Traits::kStages * Traits::kKeyParts;
    constexpr int kScaleBarriers = Traits::kTokenScales ? 8 * Traits::kStages : 0;
    static_assert(Traits::kPreparesValues
                      ? 8 * kBarriers <= 256
                      : 8 * kBarriers + kScaleBarriers <= Traits::kBarrierBytes - kKindBytes);
    kinds = queries + Traits::kBarrierOffset + Traits::kBarrierBytes - kKindBytes;
    places = queries + Traits::kPlaceOffset;
    sums = queries + Traits::kSumOffset;
    token_scales = queries + Traits::kTokenScaleOffset;
    place_pipeline = {queries + Traits::kPlaceBarrierOffset};
    landing_keys = keys;
    landing_values = values;
    scales_empty = queries + Traits::kBarrierOffset + kBarriers * 8;
    landing_key_pipeline = {key_pipeline.barriers};
    landing_value_pipeline = {value_pipeline.barriers};
    if constexpr (Traits::kPreparesValues) {
      constexpr int kPreparedBarriers = 256;  // behind all others
      constexpr int kLandingBarriers = LandingOf<false>::kBytes + LandingOf<true>::kBytes;
      static_assert(kPreparedBarriers + kLandingBarriers + kScaleBarriers <=
                    Traits::kBarrierBytes - kKindBytes);
      landing_values = queries + Traits::kLandingValueOffset;
      landing_value_pipeline = {queries + Traits::kBarrierOffset + kPreparedBarriers};
      scales_empty = landing_value_pipeline.barriers + kLandingBarriers;
      if constexpr (Traits::kPreparesKeys) {
        landing_keys = queries + Traits::kLandingKeyOffset;
        landing_key_pipeline = {landing_value_pipeline.barriers + LandingOf<false>::kBytes};
      }
    }
  }

  /// One thread; a fence and a block barrier follow.
  /// @param sorts  K is full when somebody has said its kind, too
  FLASHBSR_DEVICE void init_barriers(bool gather, bool rotates, bool sorts) const {
    const int consumers = 4 * Traits::kConsumers;  // warps
    // What cp.async writes, every thread announces that writes it, and what others widen or rotate
    // of that, every thread that has read it, so that race detectors see who is done.
    const int copies = gather ? 32 * kGatherWarps : 1;
    const int side = Traits::kSideWideners;
    const int preparers = side ? side : gather ? 1 : 2, readers = preparers * (gather ? 32 : 1);
    const int writers = Traits::kWideners       ? Traits::kWideners
                        : Traits::kRowLoaders   ? Traits::kRowWriters
                        : rotates               ? readers
                        : Traits::kPreparesKeys ? preparers
                                                : 1;
    // The warps that are the last to read a stage: of latents one warpgroup's.
    const int last = Traits::kLatent ? 4 : consumers;
    key_pipeline.init(writers + sorts + (Traits::kTokenScales ? 32 : 0), last);
    value_pipeline.init(Traits::kWideners         ? kTailWarps
                        : Traits::kPreparesValues ? preparers
                                                  : 1,
                        last);
    if constexpr (Traits::kTokenScales) {
#pragma unroll
      for (int i = 0; i < Traits::kStages; ++i) {
        ptx::mbarrier_init(scales_empty + 8 * i, 32 * consumers);
      }
    }
    if constexpr (Traits::kPreparesKeys) landing_key_pipeline.init(copies, readers);
    if constexpr (Traits::kPreparesValues) landing_value_pipeline.init(copies, readers);
    query_pipeline.init(rotates ? preparers : 1, consumers);
    // Here every thread arrives, so that race detectors see who is done: once per item it is cheap.
    place_pipeline.init(32, Traits::kWideners     ? 32 * (Traits::kWideners + kTailWarps)
                            : Traits::kRowLoaders ? 32 * Traits::kRowLoaders
                                                  : copies);
    if constexpr (Traits::kMixed) ptx::mbarrier_init(narrow_done, 128 * Traits::kConsumers);
    tile_pipeline.init(32, 32 * (consumers + (side ? side + copying_warps(gather) : kLoaderWarps)));
#pragma unroll
    for (int i = 0; i < Traits::kTileSlots; ++i) ptx::mbarrier_init(loadable + 8 * i, 32);
    ptx::mbarrier_init(claimable, 1);
#pragma unroll
    for (int i = 0; i < Traits::kStages; ++i) ptx::mbarrier_init(raw_values + 8 * i, copies);
#pragma unroll
    for (int i = 0; i < Traits::kStages * Traits::kKeyParts; ++i) {
      ptx::mbarrier_init(raw_keys + 8 * i, copies);
    }
#pragma unroll
    for (int i = 0; i < Traits::kQueryStages; ++i) ptx::mbarrier_init(raw_queries + 8 * i, 1);
  }

  /// Warps of the producer warpgroup: by TMA 0 loads Q and K, 1 loads V and 2 cleans it; or 0 and 1
  /// gather K and V, and 2 makes them visible. Where V is prepared or K is rotated, 0 loads
  /// everything, or 0 and 1 gather it, and the others up to 2 widen, transpose or rotate. The last
  /// one schedules. Where there are wideners beside this warpgroup, 0 loads Q, 1 and 2 write tails.
  static constexpr int kLoaderWarps = 3 + Traits::kWideners;
  static constexpr int kTailWarps = 2;
  static constexpr int kGatherWarps = 2;
  /// Where what is copied is prepared.
  FLASHBSR_DEVICE static int copying_warps(bool gather) { return gather ? kGatherWarps : 1; }
  static constexpr int kSchedulerWarp = 3;
};

}  // namespace flashbsr::sm90a
