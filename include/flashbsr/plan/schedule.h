// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The scheduler: a layout becomes a plan. Pure host code, deterministic, no array is touched.
//
// Algorithm 1 of the FlashInfer paper (MLSys 2025), over (request, row tile, KV head):
//   0. take KV that requests begin with together out of them, as parts of its own      share.h
//   1. trim each row tile's KV range by causality and window                            cut.h
//   2. bound a chunk's cost by total / workers, rounded up to the KV tile; split what is longer
//   3. sort the chunks, most expensive first
//   4. give each to the worker with the least accumulated cost (min-heap)               deal.h
// Where the limits ask for it, step 2 is one of several ways to cut, and the cheapest is taken
// (candidates.h). The sorted list is also the claim order of backends that hand out items
// dynamically.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include <flashbsr/plan/layout.h>
#include <flashbsr/plan/limits.h>
#include <flashbsr/plan/mixture.h>
#include <flashbsr/plan/runs.h>

namespace flashbsr {

class Planner {
 public:
  /// Plans into an internal buffer that stays valid until the next call. Grows it at most
  /// geometrically, so that a steady state allocates nothing.
  PlanView plan(const Layout& layout, const Shape& shape, const Workers& all = {},
                const SplitPolicy& split = {}, const Capacity& capacity = {},
                const Sharing& sharing = {}) {
    if (all.wide.num_workers < 1 || all.wide.num_workers >= 1 << 16) {
      throw Error(ErrorCode::kValue, "num_workers", std::to_string(all.wide.num_workers),
                  "a number in [1, 65536)");
    }
    // A request is cut alike for all of its KV heads, or it has but one.
    Shape cut_shape = shape;
    if (!layout.kv_heads.empty()) {
      cut_shape.num_qo_heads /= shape.num_kv_heads;
      cut_shape.num_kv_heads = 1;
    }
    detail::cut_tiles(layout, sharing, cut_shape, all.wide, tiles_);
    detail::Candidate& chosen = mixture_.choose(tiles_, cut_shape, all, split);
    const Workers& workers = mixture_.workers();
    const DeviceLimits& limits = workers.wide;
    const detail::Cut& cut = chosen.cut;
    runs_.find(layout, sharing, tiles_, shape.num_qo_heads / shape.num_kv_heads);
    const int32_t heads = cut_shape.num_kv_heads;
    const PlanSizes need{
        .requests = static_cast<int64_t>(layout.requests.size() + sharing.parts.size()),
        .items = static_cast<int64_t>(cut.chunks.size()) * heads,
        .merges = (cut.split_tiles + static_cast<int64_t>(runs_.runs.size())) * heads,
        .partial_rows = cut.split_rows * heads,
        .kv_indices = static_cast<int64_t>(layout.kv_indices.size()),
        .q_rows = static_cast<int64_t>(runs_.q_rows.size()),
        .merge_parts = static_cast<int64_t>(runs_.parts.size()) * heads};
    if (capacity.fixed()) {
      sizes_ = sizes_for(capacity, shape, limits, split, layout.page_size);
      check_capacity(layout, need, capacity);
    } else {
      grow(need);
    }
    write_header(layout, shape, workers, need);
    header().num_wide_items = static_cast<int32_t>(mixture_.num_wide_chunks(chosen)) * heads;
    header().num_slots = static_cast<int32_t>(cut.split_chunks * heads);
    header().num_shared = static_cast<int32_t>(sharing.parts.size());
    header().num_requests -= header().num_shared;
    header().common_prefix = sharing.empty() ? 0 : layout.common_prefix;
    write_shared(layout, sharing);
    write_choice(chosen, limits, heads);
    if (limits.by_head && layout.shared_kv && !workers.mixed()) {
      place_items(layout, cut, heads);
    } else {
      place_.clear();
    }
    write_items(layout, cut, heads);
    write_merges(layout, cut, heads);
    int32_t* queue_items = buffer_.data() + header().off_queue_items;
    mixture_.write_queues(chosen, header().num_wide_items,
                          buffer_.data() + header().off_queue_indptr, queue_items);
    for (size_t i = 0; i < place_.size(); ++i) {
      queue_items[i] = place_[static_cast<size_t>(queue_items[i])];
    }
    write_starts();
    if (layout.bounds) write_bounds();
    return PlanView{buffer_.data()};
  }

