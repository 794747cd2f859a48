// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler is told: the computation's shape, the device, the policy of splits, the
// capacity; and the sizes of a plan that follow from them, exact before any array exists.
#pragma once

#include <array>

#include <flashbsr/core/math.h>
#include <flashbsr/core/plan.h>

namespace flashbsr {

/// Blocks of the clusters that tiles are cut for, and of each size how many blocks run at once on a
/// device; 0: it takes none. The 32 tiles of 16 x 1024 latent tokens are 96 blocks in threes, where
/// twos are 64, and fours would be 128 of the 120 that an H200 runs so: 21.9 us in place of 25.1.
inline constexpr int32_t kClusterSizes[] = {2, 3, 4, 6, 8, 16};
using ClusterBlocks = std::array<int32_t, std::size(kClusterSizes)>;

/// What the computation fixes.
struct Shape {
  int32_t num_qo_heads = 1;
  int32_t num_kv_heads = 1;
  int32_t heads_of_item = 1;  ///< KV heads that are one of num_kv_heads
  bool causal = false;
  int32_t window_left = -1;
  bool custom_mask = false;
  /// Whether requests may share the load of KV that they begin with (plan/share.h).
  bool may_share = false;
  bool placed = false;  ///< requests say where their queries are

  // Context parallelism, as in PlanHeader.
  int32_t context_size = 1;
  int32_t context_rank = 0;
  int32_t context_interleave = 1;
  int32_t end_position = 0;  ///< as in PlanHeader

  /// What decides which keys a row sees.
  void write_visibility(PlanHeader& h) const {
    h.end_position = end_position;
    h.flags |= (causal ? kPlanCausal : 0) | (placed ? kPlanPlaced : 0);
    h.window_left = window_left;
    h.context_size = context_size;
    h.context_rank = context_rank;
    h.context_interleave = context_interleave;
  }

  bool operator==(const Shape&) const = default;

  /// As it is where an item reads so many KV heads: they are one, with the query heads of all.
  Shape with_heads_of_item(int32_t heads) const {
    Shape shape = *this;
    shape.num_kv_heads = num_kv_heads * heads_of_item / heads;
    shape.heads_of_item = heads;
    return shape;
  }
};

/// What the device fixes. The defaults are the CPU's.
struct DeviceLimits {
  int32_t num_workers = 32;
  int32_t tile_rows = 128;    ///< most packed rows per item
  int32_t heads_of_item = 1;  ///< KV heads that an item reads
  int32_t kv_tile = 128;      ///< chunks are multiples of it
  int32_t min_chunk = 512;    ///< shorter chunks cost more in merging than they win in balance
  // cost(item) = per_item + kv * (per_kv + per_kv_row * ceil(rows / 2^row_shift)). On a Zen 5 core
  // one unit is about four cycles: packing a token of K and V costs as much as 24 rows of
  // arithmetic on it.
  int32_t cost_per_item = 2000;
  int32_t cost_per_kv = 24;
  int32_t cost_per_kv_row = 1;
  int32_t cost_row_shift = 0;

  /// The claim order: most expensive first, or request by request, the most expensive first, so
  /// that what runs at the same time shares K and V in the cache.
  bool by_request = false;
  /// Where requests share all of K and V, KV head by KV head comes first: what runs at the same
  /// time then reads 1 / num_kv_heads of them. 8192 tokens of 8 heads of 128 dims in 16 bits are 34
  /// MB, of an L2 of 50 MB in two halves.
  bool by_head = false;
  /// A request whose rows are no multiple of tile_rows has its short tile at the front, where a
  /// causal mask leaves it least to do.
  bool short_tile_first = false;

