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

#include <flashbsr/plan/added.h>
#include <flashbsr/plan/layout.h>
#include <flashbsr/plan/limits.h>
#include <flashbsr/plan/radix.h>
#include <flashbsr/plan/share.h>

namespace flashbsr::detail {

/// A row tile of one request and the KV positions that some of its rows sees.
struct Tile {
  int32_t request, row_begin, row_count;
  Span span;
  bool shares;  ///< of a shared part, or of a request that has one: it leaves partial states
  bool part;    ///< of a shared part
  bool again;   ///< of several that read the same KV, from L2

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

inline int64_t kv_weight(const DeviceLimits& limits, const Tile& tile) {
  const int64_t weight = kv_weight(limits, tile.row_count);
  return tile.again ? read_again(limits, weight, 0) : weight;
}

/// Tokens that a chunk of `rows` packed rows may have for its cost to stay near `bound`.
inline int64_t chunk_length(const DeviceLimits& limits, int64_t bound, int32_t rows) {
  const int64_t tokens = ceil_div(bound, kv_weight(limits, rows));
  return max_of<int64_t>(round_up<int64_t>(tokens, limits.kv_tile), limits.min_chunk);
}

/// In how many parts of at most `limit` tokens that many are cut. Both are below 2^31, or there is
/// one part; and divisions of 32 bits take half as long.
inline uint32_t parts_of(int64_t tokens, int64_t limit) {
  return tokens <= limit ? 1
                         : ceil_div(static_cast<uint32_t>(tokens), static_cast<uint32_t>(limit));
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
/// behind them those of the shared parts. Returns the most rows that one has.
inline int32_t cut_tiles(const Layout& layout, const Sharing& sharing, const Shape& shape,
                         const DeviceLimits& limits, std::vector<Tile>& tiles) {
  PlanHeader h{};
  shape.write_visibility(h);
  const int32_t group = shape.num_qo_heads / shape.num_kv_heads;
  const bool windowed = shape.window_left >= 0;
  int32_t most_rows = 0;
  tiles.clear();
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    const Request& r = layout.requests[b];
    const int32_t own = sharing.first_of(b);
    const int64_t rows = static_cast<int64_t>(r.q_len) * group;
    const int32_t position = static_cast<int32_t>(layout.first_position(b));
    if (rows > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kIndexRange, "qo_indptr", std::to_string(rows) + " packed rows",
                  "fewer than 2^31 query tokens x group in a request");
    }
    cut_rows(rows, limits, [&](int32_t row, int32_t count) {
      // Spans only move right from token to token: first begin to last end covers the tile.
      Span seen{0, r.kv_len};
      if (windowed) seen.begin = visible_keys(h, position + row / group, r.kv_len).begin;
      if (windowed || shape.causal) {
        const int32_t last = row + count == rows ? r.q_len - 1 : (row + count - 1) / group;
        seen.end = visible_keys(h, position + last, r.kv_len).end;
      }
      seen.begin = min_of(max_of(seen.begin, own), seen.end);
      most_rows = max_of(most_rows, count);
      added(tiles) = {static_cast<int32_t>(b), row, count, seen, own > 0, false, false};
    });
  }
  for (size_t p = 0; p < sharing.parts.size(); ++p) {
    const SharedPart& part = sharing.parts[p];
    int64_t tokens = 0;
    for (int32_t i = part.first; i < part.last; ++i) {
      tokens += layout.requests[static_cast<size_t>(sharing.order[static_cast<size_t>(i)])].q_len;
    }
    const bool again = tokens * group > limits.tile_rows;
    cut_rows(tokens * group, limits, [&](int32_t row, int32_t count) {
      most_rows = max_of(most_rows, count);
      added(tiles) = {static_cast<int32_t>(layout.requests.size() + p),
                      row,
                      count,
                      {part.begin, part.end},
                      true,
                      true,
                      again};
    });
  }
  return most_rows;
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
  int64_t most_parts = 0;     ///< of a tile
  int64_t cost = 0;           ///< of all chunks

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
    split_tiles = split_chunks = split_rows = longest_merge = most_parts = cost = most_ = 0;
  }