  /// The plan of another, whose shape differs in nothing but a window that hides nothing.
  PlanView take(const Planner& other, int32_t window_left) {
    sizes_ = other.sizes_;
    buffer_ = other.buffer_;
    header().window_left = window_left;
    return PlanView{buffer_.data()};
  }

  const std::vector<int32_t>& buffer() const { return buffer_; }

 private:
  void check_capacity(const Layout& layout, const PlanSizes& need, const Capacity& c) const {
    const auto check = [](const char* name, int64_t actual, int64_t most) {
      if (actual <= most) return;
      throw Error(ErrorCode::kCapacity, name, std::to_string(actual),
                  "at most " + std::to_string(most) + ", the capacity given at construction");
    };
    check("max_batch_size", static_cast<int64_t>(layout.requests.size()), c.max_requests);
    check("max_q_tokens", layout.num_q_tokens, c.max_q_tokens);
    check("max_kv_pages", layout.paged ? need.kv_indices : layout.num_kv_rows, c.max_kv_indices);
    // Implied by the three above; a plan that broke the proof must not write past its sections.
    check("shared parts", need.requests, sizes_.requests);
    check("work items", need.items, sizes_.items);
    check("merges", need.merges, sizes_.merges);
    check("rows of partial states", need.partial_rows, sizes_.partial_rows);
    check("rows of shared parts", need.q_rows, sizes_.q_rows);
    check("parts of merges", need.merge_parts, sizes_.merge_parts);
  }

  void grow(const PlanSizes& need) {
    const auto fit = [](int64_t& have, int64_t want) {
      if (want > have) have = max_of<int64_t>(want, have + have / 2);
    };
    fit(sizes_.requests, need.requests);
    fit(sizes_.items, need.items);
    fit(sizes_.merges, need.merges);
    fit(sizes_.partial_rows, need.partial_rows);
    fit(sizes_.kv_indices, need.kv_indices);
    fit(sizes_.q_rows, need.q_rows);
    fit(sizes_.merge_parts, need.merge_parts);
  }

