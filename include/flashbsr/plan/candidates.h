// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Which way to cut. Algorithm 1 splits at one quota, total / workers. Where a device's limits ask
// for it, that is one of several candidates, all priced by one small model, and the cheapest is
// taken:
//
//   whole    nothing is split
//   quota    chunks of at most 1.25, 1.1, 1, 0.8, 0.5 or 0.25 quota
//   even     few long tiles: the shortest chunk with which the items are at most 1, 2 or 3 rounds
//            of all workers, or where long merges are dear 1/2, 1/4 or 1/8. 1 x 131072 tokens x 8
//            heads on 132 workers: 16 parts are 128 items; one quota makes 17, 136 items, and four
//            workers with two
//   tail     whole, but for the shortest tiles, beyond the last full round of all workers: those
//            in 1/2, 1, 2 or 3 rounds. 20 x 4096 tokens x 8 heads: 128 items whole, the other 32
//            in 4 parts each
//   cluster  every tile in 2, 4, 8 or 16 parts, whose blocks are a cluster and merge among
//            themselves, where a device and a kernel have that
//
//   price = mean KV + mean parts x cost_per_split + most items of a queue x cost_per_item
//           + 0.35 (longest queue - mean of the busy ones)
//
// and where products are the limit (not memory_bound), just the longest queue, and at least what
// the memory takes for all K and V. To both come the launch, and what merges after the longest
// queue where there are any. tools/plan_model.py measures how right that is. The queues' costs
// count cost_per_item and cost_per_split. The model and its factors were fitted on an H200 (132
// SMs, decode of head dim 128):
//
//   - Parts cost throughput: 1 x 131072 tokens in 136 parts took 124.7 us, in 264 parts 126.8
//     (bf16); 63 x 512 and 1 x 131072 in 216 parts 155.5, in 424 parts 157.6.
//   - Items cost where one queue has many: the same batch in 113 parts, but with 20 items in a
//     queue instead of 11, took 158.4 us (bf16), and 101.2 instead of 88.5 (e4m3).
//   - And parts cost time at the end of queues: Zipf lengths in 96 parts of at most 1.1 quotas took
//     21.6 us (bf16) and 16.5 (e4m3), in 64 of at most 1.25, whose longest queue is 6 % longer,
//     19.9 and 13.7.
//   - What the longest queue has above the others counts a third, because a worker that streams
//     while others are done gets more than its share of the memory: 16 requests of 512 to 1024
//     tokens whole, 1.45 x the mean on one worker, took 15.2 us; the best splits 15.4 to 16.9.
//   - There is an end to that: one worker alone streams at 80 GB/s (e4m3: 51), its share is 34.5.
//   - SMs share ports in pairs, so a bit more than half of them busy is no gain over half: 72
//     equal items took 194 us, 38 GB/s each, where 132 with as many bytes took 125.
#pragma once

#include <vector>

#include <flashbsr/plan/cut.h>
#include <flashbsr/plan/deal.h>

namespace flashbsr::detail {

/// A cut, dealt.
struct Candidate {
  Cut cut;
  Deal deal;
  PlanPolicy policy = kPolicyAlgorithm1;
  int32_t percent = 0;
  int64_t kv_chunk = 0;  ///< the bound, in tokens of a full tile
  int64_t price = 0;     ///< 0: not priced
  int32_t cluster_parts = 0;
};

class Candidates {
 public:
  /// The cut to take, dealt. Valid until the next call.
  Candidate& choose(const std::vector<Tile>& tiles, const Shape& shape, const DeviceLimits& limits,
                    const SplitPolicy& split) {
    tiles_ = &tiles;
    shape_ = &shape;
    limits_ = &limits;
    total_ = 0;
    for (const Tile& tile : tiles) total_ += kv_weight(limits, tile.row_count) * tile.length();
    total_ *= shape.num_kv_heads;
    reading_ = limits.cost_of_reading > 0 ? reading() : 0;
    other_price_ = 0;
    const int64_t quota = ceil_div<int64_t>(total_, limits.num_workers);
    best_.cut.part_bound = trial_.cut.part_bound =
        limits.idle_merge ? 0 : max_of<int64_t>(quota / 2, 1);
    best_.price = 0;
    best_.percent = 0;
    best_.cluster_parts = 0;
    best_.kv_chunk = chunk_length(limits, quota, limits.tile_rows);
    if (split.disabled) {
      best_.policy = kPolicyDisabled;
      best_.cut.whole(tiles, limits, shape);
    } else if (split.fixed_size > 0) {
      best_.policy = kPolicyFixed;
      best_.kv_chunk = split.fixed_size;
      best_.cut.fixed(tiles, limits, shape, split.fixed_size);
    } else if (!limits.price_splits) {
      best_.policy = kPolicyAlgorithm1;
      best_.cut.bounded(tiles, limits, shape, quota);
    } else {
      search(quota);
      return best_;
    }
    deal(best_);
    return best_;
  }

