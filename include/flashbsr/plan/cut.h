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

namespace flashbsr::detail {

/// A row tile of one request and the KV positions that some of its rows sees.
struct Tile {
  int32_t request, row_begin, row_count;
  Span span;

  int64_t length() const { return static_cast<int64_t>(span.end) - span.begin; }
};

struct Chunk {
  int64_t cost;
  int32_t tile, index, kv_begin, kv_end;
};

/// What became of a tile: its chunks, and where the slots and merges of its KV heads begin.
struct Parts {
  int32_t count, slot_base, merge_base;
};

inline int64_t kv_weight(const DeviceLimits& limits, int32_t rows) {
  return limits.cost_per_kv + static_cast<int64_t>(limits.cost_per_kv_row) * rows;
}

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

/// Cuts the packed rows of every request into tiles and trims their KV by causality and window.
/// Returns the cost of all KV of one KV head.
inline int64_t cut_tiles(const Layout& layout, const Shape& shape, const DeviceLimits& limits,
                         std::vector<Tile>& tiles) {
  PlanHeader h{};
  h.flags = shape.causal ? kPlanCausal : 0;
  h.window_left = shape.window_left;
  const int32_t group = shape.num_qo_heads / shape.num_kv_heads;
  tiles.clear();
  int64_t total = 0;
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    const Request& r = layout.requests[b];
    const int64_t rows = static_cast<int64_t>(r.q_len) * group;
    if (rows > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kIndexRange, "qo_indptr", std::to_string(rows) + " packed rows",
                  "fewer than 2^31 query tokens x group in a request");
    }
    int64_t most = limits.tile_rows;
    if (limits.short_tile_first && rows % most) most = rows % most;
    for (int64_t row = 0; row < rows; row += most, most = limits.tile_rows) {
      const int32_t count = static_cast<int32_t>(min_of<int64_t>(most, rows - row));
      const int32_t first = static_cast<int32_t>(row) / group;
      const int32_t last = static_cast<int32_t>(row + count - 1) / group;
      // Spans only move right from token to token: first begin to last end covers the tile.
      const Span a = visible_span(h, r, first), z = visible_span(h, r, last);
      tiles.push_back({static_cast<int32_t>(b),
                       static_cast<int32_t>(row),
                       count,
                       {min_of(a.begin, z.end), z.end}});
      total += kv_weight(limits, count) * tiles.back().length();
    }
  }
  return total;
}

/// One way to cut the tiles' KV ranges.
class Cut {
 public:
  std::vector<Chunk> chunks;    ///< tile by tile, from left to right
  std::vector<Parts> parts;     ///< of every tile
  std::vector<uint32_t> order;  ///< of chunks, as the limits say; ties as they stand
  int64_t split_tiles = 0;      ///< per KV head, like the next one
  int64_t split_chunks = 0;

  void whole(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape) {
    start(tiles);
    for (const Tile& tile : tiles) {
      add(tile, limits, tile.span.begin, max_of<int64_t>(tile.length(), 1), shape);
    }
    sort(tiles, limits);
  }

  /// Chunks end at multiples of `size`, whatever else is in the batch.
  void fixed(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape,
             int32_t size) {
    start(tiles);
    for (const Tile& tile : tiles) add(tile, limits, tile.span.begin / size * size, size, shape);
    sort(tiles, limits);
  }

  /// Chunks of a cost of at most about `bound`, equal within a tile; tiles marked in `keep` stay
  /// whole.
  void bounded(const std::vector<Tile>& tiles, const DeviceLimits& limits, const Shape& shape,
               int64_t bound, const uint8_t* keep = nullptr) {
    start(tiles);
    ChunkLength most(limits, bound);
    for (size_t t = 0; t < tiles.size(); ++t) {
      const int64_t length = tiles[t].length(), limit = most(tiles[t].row_count);
      int64_t step = max_of<int64_t>(length, 1);
      if (length > limit && !(keep && keep[t])) {
        step = round_up<int64_t>(ceil_div(length, ceil_div(length, limit)), limits.kv_tile);
      }
      add(tiles[t], limits, tiles[t].span.begin, step, shape);
    }
    sort(tiles, limits);
  }

 private:
  struct Key {
    uint64_t rank;  ///< least for the most expensive
    uint32_t chunk;
  };

  void start(const std::vector<Tile>& tiles) {
    chunks.clear();
    parts.clear();
    chunks.reserve(tiles.size());
    parts.reserve(tiles.size());
    split_tiles = split_chunks = 0;
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
    if (index > 1) {
      p.slot_base = static_cast<int32_t>(split_chunks * shape.num_kv_heads);
      p.merge_base = static_cast<int32_t>(split_tiles * shape.num_kv_heads);
      split_chunks += index;
      ++split_tiles;
      for (size_t i = chunks.size() - static_cast<size_t>(index); i < chunks.size(); ++i) {
        chunks[i].cost += limits.cost_per_split;
      }
    }
    parts.push_back(p);
  }

  void sort(const std::vector<Tile>& tiles, const DeviceLimits& limits) {
    sort_by_cost();
    if (limits.by_request) group_by_request(tiles);
  }

  /// Moves the chunks of a request together, in the order that they have; requests by cost.
  void group_by_request(const std::vector<Tile>& tiles) {
    if (tiles.empty()) return;
    requests_.assign(static_cast<size_t>(tiles.back().request) + 1, {});
    for (size_t r = 0; r < requests_.size(); ++r) requests_[r].request = static_cast<int32_t>(r);
    const auto request_of = [&](uint32_t chunk) {
      return static_cast<size_t>(tiles[static_cast<size_t>(chunks[chunk].tile)].request);
    };
    for (uint32_t i = 0; i < chunks.size(); ++i) {
      requests_[request_of(i)].cost += chunks[i].cost;
      ++requests_[request_of(i)].count;
    }
    std::stable_sort(requests_.begin(), requests_.end(),
                     [](const Group& a, const Group& b) { return a.cost > b.cost; });
    place_.resize(requests_.size());
    uint32_t at = 0;
    for (const Group& group : requests_) {
      place_[static_cast<size_t>(group.request)] = at;
      at += group.count;
    }
    grouped_.resize(order.size());
    for (const uint32_t chunk : order) grouped_[place_[request_of(chunk)]++] = chunk;
    order.swap(grouped_);
  }

  /// A stable sort by cost. Radix beyond a few dozen: 1024 chunks take 6 us instead of 40.
  void sort_by_cost() {
    constexpr size_t kFew = 64;
    const size_t n = chunks.size();
    keys_.resize(n);
    uint64_t differ = 0;
    bool sorted = true;
    for (size_t i = 0; i < n; ++i) {
      keys_[i] = {~static_cast<uint64_t>(chunks[i].cost), static_cast<uint32_t>(i)};
      differ |= keys_[i].rank ^ keys_[0].rank;
      sorted = sorted && (i == 0 || keys_[i - 1].rank <= keys_[i].rank);
    }
    if (!sorted && n <= kFew) {
      std::sort(keys_.begin(), keys_.end(), [](const Key& a, const Key& b) {
        return a.rank != b.rank ? a.rank < b.rank : a.chunk < b.chunk;
      });
    } else if (!sorted) {
      for (int shift = 0; shift < 64; shift += 8) {
        if (differ >> shift & 0xff) radix_pass(shift);
      }
    }
    order.resize(n);
    for (size_t i = 0; i < n; ++i) order[i] = keys_[i].chunk;
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