  void write_header(const Layout& layout, const Shape& shape, const Workers& workers,
                    const PlanSizes& need) {
    const DeviceLimits& limits = workers.wide;
    const int64_t words = sizes_.total_words(workers.count(), layout.bounds);
    if (max_of(words, sizes_.partial_rows) > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kCapacity, "plan",
                  std::to_string(words) + " words, " + std::to_string(sizes_.partial_rows) +
                      " rows of partial states",
                  "fewer than 2^31; raise fixed_split_size or lower the capacity");
    }
    buffer_.resize(static_cast<size_t>(words));
    const auto i32 = [](int64_t v) { return static_cast<int32_t>(v); };
    PlanHeader h{};
    h.magic = kPlanMagic;
    h.version = kPlanVersion;
    h.total_size = i32(words);
    h.flags = (layout.paged ? kPlanPaged : 0) | (shape.custom_mask ? kPlanCustomMask : 0) |
              (layout.kv_heads.empty() ? 0 : kPlanPerHead) |
              (workers.wide.sliced_merges ? kPlanSlicedMerges : 0);
    h.num_requests = i32(need.requests);
    h.num_items = i32(need.items);
    h.num_workers = workers.count();
    h.num_merges = i32(need.merges);
    h.num_partial_rows = i32(need.partial_rows);
    h.num_kv_indices = i32(need.kv_indices);
    h.num_q_rows = i32(need.q_rows);
    h.num_merge_parts = i32(need.merge_parts);
    h.num_q_tokens = h.num_q_tokens_now = i32(layout.num_q_tokens);
    h.num_kv_rows = i32(layout.num_kv_rows);
    h.num_kv_tokens = i32(layout.num_kv_tokens);
    h.num_qo_heads = shape.num_qo_heads;
    h.num_kv_heads = shape.num_kv_heads;
    h.group_size = shape.num_qo_heads / shape.num_kv_heads;
    h.page_size = layout.page_size;
    shape.write_visibility(h);
    h.tile_rows = limits.tile_rows;
    for (const Request& r : layout.requests) h.max_kv_len = max_of(h.max_kv_len, r.kv_len);
    h.max_requests = i32(sizes_.requests);
    h.max_items = i32(sizes_.items);
    h.max_merges = i32(sizes_.merges);
    h.max_partial_rows = i32(sizes_.partial_rows);
    h.max_kv_indices = i32(sizes_.kv_indices);
    h.max_q_rows = i32(sizes_.q_rows);
    h.max_merge_parts = i32(sizes_.merge_parts);
    h.off_starts = sizeof(PlanHeader) / 4;
    h.off_requests = h.off_starts + 16 * h.num_workers;
    h.off_items = h.off_requests + 8 * h.max_requests;
    h.off_queue_indptr = h.off_items + 8 * h.max_items;
    h.off_queue_items = h.off_queue_indptr + h.num_workers + 1;
    h.off_merges = h.off_queue_items + h.max_items;
    h.off_kv_indices = h.off_merges + 8 * h.max_merges;
    if (layout.bounds) {
      h.off_bounds = h.off_kv_indices;
      h.off_kv_indices += i32(sizes_.record_words());
    }
    h.kv_tile = limits.kv_tile;
    h.off_q_rows = h.off_kv_indices + h.max_kv_indices;
    h.off_merge_parts = h.off_q_rows + h.max_q_rows;
    for (const detail::Tile& tile : tiles_) h.max_rows = max_of(h.max_rows, tile.row_count);
    h.cost_per_item = limits.cost_per_item;
    h.cost_per_kv = limits.cost_per_kv;
    h.cost_per_kv_row = limits.cost_per_kv_row;
    h.cost_row_shift = limits.cost_row_shift;
    if (workers.mixed()) {
      h.num_narrow_workers = workers.narrow.num_workers;
      h.num_narrow_blocks = workers.narrow_blocks();
      h.narrow_rows = workers.narrow_rows;
      h.narrow_cost_per_item = workers.narrow.cost_per_item;
      h.narrow_cost_per_kv = workers.narrow.cost_per_kv;
      h.narrow_cost_per_split = workers.narrow.cost_per_split;
    }
    std::memcpy(buffer_.data(), &h, sizeof(h));
    copy(h.off_requests, layout.requests.data(), layout.requests.size() * sizeof(Request));
    if (shape.placed) place_requests(layout);
    copy(h.off_kv_indices, layout.kv_indices.data(), layout.kv_indices.size() * 4);
  }

  void copy(int32_t offset, const void* src, size_t bytes) {
    if (bytes) std::memcpy(buffer_.data() + offset, src, bytes);
  }

  /// Requests of a kPlanPlaced plan.
  void place_requests(const Layout& layout) {
    Request* request = reinterpret_cast<Request*>(buffer_.data() + header().off_requests);
    for (size_t b = 0; b < layout.requests.size(); ++b) {
      request[b].mask_lo = request[b].q_len;
      request[b].q_len = request[b].kv_len - layout.positions[b];
    }
  }

  PlanHeader& header() { return *reinterpret_cast<PlanHeader*>(buffer_.data()); }

