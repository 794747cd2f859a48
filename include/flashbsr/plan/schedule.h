// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The scheduler: a layout becomes a plan. Pure host code, deterministic, no array is touched.
//
// Algorithm 1 of the FlashInfer paper (MLSys 2025), over (request, row tile, KV head):
//   1. trim each row tile's KV range by causality and window
//   2. bound a chunk's cost by total / workers, rounded up to the KV tile; split what is longer
//   3. sort the chunks, most expensive first
//   4. give each to the worker with the least accumulated cost (min-heap)
// The sorted list is also the claim order of backends that hand out items dynamically.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include <flashbsr/plan/layout.h>
#include <flashbsr/plan/limits.h>

namespace flashbsr {

class Planner {
 public:
  /// Plans into an internal buffer that stays valid until the next call. Grows it at most
  /// geometrically, so that a steady state allocates nothing.
  PlanView plan(const Layout& layout, const Shape& shape, const DeviceLimits& limits = {},
                const SplitPolicy& split = {}, const Capacity& capacity = {}) {
    if (limits.num_workers < 1 || limits.num_workers >= 1 << 16) {
      throw Error(ErrorCode::kValue, "num_workers", std::to_string(limits.num_workers),
                  "a number in [1, 65536)");
    }
    cut_tiles(layout, shape, limits, split);
    const PlanSizes need{.requests = static_cast<int64_t>(layout.requests.size()),
                         .items = static_cast<int64_t>(chunks_.size()) * shape.num_kv_heads,
                         .merges = split_tiles_ * shape.num_kv_heads,
                         .slots = split_chunks_ * shape.num_kv_heads,
                         .kv_indices = static_cast<int64_t>(layout.kv_indices.size())};
    if (capacity.fixed()) {
      sizes_ = sizes_for(capacity, shape, limits, split, layout.page_size);
      check_capacity(layout, need, capacity);
    } else {
      grow(need);
    }
    write_header(layout, shape, limits, need);
    std::sort(chunks_.begin(), chunks_.end());
    write_items(shape);
    assign_queues(limits);
    return PlanView{buffer_.data()};
  }

  const std::vector<int32_t>& buffer() const { return buffer_; }

 private:
  /// A row tile of one request; the same for every KV head.
  struct Tile {
    int32_t request, row_begin, row_count;
    int32_t chunk_count, slot_base, merge_base;
  };

  struct Chunk {
    int64_t cost;
    int32_t tile, index, kv_begin, kv_end;

    bool operator<(const Chunk& o) const {  // most expensive first; ties in request order
      if (cost != o.cost) return cost > o.cost;
      return tile != o.tile ? tile < o.tile : index < o.index;
    }
  };

  void cut_tiles(const Layout& layout, const Shape& shape, const DeviceLimits& limits,
                 const SplitPolicy& split) {
    PlanHeader h{};
    h.flags = shape.causal ? kPlanCausal : 0;
    h.window_left = shape.window_left;
    const int32_t group = shape.num_qo_heads / shape.num_kv_heads;
    tiles_.clear();
    spans_.clear();
    int64_t total = 0;
    for (size_t b = 0; b < layout.requests.size(); ++b) {
      const Request& r = layout.requests[b];
      const int64_t rows = static_cast<int64_t>(r.q_len) * group;
      if (rows > std::numeric_limits<int32_t>::max()) {
        throw Error(ErrorCode::kIndexRange, "qo_indptr", std::to_string(rows) + " packed rows",
                    "fewer than 2^31 query tokens x group in a request");
      }
      for (int64_t row = 0; row < rows; row += limits.tile_rows) {
        const int32_t count = static_cast<int32_t>(min_of<int64_t>(limits.tile_rows, rows - row));
        const int32_t first = static_cast<int32_t>(row) / group;
        const int32_t last = static_cast<int32_t>(row + count - 1) / group;
        // Spans only move right from token to token: first begin to last end covers the tile.
        const Span a = visible_span(h, r, first), z = visible_span(h, r, last);
        const Span span{min_of(a.begin, z.end), z.end};
        tiles_.push_back({static_cast<int32_t>(b), static_cast<int32_t>(row), count, 1, -1, -1});
        spans_.push_back(span);
        total += kv_weight(limits, count) * (span.end - span.begin);
      }
    }
    const int64_t bound = ceil_div<int64_t>(total * shape.num_kv_heads, limits.num_workers);
    cut_chunks(shape, limits, split, bound);
  }

  static int64_t kv_weight(const DeviceLimits& limits, int32_t rows) {
    return limits.cost_per_kv + static_cast<int64_t>(limits.cost_per_kv_row) * rows;
  }

