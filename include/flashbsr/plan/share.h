// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Composable formats: the KV that several requests begin with becomes a part of its own, one block
// row over all of their queries, and what is left of each request begins behind it. Any number of
// levels: a part may lie behind another.
//
//   requests 0..3           part A  [ 0..512)  rows of 0, 1, 2, 3
//   share 512 tokens,       part B  [512..640) rows of 2, 3
//   2 and 3 128 more        request 0 [512..) 1 [512..) 2 [640..) 3 [640..)
//
// Every query of a part sees all of it: causality leaves out a request's own last tokens only
// (PrefixTree), and what a window cuts is not shared.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include <flashbsr/plan/prefixes.h>

namespace flashbsr {

/// KV positions [begin, end) of requests order[first, last), which are those of the first of them.
struct SharedPart {
  int32_t begin, end;
  int32_t first, last;
};

/// The parts of a batch; nested, parents before their children.
struct Sharing {
  std::vector<int32_t> order;     ///< requests, those of a part next to each other
  std::vector<SharedPart> parts;  ///< by level and from left to right
  std::vector<int32_t> kv_first;  ///< by request: where its own KV begins

  bool empty() const { return parts.empty(); }
  void clear() {
    order.clear();
    parts.clear();
    kv_first.clear();
  }
  int32_t first_of(size_t request) const { return kv_first.empty() ? 0 : kv_first[request]; }
};

/// Decides by the cost model what of a tree of prefixes is worth sharing.
class Sharer {
 public:
  /// @param bounded  keep to what sizes_for() allows
  void choose(const PrefixTree& tree, const Layout& layout, const Shape& task,
              const Workers& workers, bool bounded, Sharing& sharing) {
    const DeviceLimits& limits = workers.wide;
    const Shape shape = task.with_heads_of_item(limits.heads_of_item);
    sharing.clear();
    layout_ = &layout;
    limits_ = &limits;
    workers_ = &workers;
    group_ = shape.num_qo_heads / shape.num_kv_heads;
    measure(tree);
    sharing.order = tree.order;
    sharing.kv_first.assign(layout.requests.size(), 0);
    int64_t tiles_left = std::numeric_limits<int64_t>::max(), rows_left = tiles_left;
    if (bounded) {
      tiles_left = rows_left = 0;
      for (const Request& r : layout.requests) {
        tiles_left += kMaxSharedTiles * ceil_div<int64_t>(rows_of(r), limits.tile_rows);
        rows_left += kMaxSharedRows * rows_of(r);
      }
    }
    path_.clear();
    for (size_t n = 0; n < tree.nodes.size(); ++n) {
      const PrefixNode& node = tree.nodes[n];
      // Of all its requests, or their own KV would have a hole.
      const int32_t begin =
          sharing.kv_first[static_cast<size_t>(tree.order[static_cast<size_t>(node.first)])];
      const int64_t tiles = ceil_div<int64_t>(rows(node), limits.tile_rows);
      if (!pays(n, node, begin) || !all_see(tree, node, begin, shape.window_left)) continue;
      if (tiles > tiles_left || rows(node) > rows_left) continue;
      while (!path_.empty() && sharing.parts[path_.back()].last <= node.first) path_.pop_back();
      if (bounded && path_.size() == size_t{kMaxSharedLevels}) continue;
      tiles_left -= tiles;
      rows_left -= rows(node);
      path_.push_back(sharing.parts.size());
      sharing.parts.push_back({begin, node.end, node.first, node.last});
      for (int32_t i = node.first; i < node.last; ++i) {
        sharing.kv_first[static_cast<size_t>(tree.order[static_cast<size_t>(i)])] = node.end;
      }
    }
    if (sharing.empty()) sharing.clear();
  }