  /// What the scheduler decided, and the loads that follow.
  void write_choice(const detail::Candidate& chosen, const DeviceLimits& limits, int64_t heads) {
    const auto saturate = [](int64_t v) {
      return static_cast<int32_t>(min_of<int64_t>(v, std::numeric_limits<int32_t>::max()));
    };
    int64_t total = 0;
    for (const detail::Chunk& c : chosen.cut.chunks) total += c.cost;
    PlanHeader& h = header();
    h.kv_chunk = saturate(chosen.kv_chunk);
    h.max_cost = saturate(mixture_.longest(chosen));
    h.mean_cost = saturate(total * heads / h.num_workers);
    h.policy = chosen.policy;
    h.policy_percent = chosen.percent;
    h.cluster_parts = chosen.cluster_parts;
    h.cost_per_split = limits.cost_per_split;
    h.price = saturate(chosen.price);
    h.other_price = saturate(mixture_.other_price());
    h.units_per_us = limits.units_per_us;
  }

  /// The shared parts as requests behind those of the batch, and their rows of q.
  void write_shared(const Layout& layout, const Sharing& sharing) {
    if (sharing.empty()) return;
    Request* request =
        reinterpret_cast<Request*>(buffer_.data() + header().off_requests) + layout.requests.size();
    for (size_t p = 0; p < sharing.parts.size(); ++p) {
      const SharedPart& part = sharing.parts[p];
      const size_t one = static_cast<size_t>(sharing.order[static_cast<size_t>(part.first)]);
      // A row that is known is not looked up: behind the first loads of all blocks that takes 5 us.
      const bool together = runs_.together(part);
      const int32_t place = runs_.first_row(part);
      *request++ = {.q_begin = place,
                    .q_len = runs_.tokens(part),
                    .kv_begin = layout.requests[one].kv_begin,
                    .kv_len = part.end,
                    .mask_lo = together ? runs_.q_rows[static_cast<size_t>(place)] : -1,
                    .mask_hi = -1,
                    .index = together ? Request::kTogether : Request::kScattered,
                    .mask_begin = part.end};
    }
    copy(header().off_q_rows, runs_.q_rows.data(), runs_.q_rows.size() * 4);
  }

  static int32_t first_head(const Layout& layout, const detail::Tile& tile) {
    return layout.kv_heads.empty() ? 0 : layout.kv_heads[static_cast<size_t>(tile.request)];
  }

  /// Where the items of write_items lie if that is KV head by KV head. Empty: one after another.
  void place_items(const Layout& layout, const detail::Cut& cut, int32_t heads) {
    place_.clear();
    for (const uint32_t i : cut.order) {
      const detail::Tile& tile = tiles_[static_cast<size_t>(cut.chunks[i].tile)];
      for (int32_t h = 0; h < heads; ++h) place_.push_back(first_head(layout, tile) + h);
    }
    std::vector<int32_t> next(static_cast<size_t>(header().num_kv_heads) + 1, 0);
    for (const int32_t head : place_) ++next[static_cast<size_t>(head) + 1];
    for (size_t h = 1; h < next.size(); ++h) next[h] += next[h - 1];
    for (int32_t& place : place_) place = next[static_cast<size_t>(place)]++;
  }

  /// Chunks in cost order, the KV heads of one chunk adjacent: they touch the same pages.
  /// @param heads  of a request: all, or the one that it belongs to
  void write_items(const Layout& layout, const detail::Cut& cut, int32_t heads) {
    WorkItem* items = reinterpret_cast<WorkItem*>(buffer_.data() + header().off_items);
    const int32_t* const place = place_.empty() ? nullptr : place_.data();
    int32_t nth = 0;
    const int32_t own_merges = static_cast<int32_t>(cut.split_tiles) * heads;
    for (const uint32_t i : cut.order) {
      const detail::Chunk& c = cut.chunks[i];
      const detail::Tile& tile = tiles_[static_cast<size_t>(c.tile)];
      const detail::Parts& parts = cut.parts[static_cast<size_t>(c.tile)];
      // Its slot and its merge are so many further on for every head.
      int32_t merge = -1, merge_step = 0, merges = 0;
      if (parts.split() && !tile.shares) {
        merge = parts.merge_base;
        merge_step = merges = 1;
      } else if (parts.split()) {
        const detail::RunRange runs = runs_.of_tile(static_cast<size_t>(c.tile));
        merge = own_merges + runs_.merge(0, runs.first);
        merge_step = runs_.merge(1, 0);
        merges = runs.count;
      }
      const int32_t first = first_head(layout, tile), slot = parts.slot(tile, 0, c.index);
      const int32_t slot_step = parts.slot(tile, 1, c.index) - slot;
      for (int32_t head = 0; head < heads; ++head, ++nth) {
        items[place ? place[nth] : nth] = {tile.request,
                                           tile.row_begin,
                                           tile.row_count,
                                           static_cast<int16_t>(first + head),
                                           static_cast<int16_t>(merges),
                                           c.kv_begin,
                                           c.kv_end,
                                           slot + head * slot_step,
                                           merge + head * merge_step};
      }
    }
  }

