// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A plan is written: what was chosen becomes the sections that core/plan.h describes.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include <flashbsr/plan/layout.h>
#include <flashbsr/plan/limits.h>
#include <flashbsr/plan/memory.h>
#include <flashbsr/plan/mixture.h>
#include <flashbsr/plan/runs.h>

namespace flashbsr::detail {

/// What a plan is asked for. The arrays are the caller's.
struct Asked {
  const Layout* layout = nullptr;
  const Sharing* sharing = nullptr;
  Shape shape;
  Shape cut_shape;       ///< of a request: of all KV heads, or of its own
  int32_t max_rows = 0;  ///< of a tile
  SplitPolicy split;
};

class PlanWriter {
 public:
  /// Returns where in `memory` the plan begins.
  int32_t* write(const Asked& asked, const std::vector<Tile>& tiles, Mixture& mixture,
                 Candidate& chosen, const Capacity& capacity, PlanMemory& memory) {
    tiles_ = &tiles;
    mixture_ = &mixture;
    const Layout& layout = *asked.layout;
    const Sharing& sharing = *asked.sharing;
    const Shape& shape = asked.shape;
    const Workers& workers = mixture.workers();
    const DeviceLimits& limits = workers.wide;
    const Cut& cut = chosen.cut;
    runs_.find(layout, sharing, tiles, shape.num_qo_heads / shape.num_kv_heads);
    const int32_t heads = asked.cut_shape.num_kv_heads;
    const PlanSizes need{
        .requests = static_cast<int64_t>(layout.requests.size() + sharing.parts.size()),
        .items = static_cast<int64_t>(cut.chunks.size()) * heads,
        .merges = (cut.split_tiles + static_cast<int64_t>(runs_.runs.size())) * heads,
        .partial_rows = cut.split_rows * heads,
        .kv_indices = static_cast<int64_t>(layout.pages().size()),
        .q_rows = static_cast<int64_t>(runs_.q_rows.size()),
        .merge_parts = static_cast<int64_t>(runs_.parts.size()) * heads};
    sizes_ = need;
    room_ = workers.count();
    if (capacity.fixed()) {
      // Where sections lie must not depend on how blocks were dealt: captured runs know it.
      sizes_ = sizes_for(capacity, shape, mixture.all(), asked.split, layout.page_size);
      room_ = mixture.all().count();
      check_capacity(layout, need, capacity);
    }
    write_header(layout, shape, workers, need, asked.max_rows, memory);
    header().num_wide_items = static_cast<int32_t>(mixture.num_wide_chunks(chosen)) * heads;
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
    int32_t* queue_items = data_ + header().off_queue_items;
    mixture.write_queues(chosen, header().num_wide_items, data_ + header().off_queue_indptr,
                         queue_items);
    for (size_t i = 0; i < place_.size(); ++i) {
      queue_items[i] = place_[static_cast<size_t>(queue_items[i])];
    }
    write_starts();
    if (layout.bounds) write_bounds();
    return data_;
  }

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

  void write_header(const Layout& layout, const Shape& shape, const Workers& workers,
                    const PlanSizes& need, int32_t max_rows, PlanMemory& memory) {
    const DeviceLimits& limits = workers.wide;
    const int64_t words = sizes_.total_words(room_, layout.bounds);
    if (max_of(words, sizes_.partial_rows) > std::numeric_limits<int32_t>::max()) {
      throw Error(ErrorCode::kCapacity, "plan",
                  std::to_string(words) + " words, " + std::to_string(sizes_.partial_rows) +
                      " rows of partial states",
                  "fewer than 2^31; raise fixed_split_size or lower the capacity");
    }
    data_ = memory.next(words);
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
    h.heads_of_item = shape.heads_of_item;
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
    h.off_requests = h.off_starts + 16 * room_;
    h.off_items = h.off_requests + 8 * h.max_requests;
    h.off_queue_indptr = h.off_items + 8 * h.max_items;
    h.off_queue_items = h.off_queue_indptr + room_ + 1;
    h.off_merges = h.off_queue_items + h.max_items;
    h.off_kv_indices = h.off_merges + 8 * h.max_merges;
    if (layout.bounds) {
      h.off_bounds = h.off_kv_indices;
      h.off_kv_indices += i32(sizes_.record_words());
    }
    h.kv_tile = limits.kv_tile;
    h.off_q_rows = h.off_kv_indices + h.max_kv_indices;
    h.off_merge_parts = h.off_q_rows + h.max_q_rows;
    h.max_rows = max_rows;
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
    std::memcpy(data_, &h, sizeof(h));
    copy(h.off_requests, layout.requests.data(), layout.requests.size() * sizeof(Request));
    if (shape.placed) place_requests(layout);
    if (!layout.bounds) {  // whose page ids are written where the plan is read
      copy(h.off_kv_indices, layout.pages().data(), layout.pages().size() * 4);
    }
  }

