// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Mixed batches: wide tiles and narrow ones have workers of their own, which run side by side, as
// many as take equally long, or one kind after the other. Each is cut and dealt as if it were
// alone; the two become one cut, the wide chunks first.
#pragma once

#include <limits>
#include <vector>

#include <flashbsr/plan/candidates.h>

namespace flashbsr::detail {

class Mixture {
 public:
  /// The cut of all tiles, dealt. Valid until the next call.
  /// @param all  workers before blocks are dealt to the two kinds; workers() are those after it
  Candidate& choose(const std::vector<Tile>& tiles, const Shape& shape, const Workers& all,
                    const SplitPolicy& split) {
    all_ = workers_ = all;
    if (!all.mixed()) return wide_.candidates.choose(tiles, shape, all.wide, split);
    wide_.clear();
    narrow_.clear();
    for (size_t t = 0; t < tiles.size(); ++t) {
      Kind& kind = tiles[t].row_count <= all.narrow_rows ? narrow_ : wide_;
      const DeviceLimits& limits = all.of(tiles[t].row_count);
      kind.tiles.push_back(tiles[t]);
      kind.number.push_back(static_cast<int32_t>(t));
      kind.cost += limits.cost_per_item + kv_weight(limits, tiles[t].row_count) * tiles[t].length();
    }
    if (!all.apart) deal_blocks(shape, all, split);
    both_.cut.start(tiles);
    both_.cut.parts.resize(tiles.size());
    join(wide_, wide_.choose(shape, workers_.wide, split), shape);
    num_wide_chunks_ = both_.cut.order.size();
    join(narrow_, narrow_.choose(shape, workers_.narrow, split), shape);
    both_.policy = wide_.chosen->policy;
    both_.percent = wide_.chosen->percent;
    both_.kv_chunk = wide_.chosen->kv_chunk;
    both_.price = price_of_both(tiles, shape);
    return both_;
  }

  /// Of the last plan.
  const Workers& workers() const { return workers_; }
  /// What they were dealt from: of either kind as many as any plan has.
  const Workers& all() const { return all_; }

  /// As Candidates::other_price: of wide tiles.
  int64_t other_price() const { return wide_.candidates.other_price(); }

  /// Chunks that are not narrow come first in the order.
  size_t num_wide_chunks(const Candidate& chosen) const {
    return workers_.mixed() ? num_wide_chunks_ : chosen.cut.order.size();
  }

  /// Cost of the longest queue.
  int64_t longest(const Candidate& chosen) const {
    if (!workers_.mixed()) return chosen.deal.longest();
    const int64_t wide = wide_.chosen->deal.longest(), narrow = narrow_.chosen->deal.longest();
    return workers_.apart ? wide + narrow : max_of(wide, narrow);
  }

  /// Writes the queues: the wide workers', then those of the narrow ones.
  void write_queues(Candidate& chosen, int32_t num_wide_items, int32_t* indptr,
                    int32_t* items) const {
    const Workers& workers = workers_;
    if (!workers.mixed()) {
      chosen.deal.write_queues(workers.wide.price_splits, indptr, items);
      return;
    }
    wide_.chosen->deal.write_queues(workers.wide.price_splits, indptr, items);
    int32_t* const begin = indptr + workers.wide.num_workers;
    items += num_wide_items;
    narrow_.chosen->deal.write_queues(workers.narrow.price_splits, begin, items);
    for (int32_t i = 0; i < begin[workers.narrow.num_workers]; ++i) items[i] += num_wide_items;
    for (int32_t w = 0; w <= workers.narrow.num_workers; ++w) begin[w] += num_wide_items;
  }

 private:
  /// The tiles of one kind.
  struct Kind {
    std::vector<Tile> tiles;
    std::vector<int32_t> number;  ///< of each among all tiles
    Candidates candidates;
    Candidate* chosen = nullptr;
    int32_t chosen_for = 0;  ///< workers
    int64_t cost = 0;

    void clear() {
      tiles.clear();
      number.clear();
      cost = chosen_for = 0;
    }
    /// A bound below the price of any cut: a queue is at least as long as the mean of all.
    int64_t least(const DeviceLimits& limits, const Shape& shape) const {
      if (limits.memory_bound) return 0;
      return cost * shape.num_kv_heads / limits.num_workers + limits.cost_of_launch;
    }
    Candidate& choose(const Shape& shape, const DeviceLimits& limits, const SplitPolicy& split) {
      // Of one batch only the number of workers changes.
      if (limits.num_workers != chosen_for) {
        chosen = &candidates.choose(tiles, shape, limits, split);
        chosen_for = limits.num_workers;
      }
      return *chosen;
    }
  };