  /// Of the whole cut where another was taken; otherwise the least of the others, or a bound below
  /// it where they need not be tried. 0: there is none.
  int64_t other_price() const { return other_price_; }

 private:
  static constexpr int64_t kSpreadPercent = 35;  ///< of the longest queue beyond the others
  // The least share of the longest queue's modelled time that it takes:
  static constexpr int64_t kAlonePercent = 60;  ///< 34.5 of 80 GB/s in bf16, of 51 in e4m3
  static constexpr int64_t kPortPercent = 90;   ///< 34.5 of 38 GB/s, half to 95 % of workers busy
  static constexpr int32_t kQuotaPercents[] = {125, 110, 100, 80, 50, 25};
  static constexpr int32_t kTailPercents[] = {50, 100, 200, 300};
  static constexpr int32_t kRounds = 3;
  /// What is less than 0.2 % better is not worth the time to find it.
  static int64_t worth(int64_t price) { return price - price / 512; }

  void search(int64_t quota) {
    const int64_t tiles = static_cast<int64_t>(tiles_->size()), heads = shape_->num_kv_heads;
    const int64_t workers = limits_->num_workers;
    best_.policy = kPolicyWhole;
    best_.kv_chunk = 1;
    for (const Tile& tile : *tiles_) best_.kv_chunk = max_of(best_.kv_chunk, tile.length());
    longest_ = best_.kv_chunk;
    best_.cut.whole(*tiles_, *limits_, *shape_);
    deal(best_);
    best_.price = price(best_);
    const int64_t whole = best_.price;
    // No cut with splits is cheaper than this. Often whole is, or nearly: nothing else is tried.
    other_price_ = least_price((tiles + 1) * heads, 2 * heads);
    if (worth(whole) <= other_price_) return;

    least_ = std::numeric_limits<int64_t>::max();
    last_chunk_ = 0;
    keep_.clear();
    if (tiles * heads > workers && tiles * heads <= limits_->tail_rounds * workers) {
      // The order of the whole cut says which tiles are the longest.
      const int64_t kept = tiles * heads / workers * workers / heads;
      keep_.assign(tiles_->size(), 0);
      for (int64_t i = 0; i < kept; ++i) {
        const uint32_t chunk = best_.cut.order[static_cast<size_t>(i)];
        keep_[static_cast<size_t>(best_.cut.chunks[chunk].tile)] = 1;
      }
      for (const int32_t percent : kTailPercents) {
        try_bound(kPolicyTail, percent, even_bound(kept * heads + workers * percent / 100));
      }
      keep_.clear();
      last_chunk_ = 0;
    } else if (tiles * heads <= workers) {
      for (int32_t rounds = 1; rounds <= kRounds; ++rounds) {
        try_bound(kPolicyEven, 100 * rounds, even_bound(rounds * workers));
      }
      // Fewer parts than workers, where a merge takes longer the more it has.
      for (int32_t part = 2; limits_->cost_per_merged_part > 0 && part <= 8; part *= 2) {
        if (tiles * heads * part > workers) break;
        try_bound(kPolicyEven, 100 / part, even_bound(workers / part));
      }
    }
    for (int i = 0; i < 4; ++i) try_cluster(2 << i, limits_->cluster_blocks[i]);
    for (const int32_t percent : kQuotaPercents) {
      try_bound(kPolicyQuota, percent, max_of<int64_t>(quota * percent / 100, 1));
    }
    const bool none = least_ == std::numeric_limits<int64_t>::max();
    other_price_ = best_.policy != kPolicyWhole ? whole : none ? 0 : least_;
  }

