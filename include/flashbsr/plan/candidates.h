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
//   cluster  every tile in 2 to 16 parts (kClusterSizes), whose blocks are a cluster and merge
//            among themselves, where a device and a kernel have that
//
// Their price is the time until the last queue ends, and what comes before and after it:
//
//   price = sum over n of (time while n workers are busy) x pace(n) + launch + merging
//   pace  = what a worker is slowed down by n - 1 others
//
// Queues' costs are what a worker takes. Of decode (memory_bound) that is by its share of the
// memory while all are busy; of prefill by its products, whose memory is priced beside them, at
// cost_of_reading. tools/plan_model.py measures how right that is: 1400 plans of 200 random batches
// on an H200 are what the factors were fitted to.
//
//   - While n workers are busy each has n-th parts of the memory, up to what one can stream: 34.5
//     GB/s while all are, 62 alone. SMs share ports in pairs, so a bit more than half of them busy
//     is no gain over half: 72 equal items took 194 us, 38 GB/s each, where 132 with as many bytes
//     took 125.
//   - Tiles of one request read its K and V again, from L2 and not from there alone: that has a
//     rate of its own, if they have as many rows. 1 x 263 queries of 16 heads over 57163 tokens in
//     128 items took 316 us, where all K and V once are 103, all items' 307, and their products
//     220.
//   - A merge costs by rows, each part's and those of three more: 5 x 1 over 8942 tokens of one KV
//     head took 16 us in 51 parts of 8 rows in tiles of 128, 27 by a price of parts alone.
#pragma once

#include <algorithm>
#include <cmath>
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
  int64_t empty = 0;  ///< chunks at the end of the order that have no KV, of a KV head
};

