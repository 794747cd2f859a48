// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of a request that shares KV have partial states in several tiles: one of every part that
// the request is in, and one of its own. A run is a longest stretch of a request's rows that no
// tile's end cuts; it is merged as a whole.
//
//   part A   |.........tile.........|....tile....|
//   request  |--tile--||--tile--||--tile--|           6 query tokens each, 4 heads of a group
//   runs     |--------||--------||--|-----|
#pragma once

#include <vector>

#include <flashbsr/plan/cut.h>

namespace flashbsr::detail {

/// Rows [row_begin, row_begin + row_count) of a request, whose states are in parts
/// [part, part + part_count), in the order of their KV.
struct Run {
  int32_t request, row_begin, row_count;
  int32_t part, part_count;
};

/// The tile that has the states, and which of its rows is the run's first.
struct RunPart {
  int32_t tile, row;
};

struct RunRange {
  int32_t first = 0, count = 0;
};

class Runs {
 public:
  std::vector<Run> runs;        ///< in the order of the shared requests
  std::vector<RunPart> parts;   ///< run by run
  std::vector<int32_t> q_rows;  ///< rows of q of the requests, in that order

  void find(const Layout& layout, const Sharing& sharing, const std::vector<Tile>& tiles,
            int32_t group) {
    runs.clear();
    parts.clear();
    q_rows.clear();
    if (sharing.empty()) return;
    place(layout, sharing, tiles);
    of_tile_.assign(tiles.size(), {});
    levels_.clear();
    size_t next_part = 0;
    for (size_t i = 0; i < sharing.order.size(); ++i) {
      const int32_t at = static_cast<int32_t>(i);
      while (!levels_.empty() && sharing.parts[levels_.back()].last <= at) levels_.pop_back();
      for (; next_part < sharing.parts.size() && sharing.parts[next_part].first == at;) {
        levels_.push_back(next_part++);
      }
      if (levels_.empty()) continue;
      const size_t request = static_cast<size_t>(sharing.order[i]);
      const int32_t rows = layout.requests[request].q_len * group;
      for (int32_t row = 0; row < rows;) row = add_run(sharing, tiles, request, at, row, group);
    }
  }

  /// Of the runs that a tile has states of.
  RunRange of_tile(size_t tile) const { return runs.empty() ? RunRange{} : of_tile_[tile]; }
  int32_t merge(int32_t head, int32_t run) const {
    return head * static_cast<int32_t>(runs.size()) + run;
  }

  int32_t first_row(const SharedPart& part) const {
    return token_[static_cast<size_t>(part.first)];
  }
  int32_t tokens(const SharedPart& part) const {
    return token_[static_cast<size_t>(part.last)] - first_row(part);
  }
  /// Whether they are next to each other in q.
  bool together(const SharedPart& part) const {
    const auto row = q_rows.begin() + first_row(part);
    for (int32_t i = 1; i < tokens(part); ++i) {
      if (row[i] != row[i - 1] + 1) return false;
    }
    return true;
  }

 private:
  /// Rows of q one after another, and the first tile of every request and part.
  void place(const Layout& layout, const Sharing& sharing, const std::vector<Tile>& tiles) {
    token_.assign(1, 0);
    for (const int32_t request : sharing.order) {
      const Request& r = layout.requests[static_cast<size_t>(request)];
      for (int32_t t = 0; t < r.q_len; ++t) q_rows.push_back(r.q_begin + t);
      token_.push_back(static_cast<int32_t>(q_rows.size()));
    }
    first_tile_.assign(layout.requests.size() + sharing.parts.size(), 0);
    for (size_t t = tiles.size(); t-- > 0;) {
      first_tile_[static_cast<size_t>(tiles[t].request)] = static_cast<int32_t>(t);
    }
  }

  /// The tile that has a row: all tiles but the first or the last have as many (cut_rows).
  static int32_t tile_of(const std::vector<Tile>& tiles, int32_t first, int32_t row) {
    const size_t second = static_cast<size_t>(first) + 1;
    const Tile& tile = tiles[static_cast<size_t>(first)];
    if (row < tile.row_count) return first;
    return first + 1 + (row - tile.row_count) / max_of(tile.row_count, tiles[second].row_count);
  }

  /// The run that begins at `row` of the request at `at` in the order. Returns its end.
  int32_t add_run(const Sharing& sharing, const std::vector<Tile>& tiles, size_t request,
                  int32_t at, int32_t row, int32_t group) {
    const int32_t first_part = static_cast<int32_t>(parts.size());
    int32_t count = std::numeric_limits<int32_t>::max();
    const auto take = [&](size_t owner, int32_t owners_row) {
      const int32_t t = tile_of(tiles, first_tile_[owner], owners_row);
      const Tile& tile = tiles[static_cast<size_t>(t)];
      added(parts) = {t, owners_row - tile.row_begin};
      count = min_of(count, tile.row_begin + tile.row_count - owners_row);
    };
    const int32_t num_requests = static_cast<int32_t>(first_tile_.size() - sharing.parts.size());
    for (const size_t level : levels_) {
      const int32_t before = token_[static_cast<size_t>(at)] - first_row(sharing.parts[level]);
      take(static_cast<size_t>(num_requests) + level, before * group + row);
    }
    take(request, row);
    const int32_t run = static_cast<int32_t>(runs.size());
    for (size_t i = static_cast<size_t>(first_part); i < parts.size(); ++i) {
      RunRange& range = of_tile_[static_cast<size_t>(parts[i].tile)];
      if (range.count++ == 0) range.first = run;
    }
    added(runs) = {static_cast<int32_t>(request), row, count, first_part,
                   static_cast<int32_t>(parts.size()) - first_part};
    return row + count;
  }

  std::vector<int32_t> token_;       ///< query tokens before, by place in the order
  std::vector<int32_t> first_tile_;  ///< by request, parts behind
  std::vector<RunRange> of_tile_;
  std::vector<size_t> levels_;  ///< parts that the request at hand is in
};

}  // namespace flashbsr::detail
