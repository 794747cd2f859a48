// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A plan of bounds meets the lengths. The scheduler cut the work as if every request were as long
// as its bound and left a copy of what it wrote (PlanHeader::off_bounds). Here requests, items and
// page ids are written anew for the lengths that there are: the same items on the same workers,
// each with its share of the keys that are left. Kernels, variants and merges know nothing of it.
//
// Nothing depends on the contents of before, and no two elements on each other, so that a grid
// writes them in any order, again and again: an update costs one small launch for all layers. What
// it takes there is a chain of loads, so a thread has one element, not one of each section.
#pragma once

#include <flashbsr/core/lengths.h>
#include <flashbsr/core/math.h>

namespace flashbsr {

/// The sections of a plan of bounds.
class BoundPlan {
 public:
  FLASHBSR_FN explicit BoundPlan(int32_t* plan)
      : plan_(plan), h_(*reinterpret_cast<const PlanHeader*>(plan)) {}

  FLASHBSR_FN const PlanHeader& header() const { return h_; }
  FLASHBSR_FN bool bound() const { return h_.off_bounds != 0; }

  // As they were planned.
  FLASHBSR_FN const Request& request(int32_t i) const { return section<Request>(h_.off_bounds)[i]; }
  FLASHBSR_FN const WorkItem& item(int32_t i) const {
    return section<WorkItem>(h_.off_bounds + 8 * h_.max_requests)[i];
  }
  FLASHBSR_FN const Merge& merge(int32_t i) const {
    return section<Merge>(h_.off_bounds + 8 * (h_.max_requests + h_.max_items))[i];
  }

  /// Writes the elements first, first + step, ... of all sections, one behind the other; the plan
  /// is complete when all have been written. Page ids beyond a request's length become 0, which is
  /// a page.
  FLASHBSR_FN void resolve(const Lengths& now, int64_t first, int64_t step) const {
    if (first == 0) {
      int32_t& tokens = reinterpret_cast<PlanHeader*>(plan_)->num_q_tokens_now;
      tokens = h_.num_q_tokens;
      if (now.qo_indptr.given()) {
        tokens = clamp(now.qo_indptr[now.qo_indptr.size - 1], 0, h_.num_q_tokens);
      }
    }
    uint32_t before = 0;
    for (int64_t i = first; i < h_.num_requests; i += step) {
      section<Request>(h_.off_requests)[i] = request_now(static_cast<int32_t>(i), now);
    }
    before += static_cast<uint32_t>(h_.num_requests);
    for (int64_t i = behind(before, first, step); i < h_.num_items; i += step) {
      const int32_t request = item(static_cast<int32_t>(i)).request;
      section<WorkItem>(h_.off_items)[i] =
          item_now(static_cast<int32_t>(i), request_now(request, now));
    }
    before += static_cast<uint32_t>(h_.num_items);
    for (int64_t w = behind(before, first, step); w < h_.num_workers; w += step) {
      start(static_cast<int32_t>(w), now);
    }
    before += static_cast<uint32_t>(h_.num_workers);
    // Without qo_indptr, too: the lengths before these may have had fewer rows.
    for (int64_t i = behind(before, first, step); i < h_.num_merges; i += step) {
      Merge m = merge(static_cast<int32_t>(i));
      m.row_count = rows_now(m.row_begin, m.row_count, request_now(m.request, now));
      section<Merge>(h_.off_merges)[i] = m;
    }
    before += static_cast<uint32_t>(h_.num_merges);
    PageRun run;
    for (int64_t i = behind(before, first, step); i < h_.num_kv_indices; i += step) {
      // Searched for where a request ends: for each of 8192 ids it took 80 us on a CPU.
      if (i >= run.end) run = run_at(i, now);
      section<int32_t>(h_.off_kv_indices)[i] = page(i, run, now);
    }
  }

 private:
  /// The first element of a section behind `before` others, of who has `first` of all.
  FLASHBSR_FN static int64_t behind(uint32_t before, int64_t first, int64_t step) {
    const int64_t taken = before % static_cast<uint32_t>(step);
    return first >= taken ? first - taken : first - taken + step;
  }

  template <class T>
  FLASHBSR_FN T* section(int32_t offset) const {
    return reinterpret_cast<T*>(plan_ + offset);
  }

  FLASHBSR_FN static int32_t clamp(int64_t value, int32_t low, int32_t high) {
    return static_cast<int32_t>(max_of<int64_t>(min_of<int64_t>(value, high), low));
  }

  /// What all requests begin with stays as it was planned.
  FLASHBSR_FN Request request_now(int32_t i, const Lengths& now) const {
    Request r = request(i);
    if (r.shared()) return r;
    // The bits of a tree stay with the tokens that they speak of, the last ones.
    const int32_t masked = r.kv_len - r.mask_begin;
    r.kv_len = clamp(now.kv_lens[i], 0, r.kv_len);
    if (r.mask_begin > 0) r.mask_begin = max_of(r.kv_len - masked, 0);
    int32_t tokens = counted(h_, r).q_len;
    if (now.qo_indptr.given()) {
      // Of requests per KV head, all heads of one have its queries.
      const int32_t q = h_.flags & kPlanPerHead ? i / h_.num_kv_heads : i;
      r.q_begin = clamp(now.qo_indptr[q], 0, h_.num_q_tokens);
      tokens =
          clamp(now.qo_indptr[q + 1] - r.q_begin, 0, min_of(tokens, h_.num_q_tokens - r.q_begin));
    }
    r.q_len = tokens;
    if (h_.flags & kPlanPlaced) {
      r.mask_lo = tokens;
      const int32_t end = h_.end_position > 0 ? h_.end_position : kFarthest;
      r.q_len = r.kv_len - clamp(now.q_positions[i], -end, end - tokens);
    }
    return r;
  }
  static constexpr int32_t kFarthest = 1 << 30;  ///< position that may be asked for