  void write_merges(const Layout& layout, const detail::Cut& cut, int32_t heads) {
    Merge* merges = reinterpret_cast<Merge*>(buffer_.data() + header().off_merges);
    for (size_t t = 0; cut.split_tiles > 0 && t < tiles_.size(); ++t) {
      const detail::Tile& tile = tiles_[t];
      const detail::Parts& parts = cut.parts[t];
      if (parts.merge_base < 0) continue;
      const int32_t first = first_head(layout, tile);
      for (int32_t head = 0; head < heads; ++head) {
        merges[parts.merge_base + head] = {tile.request,
                                           tile.row_begin,
                                           tile.row_count,
                                           first + head,
                                           parts.slot(tile, head, 0),
                                           parts.count,
                                           -1,
                                           0};
      }
    }
    merges += cut.split_tiles * heads;
    MergePart* part = reinterpret_cast<MergePart*>(buffer_.data() + header().off_merge_parts);
    MergePart* const first = part;
    for (int32_t head = 0; head < heads; ++head) {
      for (const detail::Run& run : runs_.runs) {
        Merge& merge = *merges++;
        merge = {run.request,
                 run.row_begin,
                 run.row_count,
                 head,
                 -1,
                 0,
                 static_cast<int32_t>(part - first),
                 run.part_count};
        for (int32_t i = 0; i < run.part_count; ++i) {
          const detail::RunPart& from = runs_.parts[static_cast<size_t>(run.part + i)];
          const detail::Tile& tile = tiles_[static_cast<size_t>(from.tile)];
          const detail::Parts& parts = cut.parts[static_cast<size_t>(from.tile)];
          *part++ = {parts.slot(tile, head, 0) + from.row, parts.count, tile.row_count, 0};
          merge.state_count += parts.count;
        }
      }
    }
  }

  void write_starts() {
    WorkerStart* start = reinterpret_cast<WorkerStart*>(buffer_.data() + header().off_starts);
    const PlanView plan{buffer_.data()};
    const int32_t* queue = plan.queue_indptr();
    for (int32_t w = 0; w < header().num_workers; ++w, ++start) {
      *start = WorkerStart{};
      start->item.request = -1;
      if (queue[w] == queue[w + 1]) continue;
      start->item = plan.items()[plan.queue_items()[queue[w]]];
      start->request = plan.requests()[start->item.request];
    }
  }

  /// What core/resolve.h starts from.
  void write_bounds() {
    const PlanHeader h = header();
    int32_t at = h.off_bounds;
    const auto keep = [&](int32_t from, int32_t count, int32_t most) {
      copy(at, buffer_.data() + from, static_cast<size_t>(count) * sizeof(Request));
      at += 8 * most;
    };
    keep(h.off_requests, h.num_requests + h.num_shared, h.max_requests);
    keep(h.off_items, h.num_items, h.max_items);
    keep(h.off_merges, h.num_merges, h.max_merges);
  }

  PlanSizes sizes_;
  std::vector<int32_t> buffer_;
  std::vector<detail::Tile> tiles_;
  std::vector<int32_t> place_;
  detail::Mixture mixture_;
  detail::Runs runs_;
};

}  // namespace flashbsr
