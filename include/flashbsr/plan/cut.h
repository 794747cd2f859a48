// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Steps 1 and 2 of the scheduler: a layout becomes row tiles, their KV ranges become chunks, and
// the chunks get their claim order. Everything here is the same for every KV head, so it is done
// once.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <flashbsr/plan/layout.h>
#include <flashbsr/plan/limits.h>
#include <flashbsr/plan/share.h>

namespace flashbsr::detail {

/// A row tile of one request and the KV positions that some of its rows sees.
struct Tile {
  int32_t request, row_begin, row_count;
  Span span;
  bool shares;  ///< of a shared part, or of a request that has one: it leaves partial states
  bool part;    ///< of a shared part

  int64_t length() const { return static_cast<int64_t>(span.end) - span.begin; }
};

struct Chunk {
  int64_t cost;
  int32_t tile, index, kv_begin, kv_end;
};

/// What became of a tile: its chunks, and where the slots and merges of its KV heads begin. Merges
/// of tiles that share are laid elsewhere (runs.h).
struct Parts {
  int32_t count, slot_base, merge_base;

  bool split() const { return slot_base >= 0; }
  /// Where chunk `index` of a KV head leaves its partial state.
  int32_t slot(const Tile& tile, int32_t head, int32_t index) const {
    return split() ? slot_base + (head * count + index) * tile.row_count : -1;
  }
};

/// Tokens that a chunk of `rows` packed rows may have for its cost to stay near `bound`.
inline int64_t chunk_length(const DeviceLimits& limits, int64_t bound, int32_t rows) {
  const int64_t tokens = ceil_div(bound, kv_weight(limits, rows));
  return max_of<int64_t>(round_up<int64_t>(tokens, limits.kv_tile), limits.min_chunk);
}

/// chunk_length for one bound, remembering the last number of rows: most tiles have the same.
class ChunkLength {
 public:
  ChunkLength(const DeviceLimits& limits, int64_t bound) : limits_(limits), bound_(bound) {}
  int64_t operator()(int32_t rows) {
    if (rows != rows_) {
      rows_ = rows;
      length_ = chunk_length(limits_, bound_, rows);
    }
    return length_;
  }

 private:
  const DeviceLimits& limits_;
  int64_t bound_, length_ = 0;
  int32_t rows_ = -1;
};

/// Cuts `rows` packed rows into tiles. Calls visit(first row, rows).
template <class Visit>
void cut_rows(int64_t rows, const DeviceLimits& limits, const Visit& visit) {
  int64_t most = limits.tile_rows;
  if (limits.short_tile_first && rows % most) most = rows % most;
  for (int64_t row = 0; row < rows; row += most, most = limits.tile_rows) {
    visit(static_cast<int32_t>(row), static_cast<int32_t>(min_of<int64_t>(most, rows - row)));
  }
}

/// Cuts the packed rows of every request into tiles and trims their KV by causality and window;
/// behind them those of the shared parts.
inline void cut_tiles(const Layout& layout, const Sharing& sharing, const Shape& shape,
                      const DeviceLimits& limits, std::vector<Tile>& tiles) {
  PlanHeader h{};
  shape.write_visibility(h);
  const int32_t group = shape.num_qo_heads / shape.num_kv_heads;
  tiles.clear();
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    const Request& r = layout.requests[b];
    const int32_t own = sharing.first_of(b);
    const int64_t rows = static_cast<int64_t>(r.q_len) * group;
    const int64_t position = layout.first_position(b);
    if (rows > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kIndexRange, "qo_indptr", std::to_string(rows) + " packed rows",
                  "fewer than 2^31 query tokens x group in a request");
    }
    cut_rows(rows, limits, [&](int32_t row, int32_t count) {
      // Spans only move right from token to token: first begin to last end covers the tile.
      const Span a = visible_keys(h, position + row / group, r.kv_len);
      const Span z = visible_keys(h, position + (row + count - 1) / group, r.kv_len);
      const int32_t begin = min_of(max_of(a.begin, own), z.end);
      tiles.push_back({static_cast<int32_t>(b), row, count, {begin, z.end}, own > 0, false});
    });
  }
  for (size_t p = 0; p < sharing.parts.size(); ++p) {
    const SharedPart& part = sharing.parts[p];
    int64_t tokens = 0;
    for (int32_t i = part.first; i < part.last; ++i) {
      tokens += layout.requests[static_cast<size_t>(sharing.order[static_cast<size_t>(i)])].q_len;
    }
    cut_rows(tokens * group, limits, [&](int32_t row, int32_t count) {
      tiles.push_back({static_cast<int32_t>(layout.requests.size() + p),
                       row,
                       count,
                       {part.begin, part.end},
                       true,
                       true});
    });
  }
}