  /// Algorithm 1 alone, or the cheapest of several cuts by the model that plan/candidates.h has.
  bool price_splits = false;
  int32_t cost_per_split = 0;   ///< what a part of a split tile costs beyond its work
  int32_t cost_per_shared = 0;  ///< a partial state more of a request that shares, and its merge
  /// Where workers share the memory: what a part takes a worker that has other items behind it,
  /// while others read.
  int32_t cost_per_early_part = 0;
  int32_t cost_of_launch = 0;   ///< before the first item and behind the last
  int32_t cost_of_merging = 0;  ///< what a plan with split tiles costs behind its longest queue
  int32_t cost_per_merged_part = 0;  ///< and for each part of the tile that has most of them
  int32_t cost_per_merged_row = 0;   ///< and for each row of them, and of three parts more
  int32_t cost_per_state = 0;        ///< and for each partial state, at the memory's rate
  int32_t cost_of_states = 0;        ///< and for 1024 rows of all partial states,
  int32_t hidden_states = 0;         ///< beyond so many
  /// In place of these, where no worker has more than one item and blocks merge shares of their own
  /// tile (kernel/own_merge.h): of all, of a part of the tile that has most, of a state's row. 0:
  /// they do not.
  int32_t cost_of_own_merging = 0, cost_per_own_part = 0, cost_per_own_row = 0;
  int32_t tail_rounds = 3;  ///< most rounds of all workers of which the last one is cut finer
  /// Of 1024 KV tokens of a head, for all who need them, at the device's rate. 0: not priced.
  int32_t cost_of_reading = 0;
  int32_t cost_of_rereading = 0;  ///< by every other tile of their request
  /// Whether workers share the memory, which one then has more of while others are idle, by
  /// cost_per_kv; otherwise that is what products take, and the memory has cost_of_reading.
  bool memory_bound = true;
  /// What a worker then takes, in 1024 of its time while all are busy: alone, and with half of the
  /// others, which is all that their ports give.
  int32_t pace_alone = 570, pace_of_half = 900;
  /// What a KV token takes that others read at the same time, from L2, in 1024 of its cost.
  int32_t pace_again = 1024;
  /// Whether blocks that have nothing left to do merge (kernel/merge_queue.h): then parts that many
  /// requests share may end last.
  bool idle_merge = false;
  bool sliced_merges = false;  ///< and each by several warps, of all blocks
  /// Of clusters whose blocks merge among themselves what a tile was split into.
  ClusterBlocks cluster_blocks{};
  int32_t cost_in_cluster = 0;  ///< of such a merge
  /// Rows of another kernel, for batches of few parts, where there may be one. 0: there is none.
  int32_t fewer_rows = 0;
  int32_t units_per_us = 0;  ///< units of cost in a microsecond, to speak of it; 0: unknown

  /// Parts of split tiles that any plan may have. Cuts that need more are no candidates.
  int64_t max_slots() const { return (price_splits ? 4 : 2) * static_cast<int64_t>(num_workers); }

  bool operator==(const DeviceLimits&) const = default;
};

namespace detail {

/// What a KV token costs an item of so many packed rows.
inline int64_t kv_weight(const DeviceLimits& limits, int64_t rows) {
  const int64_t one = int64_t{1} << limits.cost_row_shift;
  return limits.cost_per_kv + limits.cost_per_kv_row * ((rows + one - 1) >> limits.cost_row_shift);
}

/// Cost of a KV token of which the first reader takes `first`, and all together `all`.
inline int64_t read_again(const DeviceLimits& limits, int64_t all, int64_t first) {
  return first + (all - first) * limits.pace_again / 1024;
}

}  // namespace detail

/// Most packed rows of a request that has few, by the query heads of a KV head: what kernels that
/// stream K and V hold. 0: those hold no token of so many.
inline int32_t narrow_rows(int64_t group) { return group <= 8 ? 8 : group <= 16 ? 16 : 0; }

/// The workers of a kernel: alike in most. In one for mixed batches a block is a wide worker, or
/// several for narrow tiles, which join the wide ones when they are done (kernel/sm90a/narrow.h).
/// Or narrow tiles have a kernel of their own, before that of wide ones, and both have all SMs.
struct Workers {
  DeviceLimits wide;        ///< its workers are all blocks until they are dealt
  DeviceLimits narrow;      ///< for tiles of at most narrow_rows packed rows; as many as may be
  int32_t narrow_rows = 0;  ///< 0: there are none
  bool apart = false;       ///< they have a kernel of their own
  int32_t narrow_per_block = 1;  ///< workers, otherwise
  int32_t cost_of_reading = 0;   ///< of 1024 KV tokens of a head, for both kinds; 0: not priced
  int32_t cost_of_both = 0;      ///< of a launch that has both, beside what either costs

  Workers(const DeviceLimits& limits = {}) : wide(limits) {}

  bool mixed() const { return narrow_rows > 0; }
  int32_t count() const { return wide.num_workers + (mixed() ? narrow.num_workers : 0); }
  int32_t narrow_blocks() const {
    return mixed() && !apart ? narrow.num_workers / narrow_per_block : 0;
  }

  /// How many blocks narrow work of a cost takes for as long as the others take for the wide work.
  int32_t even_blocks(int64_t wide_cost, int64_t narrow_cost) const {
    const int64_t narrow_time = narrow_cost / narrow_per_block, sum = wide_cost + narrow_time;
    return static_cast<int32_t>((wide.num_workers * narrow_time + sum / 2) /
                                max_of<int64_t>(sum, 1));
  }
  /// With so many blocks for narrow work, but as many as there may be, and one at least.
  Workers dealt(int32_t blocks) const {
    Workers w = *this;
    if (apart) return w;
    blocks = max_of(min_of(blocks, narrow_blocks()), 1);
    w.narrow.num_workers = blocks * narrow_per_block;
    w.wide.num_workers = max_of(wide.num_workers - blocks, 1);
    return w;
  }
  /// What a tile of so many rows costs.
  const DeviceLimits& of(int64_t rows) const { return rows <= narrow_rows ? narrow : wide; }

  bool operator==(const Workers&) const = default;
};

struct SplitPolicy {
  int32_t fixed_size = 0;  ///< > 0: chunks end at multiples of it, whatever else is in the batch
  bool disabled = false;