  void copy(int32_t offset, const void* src, size_t bytes) {
    if (bytes) std::memcpy(data_ + offset, src, bytes);
  }

  /// Requests of a kPlanPlaced plan.
  void place_requests(const Layout& layout) {
    Request* request = reinterpret_cast<Request*>(data_ + header().off_requests);
    for (size_t b = 0; b < layout.requests.size(); ++b) {
      request[b].mask_lo = request[b].q_len;
      request[b].q_len = request[b].kv_len - layout.positions[b];
    }
  }

  static int32_t saturate(int64_t v) {
    return static_cast<int32_t>(min_of<int64_t>(v, std::numeric_limits<int32_t>::max()));
  }

  PlanHeader& header() { return *reinterpret_cast<PlanHeader*>(data_); }

  /// What the scheduler decided, and the loads that follow.
  void write_choice(const Candidate& chosen, const DeviceLimits& limits, int64_t heads) {
    PlanHeader& h = header();
    h.kv_chunk = saturate(chosen.kv_chunk);
    h.max_cost = saturate(mixture_->longest(chosen));
    h.mean_cost = saturate(chosen.cut.cost * heads / h.num_workers);
    h.policy = chosen.policy;
    h.policy_percent = chosen.percent;
    h.cluster_parts = chosen.cluster_parts;
    h.cost_per_split = limits.cost_per_split;
    h.price = saturate(chosen.price);
    h.other_price = saturate(mixture_->other_price());
    h.units_per_us = limits.units_per_us;
  }