  /// Requests of a part in the batch's order, as far as its inner parts let them: rows of q that
  /// follow each other are one copy. The tree has them in the order of their pages. Whoever is met
  /// first in the batch's order, a request or the first one of an inner part, is placed first, with
  /// room for all of it. Once, for the choice that is taken: 1024 requests take 4 us (Xeon).
  void sort_members(const Layout& layout, Sharing& sharing) {
    if (sharing.empty()) return;
    const size_t n = sharing.order.size();
    inner_.assign(n, -1);
    parent_.resize(sharing.parts.size());
    for (size_t p = 0; p < sharing.parts.size(); ++p) {
      const SharedPart& part = sharing.parts[p];
      parent_[p] = inner_[size(part.first)];
      std::fill(inner_.begin() + part.first, inner_.begin() + part.last, static_cast<int32_t>(p));
    }
    inner_of_.assign(layout.requests.size(), kNotThere);
    for (size_t i = 0; i < n; ++i) inner_of_[size(sharing.order[i])] = inner_[i];
    begin_.assign(sharing.parts.size(), -1);
    next_.resize(sharing.parts.size());
    int32_t next = 0;  // of what is in no part
    for (size_t r = 0; r < inner_of_.size(); ++r) {
      const int32_t p = inner_of_[r];
      if (p == kNotThere) continue;
      sharing.order[size(p < 0 ? next++ : place_part(sharing, p, next)++)] =
          static_cast<int32_t>(r);
    }
    for (size_t p = 0; p < sharing.parts.size(); ++p) {
      SharedPart& part = sharing.parts[p];
      part.last += begin_[p] - part.first;
      part.first = begin_[p];
    }
    std::stable_sort(sharing.parts.begin(), sharing.parts.end(),
                     [](const SharedPart& a, const SharedPart& b) {
                       return a.first != b.first ? a.first < b.first : a.last > b.last;
                     });
  }

  /// What a plan would cost, to compare kernels: a worker's share of everything, and at least the
  /// way of one part, which starts first and which others wait for. 8 requests that share 2048
  /// tokens and own 256 (H200) take 16 us apart, and 28 with the part's 1024 tokens first.
  ///
  /// @param again  what requests that begin alike take less where they do not share (read_again())
  static int64_t price(const Layout& layout, const Shape& task, const Workers& workers,
                       const Sharing& sharing, int64_t again) {
    const DeviceLimits& limits = workers.wide;
    const Shape shape = task.with_heads_of_item(limits.heads_of_item);
    const int64_t group = shape.num_qo_heads / shape.num_kv_heads;
    int64_t sum = 0, narrow_sum = 0, longest = 0, shared_tiles = 0;
    RowCosts costs(workers);
    const auto add = [&](int64_t rows, int64_t length, bool leaves_state) {
      costs.set(rows);
      int64_t cost = costs.token * length + costs.tiles * costs.limits->cost_per_item;
      if (leaves_state) cost += costs.tiles * state_cost(*costs.limits);
      (rows <= workers.narrow_rows ? narrow_sum : sum) += cost;
    };
    for (size_t b = 0; b < layout.requests.size(); ++b) {
      const Request& r = layout.requests[b];
      const int32_t own = sharing.first_of(b), hidden = shape.causal ? r.q_len / 2 : 0;
      add(r.q_len * group, max_of(r.kv_len - own - hidden, 0), own > 0);
    }
    for (const SharedPart& part : sharing.parts) {
      int64_t tokens = 0;
      for (int32_t i = part.first; i < part.last; ++i) {
        tokens += layout.requests[size(sharing.order[size(i)])].q_len;
      }
      const int64_t length = part.end - part.begin;
      add(tokens * group, length, true);
      // Mixed kernels have none of it, so that it is of `sum` in any case.
      sum -= part_again(limits, tokens * group) * length;
      shared_tiles += ceil_div<int64_t>(tokens * group, limits.tile_rows);
      longest = max_of(longest,
                       min_of<int64_t>(length, limits.min_chunk) *
                           token_cost(limits, min_of<int64_t>(tokens * group, limits.tile_rows)));
    }
    if (sharing.empty()) sum -= again;
    sum *= shape.num_kv_heads;
    narrow_sum *= shape.num_kv_heads;
    if (shared_tiles > 0) {
      // Chunks of half a worker's share (Cut::part_bound): two per worker, or one per tile.
      const int64_t chunks = max_of(int64_t{2} * limits.num_workers - shared_tiles, int64_t{0});
      sum += chunks * (limits.cost_per_item + state_cost(limits)) / 2;
      longest += limits.cost_per_item + limits.cost_per_shared;
    }
    const int64_t few = memory_share(workers, narrow_sum);
    const int64_t both =
        workers.apart ? sum + few : max_of(sum + narrow_sum / workers.narrow_per_block, few);
    return max_of(ceil_div<int64_t>(both, limits.num_workers), longest) +
           (workers.apart ? workers.narrow.cost_of_launch : 0) +
           (shared_tiles > 0 ? 2 * limits.cost_per_shared : 0);
  }