  FLASHBSR_FN int32_t rows_now(int32_t begin, int32_t count, const Request& r) const {
    return clamp(int64_t{counted(h_, r).q_len} * h_.group_size - begin, 0, count);
  }

  /// KV positions that some of the rows see, of a request's own. Spans only move right from token
  /// to token.
  FLASHBSR_FN Span rows_span(const Request& r, int32_t begin, int32_t count) const {
    if (count == 0) return {0, 0};
    const Span a = visible_keys(h_, r, begin / h_.group_size);
    const Span z = visible_keys(h_, r, (begin + count - 1) / h_.group_size);
    return {min_of(max_of(a.begin, h_.common_prefix), z.end), z.end};
  }

  /// Where a cut of a tile comes to lie when its positions do: as far along as it was, in whole KV
  /// tiles, so that a tile's parts stay alike and its workers end together. Fixed splits stay where
  /// they are: they promise a request its bits whatever the bounds were.
  FLASHBSR_FN int32_t moved(int32_t cut, Span from, Span to) const {
    if (h_.policy == kPolicyFixed) return clamp(cut, to.begin, to.end);
    // In float, since an integer division of 64 bits is a call on a GPU. Every step is monotonic.
    return along(static_cast<float>(cut - from.begin) / static_cast<float>(from.end - from.begin),
                 to);
  }

  FLASHBSR_FN int32_t along(float share, Span to) const {
    const float tiles =
        share * static_cast<float>(to.end - to.begin) / static_cast<float>(h_.kv_tile);
    const int64_t way = static_cast<int64_t>(tiles + 0.5f) * h_.kv_tile;
    return clamp(to.begin + way, to.begin, to.end);
  }

  /// The keys of part i of a tile that was to see none, and has no cuts to go by: more queries than
  /// keys were planned, or others. Only clusters have several parts of such a tile.
  FLASHBSR_FN Span part_of(int32_t i, Span to) const {
    const int32_t parts = max_of(h_.cluster_parts, 1), part = i % parts;
    const float of = 1.0f / static_cast<float>(parts);
    return {part == 0 ? to.begin : along(static_cast<float>(part) * of, to),
            part == parts - 1 ? to.end : along(static_cast<float>(part + 1) * of, to)};
  }

  FLASHBSR_FN WorkItem item_now(int32_t i, const Request& r) const {
    WorkItem w = item(i);
    if (r.shared()) return w;
    const Span from = rows_span(request(w.request), w.row_begin, w.row_count);
    const int32_t rows = rows_now(w.row_begin, w.row_count, r);
    const Span to = rows_span(r, w.row_begin, rows);
    if (rows != w.row_count && w.slot >= 0) {
      const int32_t first = merge(w.merge).slot;
      w.slot = first + (w.slot - first) / w.row_count * rows;
    }
    w.row_count = rows;
    if (from.begin >= from.end) {
      const Span part = part_of(i, to);
      w.kv_begin = part.begin;
      w.kv_end = part.end;
      return w;
    }
    w.kv_begin = w.kv_begin <= from.begin ? to.begin
                 : w.kv_begin >= from.end ? to.end
                                          : moved(w.kv_begin, from, to);
    w.kv_end = w.kv_end >= from.end ? to.end : moved(w.kv_end, from, to);
    return w;
  }

  FLASHBSR_FN void start(int32_t worker, const Lengths& now) const {
    const int32_t* queue = section<int32_t>(h_.off_queue_indptr) + worker;
    if (queue[0] == queue[1]) return;
    const int32_t i = section<int32_t>(h_.off_queue_items)[queue[0]];
    WorkerStart& s = section<WorkerStart>(h_.off_starts)[worker];
    s.request = request_now(item(i).request, now);
    s.item = item_now(i, s.request);
  }

  /// Where a request has its page ids in the plan's list, and in the caller's.
  struct PageRun {
    int64_t begin = 0, end = 0;
    int64_t pages = 0;  ///< that it has now
    int64_t row = 0;    ///< place of the first one
  };

  /// Of the request that place `at` belongs to. Requests have their pages one after another.
  FLASHBSR_FN PageRun run_at(int64_t at, const Lengths& now) const {
    int32_t low = 0, high = h_.num_requests;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      (request(middle).kv_begin <= at ? low : high) = middle;
    }
    PageRun run;
    run.begin = request(low).kv_begin;
    run.end = high < h_.num_requests ? request(high).kv_begin : h_.num_kv_indices;
    const int32_t length = request_now(low, now).kv_len;
    run.pages = length == 0 ? 0 : (length - 1) / h_.page_size + 1;
    run.row = now.kv_indptr.given() ? now.kv_indptr[low] : low * now.row;
    return run;
  }

  FLASHBSR_FN static int32_t page(int64_t at, const PageRun& run, const Lengths& now) {
    const int64_t nth = at - run.begin;
    if (nth >= run.pages || run.row + nth >= now.pages.size) return 0;
    return static_cast<int32_t>(now.pages[run.row + nth]);
  }

  int32_t* plan_;
  PlanHeader h_;  ///< a copy, which stores to the plan leave in registers
};

}  // namespace flashbsr