class Candidates {
 public:
  /// The cut to take, dealt. Valid until the next call.
  Candidate& choose(const std::vector<Tile>& tiles, const Shape& shape, const DeviceLimits& limits,
                    const SplitPolicy& split) {
    tiles_ = &tiles;
    shape_ = &shape;
    limits_ = &limits;
    total_ = empty_ = 0;
    shared_ = false;
    longest_ = 1;
    for (const Tile& tile : tiles) {
      if (tile.length() == 0) ++empty_;
      shared_ = shared_ || tile.part;
      total_ += kv_weight(limits, tile) * tile.length();
      longest_ = max_of(longest_, tile.length());
    }
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
      return dealt();
    }
    deal(best_);
    return dealt();
  }

  /// Of the whole cut where another was taken; otherwise the least of the others, or a bound below
  /// it where they need not be tried. 0: there is none.
  int64_t other_price() const { return other_price_; }

 private:
  static constexpr int32_t kQuotaPercents[] = {125, 110, 100, 80, 50, 25};
  static constexpr int32_t kTailPercents[] = {50, 100, 200, 300};
  static constexpr int32_t kRounds = 3;
  /// What is less than 0.4 % better is not worth the time to find it.
  static int64_t worth(int64_t price) { return price - price / 256; }

  void search(int64_t quota) {
    // Those without KV, of requests that pad a graph, need no worker of their own.
    const int64_t tiles = static_cast<int64_t>(tiles_->size()) - empty_;
    const int64_t heads = shape_->num_kv_heads, workers = limits_->num_workers;
    best_.policy = kPolicyWhole;
    best_.kv_chunk = longest_;
    best_.cut.whole(*tiles_, *limits_, *shape_);
    deal(best_);
    best_.price = price(best_);
    const int64_t whole = best_.price;
    // No cut with splits is cheaper than this. Often whole is, or nearly: nothing else is tried.
    // Tiles that share leave states even whole.
    other_price_ = least_price(tiles + 1, max_of<int64_t>(best_.cut.split_chunks + 1, 2));
    if (worth(whole) <= other_price_) return;

    least_ = std::numeric_limits<int64_t>::max();
    start_trials();
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
      start_trials();
    } else if (tiles * heads <= workers) {
      for (int32_t rounds = 1; rounds <= kRounds; ++rounds) {
        try_bound(kPolicyEven, 100 * rounds, even_bound(rounds * workers));
      }
      // Fewer parts than workers, where a merge takes longer the more it has.
      const bool priced = limits_->cost_per_merged_part + limits_->cost_per_merged_row > 0;
      for (int32_t part = 2; priced && part <= 8; part *= 2) {
        if (tiles * heads * part > workers) break;
        try_bound(kPolicyEven, 100 / part, even_bound(workers / part));
      }
    }
    for (size_t i = 0; i < std::size(kClusterSizes); ++i) {
      try_cluster(kClusterSizes[i], limits_->cluster_blocks[i]);
    }
    for (const int32_t percent : kQuotaPercents) {
      try_bound(kPolicyQuota, percent, max_of<int64_t>(quota * percent / 100, 1));
    }
    const bool none = least_ == std::numeric_limits<int64_t>::max();
    other_price_ = best_.policy != kPolicyWhole ? whole : none ? 0 : least_;
  }

  /// Of cuts where no tile is kept whole.
  void start_trials() {
    keep_.clear();
    tried_.clear();
    last_chunk_ = 0;
  }

  void try_bound(PlanPolicy policy, int32_t percent, int64_t bound) {
    const int64_t chunk = chunk_length(*limits_, bound, limits_->tile_rows);
    if (chunk == last_chunk_) return;
    last_chunk_ = chunk;
    const Count count = count_parts(bound);
    // A tile has no fewer parts by a lower bound, so as many in all are the same of each: this cut.
    if (std::find(tried_.begin(), tried_.end(), count.items) != tried_.end()) return;
    tried_.push_back(count.items);
    if (count.slots == 0 || count.slots * shape_->num_kv_heads > limits_->max_slots()) return;
    trial_.price = least_price(count.items, count.states);
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
    int64_t items;  ///< that have KV
    int64_t slots;
    int64_t states;  ///< slots, and those of tiles that share
  };

  /// At least what Cut::bounded makes of this bound, of a KV head.
  Count count_parts(int64_t bound) const {
    ChunkLength most(*limits_, bound);
    int64_t items = 0, slots = 0, states = 0;
    for (size_t t = 0; t < tiles_->size(); ++t) {
      const Tile& tile = (*tiles_)[t];
      const int64_t length = tile.length();
      const bool cut = keep_.empty() || !keep_[t];
      const int64_t limit = best_.cut.longest(
          tile, cut ? most(tile.row_count) : max_of<int64_t>(length, 1), *limits_);
      const int64_t parts = length > 0 ? parts_of(length, limit) : 0;
      items += parts;
      if (parts > 1) slots += parts;
      if (parts > 1 || tile.shares) states += parts;
    }
    return {items, slots, states};
  }

  /// The least bound, in KV tiles, with at most so many items.
  int64_t even_bound(int64_t items) const {
    const int64_t tile_cost = limits_->kv_tile * kv_weight(*limits_, limits_->tile_rows);
    int64_t low = 1, high = ceil_div<int64_t>(longest_, limits_->kv_tile);
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (count_parts(middle * tile_cost).items * shape_->num_kv_heads <= items) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return high * tile_cost;
  }

  /// All but the chunks without KV, where these come last: what pads a batch shall change no price,
  /// and so no cut and no bits.
  void deal(Candidate& c) const {
    const int32_t heads = shape_->num_kv_heads;
    c.deal.start(limits_->num_workers);
    c.empty = 0;
    const bool by_cost = !limits_->by_request && c.cluster_parts == 0;
    const bool splits = c.cut.split_chunks > 0;
    // Equal neighbours are dealt at once.
    int64_t cost = 0, count = 0;
    bool split = false;
    for (const uint32_t& i : c.cut.order) {
      const Chunk& chunk = c.cut.chunks[i];
      if (by_cost && chunk.cost == limits_->cost_per_item) {
        c.empty = &c.cut.order.back() - &i + 1;
        break;
      }
      const bool part = splits && c.cut.parts[static_cast<size_t>(chunk.tile)].count > 1;
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

  /// The best, with its chunks without KV: zeros are written for them.
  Candidate& dealt() {
    best_.deal.give(limits_->cost_per_item, best_.empty * shape_->num_kv_heads, false);
    return best_;
  }

  int64_t price(Candidate& c) const {
    const int64_t workers = limits_->num_workers;
    const int64_t share = (int64_t{1} << 30) / workers;  // of the memory, in 2^30
    const int64_t most = limits_->memory_bound ? limits_->pace_of_half : 1024;
    const auto pace_of_memory = [&](int32_t busy) {
      const int64_t pace = busy * share >> 20;
      return 2 * busy > workers ? max_of(pace, most) : pace;
    };
    int64_t time = 0;
    if (limits_->memory_bound) {
      const int64_t alone = limits_->pace_alone;
      time = c.deal.time([&](int32_t busy) { return max_of(pace_of_memory(busy), alone); });
      if (c.cut.split_chunks > 0 && items_behind_parts(c) > 0) {
        const int64_t early = ceil_div(c.cut.split_chunks * shape_->num_kv_heads, workers);
        time = max_of(time, c.deal.longest() * alone / 1024 + early * limits_->cost_per_early_part);
      }
    } else if (reading_ == 0) {
      time = c.deal.longest();
    } else {
      // How much longer the memory takes than products, while all are busy.
      const int64_t mean =
          mean_queue(static_cast<int64_t>(c.cut.chunks.size()) - c.empty, c.cut.split_chunks);
      const int64_t slower = reading_ * 1024 / max_of<int64_t>(mean, 1);
      time = c.deal.time(
          [&](int32_t busy) { return longer_than(pace_of_memory(busy) * slower >> 10); });
    }
    return time + limits_->cost_of_launch + merging(c);
  }

  /// Pace of products beside the memory's, in 1024: of both the fourth root of the sum of fourth
  /// powers, since either has to wait for the other now and then. Exact, so plans are the same
  /// everywhere: what roots are taken of is below 2^53.
  static int64_t longer_than(int64_t memory) {
    const double of_memory = static_cast<double>(min_of<int64_t>(memory, 9000));
    constexpr double kOne = 1024.0 * 1024 * 1024 * 1024;
    const double squares =
        std::floor(std::sqrt(of_memory * of_memory * of_memory * of_memory + kOne));
    return max_of(static_cast<int64_t>(std::sqrt(squares)), memory);
  }

  /// Cost of a queue on average; items and parts of a KV head.
  int64_t mean_queue(int64_t items, int64_t slots) const {
    return (total_ + (items * limits_->cost_per_item + slots * limits_->cost_per_split) *
                         shape_->num_kv_heads) /
           limits_->num_workers;
  }

  /// Of K and V of a tile, what another one of the request does not find in L2, in 1024: nearly
  /// half where one has 126 rows and the other 189, nearly all with 64 and 192 (H100).
  int64_t apart(const Tile& tile, const Tile& other) const {
    const int64_t least = kv_weight(*limits_, tile.row_count);
    const int64_t most = kv_weight(*limits_, other.row_count);
    return most > least ? min_of<int64_t>((most - least) * 2048 / most, 1024) : 0;
  }

  /// What the memory takes for all K and V.
  int64_t reading() const {
    const std::vector<Tile>& tiles = *tiles_;
    int64_t once = 0, again = 0;
    for (size_t first = 0, end; first < tiles.size(); first = end) {
      int64_t longest = 0, all = 0;
      for (end = first; end < tiles.size() && tiles[end].request == tiles[first].request; ++end) {
        longest = max_of(longest, tiles[end].length());
        all += tiles[end].length();
      }
      // The short tile comes first, and is soon so far ahead that nobody finds in L2 what it read.
      const int64_t ahead = tiles[first].length() * apart(tiles[first], tiles[end - 1]) / 1024;
      once += longest + ahead;
      again += all - longest - ahead;
    }
    return (once * limits_->cost_of_reading + again * limits_->cost_of_rereading) *
           shape_->num_kv_heads / 1024;
  }

  /// What merges take behind the longest queue.
  int64_t merging(const Candidate& c) const {
    if (c.cut.split_chunks == 0) return 0;
    const int64_t heads = shape_->num_kv_heads;
    const int64_t items = static_cast<int64_t>(c.cut.chunks.size()) * heads;
    if (limits_->cost_of_own_merging > 0 && items <= limits_->num_workers && !shared_) {
      return limits_->cost_of_own_merging + c.cut.most_parts * limits_->cost_per_own_part +
             c.cut.split_rows * heads * limits_->cost_per_own_row;
    }
    const int64_t rows = max_of<int64_t>(c.cut.split_rows * heads - limits_->hidden_states, 0);
    int64_t merging = limits_->cost_of_merging + c.cut.longest_merge +
                      c.cut.split_chunks * heads * limits_->cost_per_state +
                      rows * limits_->cost_of_states / 1024;
    if (limits_->memory_bound) {
      // Queues begin with parts: with other items behind them, merges are hidden.
      const int64_t workers = limits_->num_workers;
      merging = merging * max_of<int64_t>(workers - items_behind_parts(c), 0) / workers;
    }
    return merging;
  }

  /// Requests that pad a graph have items, too, which are over at once.
  int64_t items_behind_parts(const Candidate& c) const {
    const int64_t items = static_cast<int64_t>(c.cut.chunks.size()) - c.cut.split_chunks;
    return (items - empty_) * shape_->num_kv_heads;
  }

  /// A bound below the price of any cut into so many items and parts of a KV head. Where products
  /// wait for the memory they do so as price() has it, while more than half of the workers are
  /// busy; with fewer, all takes twice as long.
  int64_t least_price(int64_t items, int64_t slots) const {
    const bool hidden = limits_->memory_bound && items > slots;
    int64_t queue = max_of<int64_t>(mean_queue(items, slots), 1);
    if (reading_ > 0 && !limits_->memory_bound) {
      queue = queue * min_of<int64_t>(longer_than(reading_ * 1024 / queue), 2048) / 1024;
    }
    const int64_t own = limits_->cost_of_own_merging;
    const int64_t merging =
        own > 0 ? min_of<int64_t>(own, limits_->cost_of_merging) : limits_->cost_of_merging;
    return max_of(queue, reading_) + limits_->cost_of_launch + (hidden ? 0 : merging);
  }

  // The batch of the current call.
  const std::vector<Tile>* tiles_ = nullptr;
  const Shape* shape_ = nullptr;
  const DeviceLimits* limits_ = nullptr;
  int64_t total_ = 0;
  int64_t reading_ = 0;  ///< what the memory takes for all of K and V
  int64_t longest_ = 0;  ///< KV tokens of a tile
  int64_t empty_ = 0;    ///< tiles without KV
  bool shared_ = false;  ///< there are parts that requests share

  // Of the search.
  std::vector<uint8_t> keep_;   ///< by tile: stays whole
  std::vector<int64_t> tried_;  ///< items of a KV head, of each cut
  int64_t last_chunk_ = 0;
  int64_t least_ = 0;  ///< price of the cuts with splits
  Candidate best_, trial_;
  int64_t other_price_ = 0;
};

}  // namespace flashbsr::detail