  /// What a KV head of the last call's requests takes less because L2 has what they begin with, in
  /// units of cost, where they do not share it.
  int64_t again() const { return again_; }

 private:
  /// The next free place of a part, which gets its own from those around it when it is first met.
  int32_t& place_part(const Sharing& sharing, int32_t p, int32_t& outermost) {
    path_.clear();
    for (int32_t at = p; at >= 0 && begin_[size(at)] < 0; at = parent_[size(at)]) {
      path_.push_back(size(at));
    }
    for (; !path_.empty(); path_.pop_back()) {
      const size_t at = path_.back();
      int32_t& place = parent_[at] < 0 ? outermost : next_[size(parent_[at])];
      begin_[at] = next_[at] = place;
      place += sharing.parts[at].last - sharing.parts[at].first;
    }
    return next_[size(p)];
  }

  int64_t rows_of(const Request& r) const { return static_cast<int64_t>(r.q_len) * group_; }
  int64_t rows(const PrefixNode& n) const { return rows_[size(n.last)] - rows_[size(n.first)]; }
  static size_t size(int32_t i) { return static_cast<size_t>(i); }

  /// What a KV token costs all tiles of so many rows.
  static int64_t token_cost(const DeviceLimits& limits, int64_t rows) {
    const int64_t most = limits.tile_rows, rest = rows % most;
    const auto weight = [&](int64_t r) { return detail::kv_weight(limits, r); };
    return rows / most * weight(most) + (rest ? weight(rest) : 0);
  }
  /// What a part's tiles take less for a token, all but the first.
  static int64_t part_again(const DeviceLimits& limits, int64_t rows) {
    const int64_t all = token_cost(limits, rows);
    const int64_t first = detail::kv_weight(limits, min_of<int64_t>(rows, limits.tile_rows));
    return all - detail::read_again(limits, all, min_of(first, all));
  }
  int64_t token_cost(int64_t rows) const {
    const int64_t cost = token_cost(workers_->of(rows), rows);
    return rows <= workers_->narrow_rows ? memory_share(*workers_, cost) : cost;
  }
  /// From the time of a narrow worker to that of a wide one where the memory is the limit: as many
  /// narrow ones as there may be read all that it gives.
  static int64_t memory_share(const Workers& workers, int64_t cost) {
    return workers.mixed() ? cost * workers.wide.num_workers / workers.narrow.num_workers : cost;
  }

  /// What requests of so many rows cost. Most have as many as the one before, and divisions are
  /// what else this takes.
  struct RowCosts {
    const Workers& workers;
    const DeviceLimits* limits = nullptr;
    int64_t rows = -1, tiles = 0;
    int64_t token = 0;          ///< token_cost of their kernel
    int64_t token_in_time = 0;  ///< in the time of a wide worker

    explicit RowCosts(const Workers& all) : workers(all) {}
    void set(int64_t count) {
      if (count == rows) return;
      rows = count;
      limits = &workers.of(rows);
      tiles = ceil_div<int64_t>(rows, limits->tile_rows);
      token = token_cost(*limits, rows);
      // What one tile reads no other has brought into the cache.
      const int64_t read = int64_t{limits->cost_of_reading} * limits->num_workers / 1024;
      if (tiles == 1) token = max_of(token, read);
      token_in_time = rows <= workers.narrow_rows ? memory_share(workers, token) : token;
    }
  };