  /// 0: not all of it is priced.
  int64_t price_of_both(const std::vector<Tile>& tiles, const Shape& shape) const {
    const int64_t wide = wide_.chosen->price, narrow = narrow_.chosen->price;
    if (all_.apart) return wide > 0 && narrow > 0 ? wide + narrow : 0;
    const int64_t longer = max_of(wide, narrow);
    if (longer == 0) return 0;
    return max_of(longer, reading(tiles, shape, all_)) + all_.cost_of_both;
  }

  /// The memory is for both kinds: K and V of each request are read once.
  static int64_t reading(const std::vector<Tile>& tiles, const Shape& shape, const Workers& all) {
    int64_t tokens = 0, longest = 0;
    for (size_t t = 0; t < tiles.size(); ++t) {
      longest = max_of(longest, tiles[t].length());
      if (t + 1 < tiles.size() && tiles[t + 1].request == tiles[t].request) continue;
      tokens += longest;
      longest = 0;
    }
    return tokens * all.cost_of_reading * shape.num_kv_heads / 1024 + all.wide.cost_of_launch;
  }

  /// As many blocks for narrow tiles as make both kinds take equally long, or a few more or less
  /// where rounds fit better: 4 chunks of 512 tokens and 60 decodes over 4096 took 292 us with 44
  /// of 132 blocks, and 332 with 46, which were more nearly even.
  void deal_blocks(const Shape& shape, const Workers& all, const SplitPolicy& split) {
    constexpr int32_t kSteps[] = {0, -2, 2, -4, 4};
    const int32_t even = all.even_blocks(wide_.cost, narrow_.cost);
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const int32_t step : kSteps) {
      const Workers workers = all.dealt(even + step);
      // Steps away from the even one mostly are dearer whatever the cut.
      if (max_of(wide_.least(workers.wide, shape), narrow_.least(workers.narrow, shape)) >= least) {
        continue;
      }
      // Wide tiles are few: theirs is found first, and may be enough.
      int64_t price = wide_.choose(shape, workers.wide, split).price;
      if (price >= least) continue;
      price = max_of(price, narrow_.choose(shape, workers.narrow, split).price);
      if (price >= least) continue;
      least = price;
      workers_ = workers;
    }
    // Blocks without a wide item decode: 64 decodes that share 8192 tokens took 44 to 47 us with 52
    // blocks for them, and 48 with 48, of which 4 others had nothing to do.
    const size_t chunks = wide_.choose(shape, workers_.wide, split).cut.chunks.size();
    const int64_t items = static_cast<int64_t>(chunks) * shape.num_kv_heads;
    const int32_t blocks = all.wide.num_workers - workers_.wide.num_workers;
    const int64_t idle = max_of<int64_t>(workers_.wide.num_workers - items, 0);
    workers_ = all.dealt(blocks + static_cast<int32_t>(idle));
  }

  /// Adds a kind's chunks, in its order, behind those that are there.
  void join(const Kind& kind, const Candidate& chosen, const Shape& shape) {
    Cut& cut = both_.cut;
    const uint32_t first = static_cast<uint32_t>(cut.chunks.size());
    for (Chunk chunk : chosen.cut.chunks) {
      chunk.tile = kind.number[static_cast<size_t>(chunk.tile)];
      cut.chunks.push_back(chunk);
    }
    for (const uint32_t chunk : chosen.cut.order) cut.order.push_back(first + chunk);
    for (size_t t = 0; t < kind.tiles.size(); ++t) {
      Parts parts = chosen.cut.parts[t];
      if (parts.slot_base >= 0) {
        parts.slot_base += static_cast<int32_t>(cut.split_rows * shape.num_kv_heads);
      }
      if (parts.merge_base >= 0) {
        parts.merge_base += static_cast<int32_t>(cut.split_tiles * shape.num_kv_heads);
      }
      cut.parts[static_cast<size_t>(kind.number[t])] = parts;
    }
    cut.cost += chosen.cut.cost;
    cut.split_tiles += chosen.cut.split_tiles;
    cut.split_chunks += chosen.cut.split_chunks;
    cut.split_rows += chosen.cut.split_rows;
  }

  Workers all_, workers_;
  size_t num_wide_chunks_ = 0;
  Kind wide_, narrow_;
  Candidate both_;
};

}  // namespace flashbsr::detail