  /// The shared parts as requests behind those of the batch, and their rows of q.
  void write_shared(const Layout& layout, const Sharing& sharing) {
    if (sharing.empty()) return;
    Request* request =
        reinterpret_cast<Request*>(data_ + header().off_requests) + layout.requests.size();
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

  static int32_t first_head(const Layout& layout, const Tile& tile) {
    return layout.kv_heads.empty() ? 0 : layout.kv_heads[static_cast<size_t>(tile.request)];
  }

  /// Where the items of write_items lie if that is KV head by KV head. Empty: one after another.
  void place_items(const Layout& layout, const Cut& cut, int32_t heads) {
    place_.clear();
    for (const uint32_t i : cut.order) {
      const Tile& tile = (*tiles_)[static_cast<size_t>(cut.chunks[i].tile)];
      for (int32_t h = 0; h < heads; ++h) place_.push_back(first_head(layout, tile) + h);
    }
    std::vector<int32_t> next(static_cast<size_t>(header().num_kv_heads) + 1, 0);
    for (const int32_t head : place_) ++next[static_cast<size_t>(head) + 1];
    for (size_t h = 1; h < next.size(); ++h) next[h] += next[h - 1];
    for (int32_t& place : place_) place = next[static_cast<size_t>(place)]++;
  }

  static uint64_t pair(int32_t a, int32_t b) { return std::bit_cast<uint64_t>(std::array{a, b}); }

  /// Chunks in cost order, the KV heads of one chunk adjacent: they touch the same pages.
  /// @param heads  of a request: all, or the one that it belongs to
  void write_items(const Layout& layout, const Cut& cut, int32_t heads) {
    WorkItem* items = reinterpret_cast<WorkItem*>(data_ + header().off_items);
    const int32_t* const place = place_.empty() ? nullptr : place_.data();
    int32_t nth = 0;
    const int32_t own_merges = static_cast<int32_t>(cut.split_tiles) * heads;
    for (const uint32_t i : cut.order) {
      const Chunk& c = cut.chunks[i];
      const Tile& tile = (*tiles_)[static_cast<size_t>(c.tile)];
      const Parts& parts = cut.parts[static_cast<size_t>(c.tile)];
      // Its slot and its merge are so many further on for every head.
      int32_t merge = -1, merge_step = 0, merges = 0;
      if (parts.split() && !tile.shares) {
        merge = parts.merge_base;
        merge_step = merges = 1;
      } else if (parts.split()) {
        const RunRange runs = runs_.of_tile(static_cast<size_t>(c.tile));
        merge = own_merges + runs_.merge(0, runs.first);
        merge_step = runs_.merge(1, 0);
        merges = runs.count;
      }
      const int32_t first = first_head(layout, tile);
      const int32_t slot = parts.slot(tile, 0, c.index);
      // In pairs, so that a head is four stores and two sums: none of them carries into the other.
      const auto head_and_count = [](int head, int count) {
        return std::bit_cast<int32_t>(
            std::array{static_cast<int16_t>(head), static_cast<int16_t>(count)});
      };
      const uint64_t begin = pair(tile.request, tile.row_begin), range = pair(c.kv_begin, c.kv_end);
      uint64_t rows = pair(tile.row_count, head_and_count(first, merges));
      uint64_t state = pair(slot, merge);
      const uint64_t next_rows = pair(0, head_and_count(1, 0));
      const uint64_t next_state = pair(parts.slot(tile, 1, c.index) - slot, merge_step);
      for (int32_t head = 0; head < heads; ++head, ++nth) {
        char* const item = reinterpret_cast<char*>(items + (place ? place[nth] : nth));
        std::memcpy(item, &begin, 8);
        std::memcpy(item + 8, &rows, 8);
        std::memcpy(item + 16, &range, 8);
        std::memcpy(item + 24, &state, 8);
        rows += next_rows;
        state += next_state;
      }
    }
  }

  void write_merges(const Layout& layout, const Cut& cut, int32_t heads) {
    Merge* merges = reinterpret_cast<Merge*>(data_ + header().off_merges);
    for (size_t t = 0; cut.split_tiles > 0 && t < tiles_->size(); ++t) {
      const Tile& tile = (*tiles_)[t];
      const Parts& parts = cut.parts[t];
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
    write_run_merges(merges + cut.split_tiles * heads, cut, heads);
  }

  /// Those of the first KV head, and of the others by them: what they name lies all over memory.
  /// 8192 merges of 1024 requests take 11 us less so.
  void write_run_merges(Merge* merges, const Cut& cut, int32_t heads) {
    MergePart* const parts = reinterpret_cast<MergePart*>(data_ + header().off_merge_parts);
    const int32_t num_runs = static_cast<int32_t>(runs_.runs.size());
    const int32_t num_parts = static_cast<int32_t>(runs_.parts.size());
    MergePart* part = parts;
    for (int32_t i = 0; i < num_runs; ++i) {
      const Run& run = runs_.runs[static_cast<size_t>(i)];
      const int32_t begin = static_cast<int32_t>(part - parts);
      int32_t states = 0;
      for (int32_t p = 0; p < run.part_count; ++p) {
        const RunPart& from = runs_.parts[static_cast<size_t>(run.part + p)];
        const Tile& tile = (*tiles_)[static_cast<size_t>(from.tile)];
        const Parts& cut_into = cut.parts[static_cast<size_t>(from.tile)];
        *part++ = {cut_into.slot(tile, 0, 0) + from.row, cut_into.count, tile.row_count, 0};
        states += cut_into.count;
      }
      merges[i] = {run.request, run.row_begin, run.row_count, 0, -1, states, begin, run.part_count};
    }
    for (int32_t head = 1; head < heads; ++head) {
      for (int32_t i = 0; i < num_runs; ++i) {
        Merge& merge = merges[head * num_runs + i] = merges[i];
        merge.kv_head = head;
        merge.part += head * num_parts;
      }
      // Slots of a KV head follow those of the one before.
      for (int32_t p = 0; p < num_parts; ++p) {
        const MergePart& first = parts[p];
        MergePart& other = parts[head * num_parts + p] = first;
        other.slot = first.slot + head * first.count * first.stride;
      }
    }
  }

  void write_starts() {
    WorkerStart* start = reinterpret_cast<WorkerStart*>(data_ + header().off_starts);
    const PlanView plan{data_};
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
      copy(at, data_ + from, static_cast<size_t>(count) * sizeof(Request));
      at += 8 * most;
    };
    keep(h.off_requests, h.num_requests + h.num_shared, h.max_requests);
    keep(h.off_items, h.num_items, h.max_items);
    keep(h.off_merges, h.num_merges, h.max_merges);
  }

  const std::vector<Tile>* tiles_ = nullptr;
  Mixture* mixture_ = nullptr;
  Runs runs_;
  std::vector<int32_t> place_;
  int32_t* data_ = nullptr;
  int32_t room_ = 0;  ///< for workers
  PlanSizes sizes_;
};

}  // namespace flashbsr::detail