  void try_bound(PlanPolicy policy, int32_t percent, int64_t bound) {
    const int64_t chunk = chunk_length(*limits_, bound, limits_->tile_rows);
    if (chunk == last_chunk_) return;
    last_chunk_ = chunk;
    const Count count = count_parts(bound);
    if (count.slots == 0 || count.slots > limits_->max_slots()) return;
    trial_.price = least_price(count.items, count.slots);
    if (trial_.price < worth(best_.price)) {
      trial_.policy = policy;
      trial_.percent = percent;
      trial_.cluster_parts = 0;
      trial_.kv_chunk = chunk;
      trial_.cut.bounded(*tiles_, *limits_, *shape_, bound, keep_.empty() ? nullptr : keep_.data());
      deal(trial_);
      trial_.price = price(trial_);
    }
    least_ = min_of(least_, trial_.price);
    if (trial_.price < worth(best_.price)) std::swap(best_, trial_);
  }

  /// Every tile in so many parts, where all items run at once. They have one KV head, and what
  /// shares KV is not among them.
  void try_cluster(int32_t parts, int64_t most) {
    most = min_of<int64_t>(most, limits_->num_workers);
    if (static_cast<int64_t>(tiles_->size()) * parts > most || shape_->num_kv_heads > 1) return;
    trial_.cut.even(*tiles_, *limits_, *shape_, parts);
    trial_.price = 0;
    const int64_t merge = limits_->cost_in_cluster +
                          int64_t{parts} * limits_->cost_per_merged_part + limits_->cost_of_launch;
    for (size_t t = 0; t < tiles_->size(); ++t) {
      if ((*tiles_)[t].shares) return;
      const Chunk& first = trial_.cut.chunks[t * static_cast<size_t>(parts)];
      trial_.price = max_of(trial_.price, first.cost + merge);
      trial_.kv_chunk = max_of<int64_t>(t ? trial_.kv_chunk : 1, first.kv_end - first.kv_begin);
    }
    least_ = min_of(least_, trial_.price);
    if (trial_.price >= worth(best_.price)) return;
    trial_.policy = kPolicyCluster;
    trial_.percent = 0;
    trial_.cluster_parts = parts;
    deal(trial_);
    std::swap(best_, trial_);
  }

  struct Count {
    int64_t items, slots;
  };

  /// At least what Cut::bounded makes of this bound, for all KV heads.
  Count count_parts(int64_t bound) const {
    ChunkLength most(*limits_, bound);
    int64_t items = 0, slots = 0;
    for (size_t t = 0; t < tiles_->size(); ++t) {
      const Tile& tile = (*tiles_)[t];
      const int64_t length = tile.length();
      const bool cut = keep_.empty() || !keep_[t];
      const int64_t limit = best_.cut.longest(
          tile, cut ? most(tile.row_count) : max_of<int64_t>(length, 1), *limits_);
      const int64_t parts = length > limit ? ceil_div(length, limit) : 1;
      items += parts;
      if (parts > 1) slots += parts;
    }
    return {items * shape_->num_kv_heads, slots * shape_->num_kv_heads};
  }

  /// The least bound, in KV tiles, with at most so many items.
  int64_t even_bound(int64_t items) const {
    const int64_t tile_cost = limits_->kv_tile * kv_weight(*limits_, limits_->tile_rows);
    int64_t low = 1, high = ceil_div<int64_t>(longest_, limits_->kv_tile);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (count_parts(middle * tile_cost).items <= items) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return high * tile_cost;
  }