  void whole(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape) {
    start(tiles);
    for (const Tile& tile : tiles) {
      if (!tile.shares) {
        push({limits.cost_per_item + tile.length() * kv_weight(limits, tile.row_count),
              static_cast<int32_t>(parts.size()), 0, tile.span.begin, tile.span.end});
        added(parts) = {1, -1, -1};
        continue;
      }
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
        push({limits.cost_per_item + (end - begin) * weight, static_cast<int32_t>(parts.size()), i,
              static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      }
      added(parts) = {count, static_cast<int32_t>(split_rows * shape.num_kv_heads),
                      static_cast<int32_t>(split_tiles * shape.num_kv_heads)};
      ++split_tiles;
      split_chunks += count;
      split_rows += static_cast<int64_t>(count) * tile.row_count;
      note_merge(tile, count, limits);
    }
  }

 private:
  /// `length` in equal chunks of at most `limit`.
  static int64_t even_step(int64_t length, int64_t limit, const DeviceLimits& limits) {
    if (length <= limit) return length;
    const uint32_t tokens = static_cast<uint32_t>(length);
    return round_up(ceil_div(tokens, parts_of(length, limit)),
                    static_cast<uint32_t>(limits.kv_tile));
  }

  void push(const Chunk& chunk) {
    most_ = max_of(most_, chunk.cost);
    cost += chunk.cost;
    added(chunks) = chunk;
  }

  void add(const Tile& tile, const DeviceLimits& limits, int64_t first, int64_t step,
           const Shape& shape) {
    const int32_t t = static_cast<int32_t>(parts.size());
    const int64_t weight = kv_weight(limits, tile);
    const bool split = tile.shares || first + step < tile.span.end;
    int64_t beside = limits.cost_per_item + (split ? limits.cost_per_split : 0);
    // They come last, and merge. 64 requests that share 8000 tokens and own 64, with parts of two:
    // 144 us with 24 such items in a queue, which were priced at 0.6 us each (H200).
    if (tile.shares && !tile.part && !limits.idle_merge) beside += limits.cost_per_shared;
    int32_t index = 0;
    int64_t begin = tile.span.begin;
    do {
      const int64_t end = min_of<int64_t>(first + step, tile.span.end);
      push({beside + (end - begin) * weight, t, index++, static_cast<int32_t>(begin),
            static_cast<int32_t>(end)});
      begin = end;
      first += step;
    } while (begin < tile.span.end);
    Parts p{index, -1, -1};
    if (split) {
      p.slot_base = static_cast<int32_t>(split_rows * shape.num_kv_heads);
      split_chunks += index;
      split_rows += static_cast<int64_t>(index) * tile.row_count;
      note_merge(tile, index, limits);
    }
    if (index > 1 && !tile.shares) {
      p.merge_base = static_cast<int32_t>(split_tiles * shape.num_kv_heads);
      ++split_tiles;
    }
    added(parts) = p;
  }

  /// Whoever merges reads each part's rows; those of three more are what it takes beside them.
  void note_merge(const Tile& tile, int32_t count, const DeviceLimits& limits) {
    most_parts = max_of<int64_t>(most_parts, count);
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
    for (size_t i = 0; i < order.size(); ++i) {
      sorter_.keys[i] = {static_cast<uint64_t>(chunks[order[i]].index), order[i]};
    }
    take_order();
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
    request_of_.resize(chunks.size());
    // Without what splits cost: of equal requests those that are split stay behind the others, so
    // that the end is made of small items.
    for (size_t i = 0; i < chunks.size(); ++i) {
      const size_t tile = static_cast<size_t>(chunks[i].tile);
      request_of_[i] = static_cast<uint32_t>(tiles[tile].request);
      Group& group = requests_[request_of_[i]];
      group.cost += chunks[i].cost - (parts[tile].split() ? limits.cost_per_split : 0);
      ++group.count;
    }
    for (size_t i = count; i < order.size(); ++i) --requests_[request_of_[order[i]]].count;
    int64_t most = 0;
    for (const Group& group : requests_) most = max_of(most, group.cost);
    sorter_.keys.resize(requests_.size());
    for (size_t r = 0; r < requests_.size(); ++r) {
      sorter_.keys[r] = {static_cast<uint64_t>(most - requests_[r].cost), static_cast<uint32_t>(r)};
    }
    sorter_.sort();
    uint32_t at = 0;
    for (const RadixSort::Key& key : sorter_.keys) {
      Group& group = requests_[key.index];
      group.place = at;
      at += group.count;
    }
    grouped_ = order;
    for (size_t i = 0; i < count; ++i) {
      grouped_[requests_[request_of_[order[i]]].place++] = order[i];
    }
    order.swap(grouped_);
  }

  void sort_by_cost() {
    sorter_.keys.resize(chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i) {
      sorter_.keys[i] = {static_cast<uint64_t>(most_ - chunks[i].cost), static_cast<uint32_t>(i)};
    }
    take_order();
  }

  void take_order() {
    sorter_.sort();
    order.resize(chunks.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = sorter_.keys[i].index;
  }

  /// A request's chunks.
  struct Group {
    int64_t cost = 0;
    uint32_t count = 0;
    uint32_t place = 0;  ///< of the next one
  };

  int64_t most_ = 0;  ///< cost of the most expensive chunk
  RadixSort sorter_;
  std::vector<Group> requests_;
  std::vector<uint32_t> request_of_, grouped_;  ///< of every chunk
};

}  // namespace flashbsr::detail