/// One way to cut the tiles' KV ranges.
class Cut {
 public:
  std::vector<Chunk> chunks;    ///< tile by tile, from left to right
  std::vector<Parts> parts;     ///< of every tile
  std::vector<uint32_t> order;  ///< of chunks, as the limits say; ties as they stand
  // Per KV head:
  int64_t split_tiles = 0;    ///< that do not share
  int64_t split_chunks = 0;   ///< partial states
  int64_t split_rows = 0;     ///< of all partial states
  int64_t longest_merge = 0;  ///< cost of the most expensive one

  /// Parts are cut into items of at most this cost, whatever else is cut: their requests' own items
  /// come after them and merge, each its own rows. Parts that finish last would merge everybody's.
  /// 64 requests that share 8192 tokens and own 256 (H200): 132 us with parts of 2560 tokens.
  int64_t part_bound = 0;

  /// Tokens of the longest chunk of a tile, of at most `limit` otherwise.
  int64_t longest(const Tile& tile, int64_t limit, const DeviceLimits& limits) const {
    if (!tile.part || part_bound == 0) return limit;
    return min_of(limit, chunk_length(limits, part_bound, tile.row_count));
  }

  /// Nothing is cut yet.
  void start(const std::vector<Tile>& tiles) {
    chunks.clear();
    parts.clear();
    order.clear();
    chunks.reserve(tiles.size());
    parts.reserve(tiles.size());
    split_tiles = split_chunks = split_rows = longest_merge = 0;
  }

  void whole(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape) {
    start(tiles);
    for (const Tile& tile : tiles) {
      const int64_t length = max_of<int64_t>(tile.length(), 1);
      add(tile, limits, tile.span.begin, even_step(length, longest(tile, length, limits), limits),
          shape);
    }
    sort(tiles, limits, shape);
  }

  /// Chunks end at multiples of `size`, whatever else is in the batch.
  void fixed(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape,
             int32_t size) {
    start(tiles);
    for (const Tile& tile : tiles) add(tile, limits, tile.span.begin / size * size, size, shape);
    sort(tiles, limits, shape);
  }

  /// Chunks of a cost of at most about `bound`, equal within a tile; tiles marked in `keep` stay
  /// whole.
  void bounded(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape,
               int64_t bound, const uint8_t* keep = nullptr) {
    start(tiles);
    ChunkLength most(limits, bound);
    for (size_t t = 0; t < tiles.size(); ++t) {
      const int64_t length = max_of<int64_t>(tiles[t].length(), 1);
      const int64_t limit = keep && keep[t] ? length : most(tiles[t].row_count);
      add(tiles[t], limits, tiles[t].span.begin,
          even_step(length, longest(tiles[t], limit, limits), limits), shape);
    }
    sort(tiles, limits, shape);
  }