  void cut_chunks(const Shape& shape, const DeviceLimits& limits, const SplitPolicy& split,
                  int64_t bound) {
    chunks_.clear();
    split_tiles_ = split_chunks_ = 0;
    kv_chunk_ = chunk_length(limits, bound, limits.tile_rows);
    for (size_t t = 0; t < tiles_.size(); ++t) {
      Tile& tile = tiles_[t];
      const Span span = spans_[t];
      const int64_t length = span.end - span.begin;
      int64_t first = span.begin, step = max_of<int64_t>(length, 1);
      if (split.fixed_size > 0 && !split.disabled) {
        step = split.fixed_size;
        first = span.begin / step * step;
      } else if (!split.disabled) {
        const int64_t most = chunk_length(limits, bound, tile.row_count);
        const int64_t count = max_of<int64_t>(ceil_div(length, most), 1);
        if (count > 1) step = round_up<int64_t>(ceil_div(length, count), limits.kv_tile);
      }
      const int32_t before = static_cast<int32_t>(chunks_.size());
      int64_t begin = span.begin;
      do {
        const int64_t end = min_of<int64_t>(first + step, span.end);
        const int64_t cost =
            limits.cost_per_item + (end - begin) * kv_weight(limits, tile.row_count);
        const int32_t index = static_cast<int32_t>(chunks_.size()) - before;
        chunks_.push_back({cost, static_cast<int32_t>(t), index, static_cast<int32_t>(begin),
                           static_cast<int32_t>(end)});
        begin = end;
        first += step;
      } while (begin < span.end);
      tile.chunk_count = static_cast<int32_t>(chunks_.size()) - before;
      if (tile.chunk_count > 1) {
        tile.slot_base = static_cast<int32_t>(split_chunks_ * shape.num_kv_heads);
        tile.merge_base = static_cast<int32_t>(split_tiles_ * shape.num_kv_heads);
        split_chunks_ += tile.chunk_count;
        ++split_tiles_;
      }
    }
  }

  static int64_t chunk_length(const DeviceLimits& limits, int64_t bound, int32_t rows) {
    const int64_t tokens = ceil_div(bound, kv_weight(limits, rows));
    return max_of<int64_t>(round_up<int64_t>(tokens, limits.kv_tile), limits.min_chunk);
  }

  void check_capacity(const Layout& layout, const PlanSizes& need, const Capacity& c) const {
    const auto check = [](const char* name, int64_t actual, int64_t most) {
      if (actual <= most) return;
      throw Error(ErrorCode::kCapacity, name, std::to_string(actual),
                  "at most " + std::to_string(most) + ", the capacity given at construction");
    };
    check("max_batch_size", need.requests, c.max_requests);
    check("max_q_tokens", layout.num_q_tokens, c.max_q_tokens);
    check("max_kv_pages", layout.paged ? need.kv_indices : layout.num_kv_rows, c.max_kv_indices);
    // Implied by the three above; a plan that broke the proof must not write past its sections.
    check("work items", need.items, sizes_.items);
    check("merges", need.merges, sizes_.merges);
    check("slots", need.slots, sizes_.slots);
  }

  void grow(const PlanSizes& need) {
    const auto fit = [](int64_t& have, int64_t want) {
      if (want > have) have = max_of<int64_t>(want, have + have / 2);
    };
    fit(sizes_.requests, need.requests);
    fit(sizes_.items, need.items);
    fit(sizes_.merges, need.merges);
    fit(sizes_.slots, need.slots);
    fit(sizes_.kv_indices, need.kv_indices);
  }

  void write_header(const Layout& layout, const Shape& shape, const DeviceLimits& limits,
                    const PlanSizes& need) {
    const int64_t words = sizes_.total_words(limits.num_workers);
    if (words > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kCapacity, "plan", std::to_string(words) + " words",
                  "fewer than 2^31; raise fixed_split_size or lower the capacity");
    }
    buffer_.resize(static_cast<size_t>(words));
    const auto i32 = [](int64_t v) { return static_cast<int32_t>(v); };
    PlanHeader h{};
    h.magic = kPlanMagic;
    h.version = kPlanVersion;
    h.total_size = i32(words);
    h.flags = (shape.causal ? kPlanCausal : 0) | (layout.paged ? kPlanPaged : 0) |
              (shape.custom_mask ? kPlanCustomMask : 0);
    h.num_requests = i32(need.requests);
    h.num_items = i32(need.items);
    h.num_workers = limits.num_workers;
    h.num_merges = i32(need.merges);
    h.num_slots = i32(need.slots);
    h.num_kv_indices = i32(need.kv_indices);
    h.num_q_tokens = i32(layout.num_q_tokens);
    h.num_kv_rows = i32(layout.num_kv_rows);
    h.num_qo_heads = shape.num_qo_heads;
    h.num_kv_heads = shape.num_kv_heads;
    h.group_size = shape.num_qo_heads / shape.num_kv_heads;
    h.page_size = layout.page_size;
    h.window_left = shape.window_left;
    h.tile_rows = limits.tile_rows;
    for (const Request& r : layout.requests) h.max_kv_len = max_of(h.max_kv_len, r.kv_len);
    h.kv_chunk = i32(min_of<int64_t>(kv_chunk_, std::numeric_limits<int32_t>::max()));
    h.max_requests = i32(sizes_.requests);
    h.max_items = i32(sizes_.items);
    h.max_merges = i32(sizes_.merges);
    h.max_slots = i32(sizes_.slots);
    h.max_kv_indices = i32(sizes_.kv_indices);
    h.off_requests = sizeof(PlanHeader) / 4;
    h.off_items = h.off_requests + 8 * h.max_requests;
    h.off_queue_indptr = h.off_items + 8 * h.max_items;
    h.off_queue_items = h.off_queue_indptr + limits.num_workers + 1;
    h.off_merges = h.off_queue_items + h.max_items;
    h.off_kv_indices = h.off_merges + 8 * h.max_merges;
    for (const Tile& tile : tiles_) h.max_rows = max_of(h.max_rows, tile.row_count);
    h.cost_per_item = limits.cost_per_item;
    h.cost_per_kv = limits.cost_per_kv;
    h.cost_per_kv_row = limits.cost_per_kv_row;
    std::memcpy(buffer_.data(), &h, sizeof(h));
    copy(h.off_requests, layout.requests.data(), layout.requests.size() * sizeof(Request));
    copy(h.off_kv_indices, layout.kv_indices.data(), layout.kv_indices.size() * 4);
  }