  bool operator==(const SplitPolicy&) const = default;
};

/// Upper bounds for a plan whose buffers must not move. Default: none, grow as needed.
struct Capacity {
  int64_t max_requests = -1;
  int64_t max_q_tokens = -1;
  int64_t max_kv_indices = -1;  ///< ragged KV: token rows
  int64_t max_kv_len = -1;      ///< instead: of every request that there may be

  bool fixed() const { return max_requests >= 0; }
  bool operator==(const Capacity&) const = default;
  /// Lengths as entries of page lists, by the pages of the first plan.
  void count_pages(int32_t page_size) {
    if (max_kv_indices < 0)
      max_kv_indices = max_requests * ceil_div<int64_t>(max_kv_len, page_size);
  }
};

/// Sizes of the plan's sections.
struct PlanSizes {
  int64_t requests = 0;
  int64_t items = 0;
  int64_t merges = 0;
  int64_t partial_rows = 0;
  int64_t kv_indices = 0;
  int64_t q_rows = 0;
  int64_t merge_parts = 0;

  /// Of requests, items and merges.
  int64_t record_words() const { return 8 * (requests + items + merges); }
  int64_t total_words(int32_t workers, bool bounds) const {
    return static_cast<int64_t>(sizeof(PlanHeader) / 4) + 16 * static_cast<int64_t>(workers) +
           (bounds ? 2 : 1) * record_words() + (workers + 1) + items + kv_indices + q_rows +
           4 * merge_parts;
  }
};

/// What shared parts may add under a capacity, in multiples of what the requests have. Beyond it
/// plan/share.h shares no more.
inline constexpr int64_t kMaxSharedTiles = 1;  ///< tiles of all parts, of the requests' tiles
inline constexpr int64_t kMaxSharedRows = 3;   ///< rows of all parts, of the requests' rows
inline constexpr int64_t kMaxSharedLevels = 4;

/// The most any plan within `capacity` can need.
///
/// Split bound: a split tile of cost c > bound has at most ceil(c / bound) < 2 c / bound chunks,
/// and the costs add up to workers * bound, so there are fewer than 2 * workers slots. With
/// price_splits a cut of smaller chunks is a candidate only if its slots are at most max_slots(),
/// and the whole cut, which has none, always is one. Either way a merge has two slots or more, and
/// an item is a tile of a KV head, or has a slot. Requests of one KV head each have no more tiles
/// than as many that have all: their tokens are at most max_q_tokens of every head.
///
/// Shared parts: every tile may have a partial state without being split, a part's tiles cut the
/// requests' into at most as many more runs, and a run has a part per level.
/// @param all  before blocks are dealt to wide and narrow tiles: of either as many as may be
inline PlanSizes sizes_for(const Capacity& capacity, const Shape& shape, const Workers& all,
                           const SplitPolicy& split, int32_t page_size) {
  const DeviceLimits& limits = all.wide;
  const int64_t group = shape.num_qo_heads / shape.num_kv_heads;
  const int64_t heads = shape.num_kv_heads, rows = capacity.max_q_tokens * group;
  const int64_t tiles = capacity.max_requests + rows / limits.tile_rows;
  PlanSizes sizes{.requests = capacity.max_requests, .kv_indices = capacity.max_kv_indices};
  if (split.disabled) {
    sizes.items = tiles * heads;
    return sizes;
  }
  if (split.fixed_size > 0) {
    const int64_t chunks =
        ceil_div<int64_t>(capacity.max_kv_indices * page_size, split.fixed_size) + 1;
    sizes.items = tiles * heads * chunks;
    sizes.merges = tiles * heads;
    sizes.partial_rows = rows * heads * chunks;
    return sizes;
  }
  // Parts are cut at half of the bound: twice as many slots.
  const int64_t slots =
      max_of(limits.max_slots(), shape.may_share ? int64_t{4} * limits.num_workers : 0);
  const int64_t narrow = all.mixed() ? all.narrow.max_slots() : 0;
  sizes.partial_rows = slots * limits.tile_rows + narrow * all.narrow_rows;
  sizes.merges = (slots + narrow) / 2;
  sizes.items = tiles * heads + slots + narrow;
  if (!shape.may_share) return sizes;
  const int64_t runs = (1 + kMaxSharedTiles) * tiles * heads;
  sizes.requests += kMaxSharedTiles * tiles;
  sizes.items += kMaxSharedTiles * tiles * heads;
  sizes.merges += runs;
  sizes.partial_rows += (1 + kMaxSharedRows) * rows * heads;
  sizes.q_rows = capacity.max_q_tokens;
  sizes.merge_parts = (1 + kMaxSharedLevels) * runs;
  return sizes;
}

/// Bytes of partial states: [rows, D_vo] and [rows] floats.
inline int64_t partial_bytes(int64_t rows, int64_t dim_vo) { return rows * (dim_vo + 1) * 4; }

}  // namespace flashbsr