  void deal(Candidate& c) const {
    const int32_t heads = shape_->num_kv_heads;
    c.deal.start(limits_->num_workers);
    // Equal neighbours are dealt at once.
    int64_t cost = 0, count = 0;
    bool split = false;
    for (const uint32_t i : c.cut.order) {
      const Chunk& chunk = c.cut.chunks[i];
      const bool part = c.cut.parts[static_cast<size_t>(chunk.tile)].count > 1;
      if (chunk.cost != cost || part != split) {
        c.deal.give(cost, count, split);
        cost = chunk.cost;
        split = part;
        count = 0;
      }
      count += heads;
    }
    c.deal.give(cost, count, split);
  }

  int64_t price(const Candidate& c) const {
    const int64_t workers = limits_->num_workers, heads = shape_->num_kv_heads;
    const int64_t items = static_cast<int64_t>(c.cut.chunks.size()) * heads;
    const int64_t slots = c.cut.split_chunks * heads;
    const Deal::Loads loads = c.deal.loads();
    const int64_t busy = max_of(loads.busy, 1), parts = slots * limits_->cost_per_split;
    const int64_t others = (total_ + items * limits_->cost_per_item + parts) / busy;
    const int64_t ends = limits_->cost_of_launch + merging(c);
    if (!limits_->memory_bound) return max_of(loads.longest, reading_) + ends;
    const int64_t shared = total_ / workers + parts / busy +
                           loads.most_items * limits_->cost_per_item +
                           (loads.longest - others) * kSpreadPercent / 100;
    const bool ports = 2 * loads.busy > workers && 20 * loads.busy < 19 * workers;
    return max_of(shared, loads.longest * (ports ? kPortPercent : kAlonePercent) / 100) + ends;
  }

  /// A bound by the memory: K and V of each request are read once. Where several tiles have the
  /// same, which come first, products are the limit, and the memory is for others afterwards.
  int64_t reading() const {
    const std::vector<Tile>& tiles = *tiles_;
    const int64_t heads = shape_->num_kv_heads;
    int64_t all = 0, alone = 0, work = 0;  // tokens, those of single tiles, costs of the others
    for (size_t first = 0, end; first < tiles.size(); first = end) {
      int64_t longest = 0, cost = 0;
      for (end = first; end < tiles.size() && tiles[end].request == tiles[first].request; ++end) {
        longest = max_of(longest, tiles[end].length());
        cost += kv_weight(*limits_, tiles[end].row_count) * tiles[end].length();
      }
      all += longest;
      (end - first == 1 ? alone : work) += end - first == 1 ? longest : cost;
    }
    const int64_t rate = limits_->cost_of_reading;
    return max_of(all * rate * heads / 1024,
                  alone * rate * heads / 1024 + work * heads / limits_->num_workers);
  }

  /// What merges take behind the longest queue.
  int64_t merging(const Candidate& c) const {
    if (c.cut.split_chunks == 0) return 0;
    int32_t most = 0;
    if (limits_->cost_per_merged_part > 0) {
      for (const auto& parts : c.cut.parts) most = max_of(most, static_cast<int32_t>(parts.count));
    }
    return limits_->cost_of_merging + int64_t{most} * limits_->cost_per_merged_part +
           c.cut.split_chunks * shape_->num_kv_heads * limits_->cost_per_state;
  }

  /// A bound below the price of any cut into so many items.
  int64_t least_price(int64_t items, int64_t slots) const {
    const int64_t workers = limits_->num_workers;
    const int64_t queue = (total_ + slots * limits_->cost_per_split) / workers +
                          ceil_div(items, workers) * limits_->cost_per_item;
    return max_of(queue, reading_) + limits_->cost_of_launch;
  }

  // The batch of the current call.
  const std::vector<Tile>* tiles_ = nullptr;
  const Shape* shape_ = nullptr;
  const DeviceLimits* limits_ = nullptr;
  int64_t total_ = 0;
  int64_t reading_ = 0;  ///< what the memory takes for all of K and V
  int64_t longest_ = 0;

  // Of the search.
  std::vector<uint8_t> keep_;  ///< by tile: stays whole
  int64_t last_chunk_ = 0;
  int64_t least_ = 0;  ///< price of the cuts with splits
  Candidate best_, trial_;
  int64_t other_price_ = 0;
};

}  // namespace flashbsr::detail