  /// Sums over the requests in their order, and what a token of every node costs without it: as
  /// much as its children with theirs.
  void measure(const PrefixTree& tree) {
    const size_t n = tree.order.size();
    rows_.assign(n + 1, 0);
    tiles_.assign(n + 1, 0);
    alone_.assign(n + 1, 0);
    RowCosts costs(*workers_);
    for (size_t i = 0; i < n; ++i) {
      const int64_t rows = rows_of(layout_->requests[size(tree.order[i])]);
      costs.set(rows);
      rows_[i + 1] = rows_[i] + rows;
      tiles_[i + 1] = tiles_[i] + costs.tiles;
      alone_[i + 1] = alone_[i] + costs.token_in_time;
    }
    without_.resize(tree.nodes.size());
    path_.clear();
    again_ = 0;
    for (size_t i = 0; i < tree.nodes.size(); ++i) {
      const PrefixNode& node = tree.nodes[i];
      without_[i] = alone_[size(node.last)] - alone_[size(node.first)];
      while (!path_.empty() && tree.nodes[path_.back()].last <= node.first) path_.pop_back();
      const int64_t begin = path_.empty() ? 0 : tree.nodes[path_.back()].end;
      again_ += (without_[i] - read_again(without_[i], node)) * (node.end - begin);
      if (!path_.empty()) without_[path_.back()] -= without_[i] - token_cost(rows(node));
      path_.push_back(i);
    }
  }

  /// Of a token's cost for the requests of a node, of which the first one reads it from memory.
  int64_t read_again(int64_t cost, const PrefixNode& node) const {
    const int64_t first = alone_[size(node.first) + 1] - alone_[size(node.first)];
    return detail::read_again(*limits_, cost, min_of(first, cost));
  }

  /// A partial state more, and its merge.
  static int64_t state_cost(const DeviceLimits& limits) {
    return max_of(limits.cost_per_shared, limits.cost_per_item / 2);
  }

  /// Its tiles are items of their own, and every tile of its requests has a partial state more.
  bool pays(size_t index, const PrefixNode& node, int32_t begin) const {
    const int64_t cost = token_cost(rows(node)) - part_again(*limits_, rows(node));
    const int64_t saved = (read_again(without_[index], node) - cost) * (int64_t{node.end} - begin);
    const int64_t tiles = ceil_div<int64_t>(rows(node), limits_->tile_rows);
    const int64_t requests = tiles_[size(node.last)] - tiles_[size(node.first)];
    return saved > tiles * (limits_->cost_per_item + limits_->cost_per_shared) +
                       requests * state_cost(*limits_);
  }

  bool all_see(const PrefixTree& tree, const PrefixNode& node, int32_t begin,
               int32_t window_left) const {
    if (window_left < 0) return true;
    for (int32_t i = node.first; i < node.last; ++i) {
      const Request& r = layout_->requests[size(tree.order[size(i)])];
      if (int64_t{r.kv_len} - 1 - window_left > begin) return false;
    }
    return true;
  }

  const Layout* layout_ = nullptr;
  const DeviceLimits* limits_ = nullptr;  ///< of wide tiles, which parts have
  const Workers* workers_ = nullptr;
  int32_t group_ = 1;
  std::vector<int64_t> rows_, tiles_, alone_;  ///< sums over the requests before
  std::vector<int64_t> without_;               ///< cost of a node's token, by node
  int64_t again_ = 0;
  std::vector<size_t> path_;  ///< nodes or parts around the one at hand
  // Of sort_members().
  static constexpr int32_t kNotThere = -2;
  std::vector<int32_t> inner_, inner_of_;       ///< innermost part, by place and by request
  std::vector<int32_t> parent_, begin_, next_;  ///< of parts: the one around, first and free place
};

}  // namespace flashbsr
