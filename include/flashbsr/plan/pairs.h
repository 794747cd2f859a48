// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Items in pairs: two row tiles of one request meet the same KV at the same time, so that a cluster
// of two blocks loads it once for both. Cluster c of n has the pairs c, c + n, ..., without claims.
#pragma once

#include <algorithm>
#include <vector>

#include <flashbsr/plan/candidates.h>

namespace flashbsr::detail {

/// Puts the chunks of two tiles next to each other in the claim order: 2 i and 2 i + 1.
class Pairs {
 public:
  /// True if all chunks of the candidate are in pairs now, which end hardly later than queues
  /// would. Otherwise nothing has changed. Queues stay as they are: costs are the same, place by
  /// place.
  /// @param late_of  where lengths come later, which may move row tiles of several tokens apart and
  ///                 leave clusters with unequal work: rows of a token. 0: they are known
  bool make(const std::vector<Tile>& tiles, const DeviceLimits& limits, int32_t late_of,
            Candidate& chosen) {
    Cut& cut = chosen.cut;
    if (!limits.pairs || chosen.policy == kPolicyCluster || limits.num_workers < 2) return false;
    if (late_of > 0 && static_cast<int64_t>(cut.order.size()) > limits.num_workers) return false;
    if (!match(tiles, cut, late_of)) return false;
    order_.clear();
    for (const uint32_t i : cut.order) {
      if (cut.chunks[i].tile % 2) continue;
      order_.push_back(i);
      order_.push_back(other_[i]);
    }
    const size_t clusters = static_cast<size_t>(limits.num_workers / 2);
    ends_.assign(clusters, 0);
    for (size_t n = 0; n < order_.size(); ++n) {
      const int64_t cost = cut.chunks[order_[n]].cost;
      if (cost != cut.chunks[cut.order[n]].cost) return false;
      if (n % 2 == 0) ends_[n / 2 % clusters] += cost;
    }
    const int64_t longest = chosen.deal.loads().longest;
    const int64_t end = *std::max_element(ends_.begin(), ends_.end());
    if (end > longest + longest / kSpare) return false;
    cut.order.swap(order_);
    return true;
  }

 private:
  static constexpr int64_t kSpare = 64;  ///< less than what pairs win

  /// Finds the chunk that meets what one of an even tile does, in the next one. False: there are
  /// some without.
  bool match(const std::vector<Tile>& tiles, const Cut& cut, int32_t late_of) {
    if (tiles.empty() || tiles.size() % 2) return false;
    other_.assign(cut.chunks.size(), 0);
    uint32_t at = 0;
    for (size_t t = 0; t < tiles.size(); t += 2) {
      const Tile &one = tiles[t], &other = tiles[t + 1];
      const int32_t count = cut.parts[t].count;
      if (one.request != other.request || cut.parts[t + 1].count != count) return false;
      const int32_t last = other.row_begin + other.row_count - 1;
      if (late_of > 0 && one.row_begin / late_of != last / late_of) return false;
      for (int32_t i = 0; i < count; ++i, ++at) {
        const Chunk &a = cut.chunks[at], &b = cut.chunks[at + static_cast<uint32_t>(count)];
        if (a.kv_begin != b.kv_begin || a.kv_end != b.kv_end) return false;
        other_[at] = at + static_cast<uint32_t>(count);
      }
      at += static_cast<uint32_t>(count);
    }
    return true;
  }

  std::vector<uint32_t> order_, other_;
  std::vector<int64_t> ends_;  ///< of every cluster
};

}  // namespace flashbsr::detail