  void copy(int32_t offset, const void* src, size_t bytes) {
    if (bytes) std::memcpy(buffer_.data() + offset, src, bytes);
  }

  PlanHeader& header() { return *reinterpret_cast<PlanHeader*>(buffer_.data()); }

  /// Chunks in cost order, the KV heads of one chunk adjacent: they touch the same pages.
  void write_items(const Shape& shape) {
    WorkItem* item = reinterpret_cast<WorkItem*>(buffer_.data() + header().off_items);
    for (const Chunk& c : chunks_) {
      const Tile& tile = tiles_[static_cast<size_t>(c.tile)];
      const bool split = tile.chunk_count > 1;
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        *item++ = {tile.request,
                   tile.row_begin,
                   tile.row_count,
                   head,
                   c.kv_begin,
                   c.kv_end,
                   split ? tile.slot_base + head * tile.chunk_count + c.index : -1,
                   split ? tile.merge_base + head : -1};
      }
    }
    Merge* merges = reinterpret_cast<Merge*>(buffer_.data() + header().off_merges);
    for (const Tile& tile : tiles_) {
      if (tile.chunk_count == 1) continue;
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        merges[tile.merge_base + head] = {tile.request,
                                          tile.row_begin,
                                          tile.row_count,
                                          head,
                                          tile.slot_base + head * tile.chunk_count,
                                          tile.chunk_count,
                                          0,
                                          0};
      }
    }
  }

  /// The min-heap of step 4. A key is cost << 16 | worker: one comparison, and equal costs go to
  /// the lowest worker.
  void assign_queues(const DeviceLimits& limits) {
    constexpr int kWorkerBits = 16;
    const int32_t workers = limits.num_workers;
    heap_.resize(static_cast<size_t>(workers));
    for (int32_t w = 0; w < workers; ++w) heap_[static_cast<size_t>(w)] = w;
    const int32_t items = header().num_items;
    const int32_t heads = header().num_kv_heads;
    worker_of_.resize(static_cast<size_t>(items));
    int32_t* indptr = buffer_.data() + header().off_queue_indptr;
    std::fill(indptr, indptr + workers + 1, 0);
    int64_t total = 0;
    int32_t item = 0;
    for (const Chunk& c : chunks_) {
      total += c.cost * heads;
      for (int32_t head = 0; head < heads; ++head, ++item) {
        const int32_t worker = static_cast<int32_t>(heap_[0] & ((1 << kWorkerBits) - 1));
        worker_of_[static_cast<size_t>(item)] = worker;
        ++indptr[worker + 1];
        heap_[0] += c.cost << kWorkerBits;
        sift_down();
      }
    }
    int64_t top = 0;
    for (const int64_t key : heap_) top = max_of(top, key >> kWorkerBits);
    const auto saturate = [](int64_t v) {
      return static_cast<int32_t>(min_of<int64_t>(v, std::numeric_limits<int32_t>::max()));
    };
    header().max_cost = saturate(top);
    header().mean_cost = saturate(total / workers);
    for (int32_t w = 0; w < workers; ++w) indptr[w + 1] += indptr[w];
    next_.assign(indptr, indptr + workers);
    int32_t* queue = buffer_.data() + header().off_queue_items;
    for (int32_t i = 0; i < items; ++i) {
      queue[next_[static_cast<size_t>(worker_of_[static_cast<size_t>(i)])]++] = i;
    }
  }

  /// Sinks the root, whose cost grew, to its place.
  void sift_down() {
    const size_t n = heap_.size();
    const int64_t moved = heap_[0];
    size_t at = 0;
    for (size_t child = 1; child < n; child = 2 * at + 1) {
      child += child + 1 < n && heap_[child + 1] < heap_[child];
      if (moved < heap_[child]) break;
      heap_[at] = heap_[child];
      at = child;
    }
    heap_[at] = moved;
  }

  PlanSizes sizes_;
  std::vector<int32_t> buffer_;
  std::vector<Tile> tiles_;
  std::vector<Span> spans_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> heap_;
  std::vector<int32_t> worker_of_;
  std::vector<int32_t> next_;
  int64_t split_tiles_ = 0;
  int64_t split_chunks_ = 0;
  int64_t kv_chunk_ = 0;
};

}  // namespace flashbsr