  /// Every tile in `count` parts, empty ones where it is short, one after another.
  void even(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape,
            int32_t count) {
    start(tiles);
    for (const Tile& tile : tiles) {
      const int64_t weight = kv_weight(limits, tile.row_count);
      const int64_t step =
          round_up<int64_t>(ceil_div<int64_t>(tile.length(), count), limits.kv_tile);
      for (int32_t i = 0; i < count; ++i) {
        const int64_t begin = min_of<int64_t>(tile.span.begin + i * step, tile.span.end);
        const int64_t end = min_of<int64_t>(begin + step, tile.span.end);
        order.push_back(static_cast<uint32_t>(chunks.size()));
        chunks.push_back({limits.cost_per_item + (end - begin) * weight,
                          static_cast<int32_t>(parts.size()), i, static_cast<int32_t>(begin),
                          static_cast<int32_t>(end)});
      }
      parts.push_back({count, static_cast<int32_t>(split_rows * shape.num_kv_heads),
                       static_cast<int32_t>(split_tiles * shape.num_kv_heads)});
      ++split_tiles;
      split_chunks += count;
      split_rows += static_cast<int64_t>(count) * tile.row_count;
      note_merge(tile, count, limits);
    }
  }

 private:
  struct Key {
    uint64_t rank;  ///< least for the most expensive
    uint32_t chunk;
  };

  /// `length` in equal chunks of at most `limit`.
  static int64_t even_step(int64_t length, int64_t limit, const DeviceLimits& limits) {
    if (length <= limit) return length;
    return round_up<int64_t>(ceil_div(length, ceil_div(length, limit)), limits.kv_tile);
  }

  void add(const Tile& tile, const DeviceLimits& limits, int64_t first, int64_t step,
           const Shape& shape) {
    const int32_t t = static_cast<int32_t>(parts.size());
    const int64_t weight = kv_weight(limits, tile.row_count);
    int32_t index = 0;
    int64_t begin = tile.span.begin;
    do {
      const int64_t end = min_of<int64_t>(first + step, tile.span.end);
      chunks.push_back({limits.cost_per_item + (end - begin) * weight, t, index++,
                        static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      begin = end;
      first += step;
    } while (begin < tile.span.end);
    Parts p{index, -1, -1};
    if (index > 1 || tile.shares) {
      p.slot_base = static_cast<int32_t>(split_rows * shape.num_kv_heads);
      split_chunks += index;
      split_rows += static_cast<int64_t>(index) * tile.row_count;
    }
    if (index > 1 && !tile.shares) {
      p.merge_base = static_cast<int32_t>(split_tiles * shape.num_kv_heads);
      ++split_tiles;
    }
    if (p.split()) {
      note_merge(tile, index, limits);
      for (size_t i = chunks.size() - static_cast<size_t>(index); i < chunks.size(); ++i) {
        chunks[i].cost += limits.cost_per_split;
      }
    }
    parts.push_back(p);
  }

  /// Whoever merges reads each part's rows; those of three more are what it takes beside them.
  void note_merge(const Tile& tile, int32_t count, const DeviceLimits& limits) {
    const int64_t rows = int64_t{count + 3} * tile.row_count;
    longest_merge = max_of(longest_merge, int64_t{count} * limits.cost_per_merged_part +
                                              rows * limits.cost_per_merged_row);
  }

  void sort(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape) {
    sort_by_cost();
    if (!limits.by_request) return;
    if (split_chunks > 0) sort_by_number();
    group_by_request(tiles, limits, count_last(limits, shape));
  }

  /// Parts with the same number side by side, as costs have them: tiles of a request then read the
  /// same keys at the same time, one of them from memory and the others from L2. Tile by tile 1 x
  /// 128 queries over 65536 tokens took 334 us in 264 items, of which all K and V once are 90.
  void sort_by_number() {
    uint64_t used = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      keys_[i] = {static_cast<uint64_t>(chunks[order[i]].index), order[i]};
      used |= keys_[i].rank;
    }
    sort_keys(used);
  }

  /// How many of the cheapest chunks are claimed last, whatever their request: a quarter, of at
  /// most six rounds of all workers. The last request's are of all sizes, and a worker has claimed
  /// one or two before it knows how late it is: 16 x 1024 tokens in 22 rounds ended 5 % apart
  /// (H200, two ahead), with five rounds of small ones 1 %. The end of a few rounds, or of tiles
  /// that are split, is small already.
  size_t count_last(const DeviceLimits& limits, const Shape& shape) const {
    constexpr int64_t kRounds = 6, kShare = 4;
    const int64_t count = static_cast<int64_t>(order.size());
    const int64_t round = ceil_div<int64_t>(limits.num_workers, shape.num_kv_heads);
    if (split_chunks > 0 || count <= limits.tail_rounds * round) return 0;
    return static_cast<size_t>(min_of(kRounds * round, count / kShare));
  }

  /// Moves the chunks of a request together, in the order that they have; requests by cost. The
  /// last `rest` stay where they are.
  void group_by_request(const std::vector<Tile>& tiles, const DeviceLimits& limits, size_t rest) {
    if (tiles.empty()) return;
    const size_t count = order.size() - rest;
    requests_.assign(static_cast<size_t>(tiles.back().request) + 1, {});
    for (size_t r = 0; r < requests_.size(); ++r) requests_[r].request = static_cast<int32_t>(r);
    const auto request_of = [&](uint32_t chunk) {
      return static_cast<size_t>(tiles[static_cast<size_t>(chunks[chunk].tile)].request);
    };
    // Without what splits cost: of equal requests those that are split stay behind the others, so
    // that the end is made of small items.
    for (uint32_t i = 0; i < chunks.size(); ++i) {
      const bool split = parts[static_cast<size_t>(chunks[i].tile)].split();
      requests_[request_of(i)].cost += chunks[i].cost - (split ? limits.cost_per_split : 0);
    }
    for (size_t i = 0; i < count; ++i) ++requests_[request_of(order[i])].count;
    std::stable_sort(requests_.begin(), requests_.end(),
                     [](const Group& a, const Group& b) { return a.cost > b.cost; });
    place_.resize(requests_.size());
    uint32_t at = 0;
    for (const Group& group : requests_) {
      place_[static_cast<size_t>(group.request)] = at;
      at += group.count;
    }
    grouped_ = order;
    for (size_t i = 0; i < count; ++i) grouped_[place_[request_of(order[i])]++] = order[i];
    order.swap(grouped_);
  }

  /// A stable sort by cost. Radix beyond a few dozen: 1024 chunks take 6 us instead of 40.
  void sort_by_cost() {
    constexpr size_t kFew = 64;
    const size_t n = chunks.size();
    keys_.resize(n);
    int64_t most = 0;
    for (const Chunk& c : chunks) most = max_of(most, c.cost);
    uint64_t used = 0;  // bits of ranks, which are small: a pass fewer or two
    bool sorted = true;
    for (size_t i = 0; i < n; ++i) {
      keys_[i] = {static_cast<uint64_t>(most - chunks[i].cost), static_cast<uint32_t>(i)};
      used |= keys_[i].rank;
      sorted = sorted && (i == 0 || keys_[i - 1].rank <= keys_[i].rank);
    }
    if (!sorted && n <= kFew) {
      std::sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
        return a.rank != b.rank ? a.rank < b.rank : a.chunk < b.chunk;
      });
      used = 0;
    }
    order.resize(n);
    sort_keys(sorted ? 0 : used);
  }

  /// The order of `keys_`, sorted by those bits of their ranks that are used by any.
  void sort_keys(uint64_t used) {
    for (int shift = 0; shift < 64; shift += 8) {
      if (used >> shift & 0xff) radix_pass(shift);
    }
    for (size_t i = 0; i < order.size(); ++i) order[i] = keys_[i].chunk;
  }

  void radix_pass(int shift) {
    uint32_t at[257] = {};
    for (const Key& key : keys_) ++at[(key.rank >> shift & 0xff) + 1];
    for (int i = 0; i < 256; ++i) at[i + 1] += at[i];
    scratch_.resize(keys_.size());
    for (const Key& key : keys_) scratch_[at[key.rank >> shift & 0xff]++] = key;
    keys_.swap(scratch_);
  }

  /// A request's chunks.
  struct Group {
    int64_t cost = 0;
    int32_t request = 0;
    uint32_t count = 0;
  };

  std::vector<Key> keys_, scratch_;
  std::vector<Group> requests_;
  std::vector<uint32_t> place_, grouped_;
};

}  // namespace flashbsr::detail
