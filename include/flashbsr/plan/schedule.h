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
//   4. give each to the worker with the least accumulated cost                          deal.h
//   5. write it all down                                                               write.h
// Where the limits ask for it, step 2 is one of several ways to cut, and the cheapest is taken
// (candidates.h). The sorted list is also the claim order of backends that hand out items
// dynamically.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include <flashbsr/plan/write.h>

namespace flashbsr {

/// What a plan will be, before it is written.
struct Choice {
  int64_t price = 0;  ///< as the model has it, in units of cost; 0: none
  int64_t num_items = 0;
  int32_t num_workers = 0;
  int32_t max_rows = 0;  ///< of an item
};

class Planner {
 public:
  Planner() = default;
  Planner(const Planner&) = delete;  // what was chosen points into it
  Planner& operator=(const Planner&) = delete;

  /// Plans into memory of its own, which stays as it is until the next call. A steady state
  /// allocates nothing.
  PlanView plan(const Layout& layout, const Shape& shape, const Workers& all = {},
                const SplitPolicy& split = {}, const Capacity& capacity = {},
                const Sharing& sharing = {}) {
    choose(layout, shape, all, split, sharing);
    return write(own_, capacity);
  }

  /// Chooses the cut. `layout` and `sharing` stay as they are until its plan is written.
  Choice choose(const Layout& layout, const Shape& task, const Workers& all,
                const SplitPolicy& split, const Sharing& sharing) {
    const Shape shape = task.with_heads_of_item(all.wide.heads_of_item);
    if (all.wide.num_workers < 1 || all.wide.num_workers >= 1 << 16) {
      throw Error(ErrorCode::kValue, "num_workers", std::to_string(all.wide.num_workers),
                  "a number in [1, 65536)");
    }
    // A request is cut alike for all of its KV heads, or it has but one.
    Shape cut = shape;
    if (!layout.kv_heads.empty()) {
      cut.num_qo_heads /= shape.num_kv_heads;
      cut.num_kv_heads = 1;
    }
    const int32_t max_rows = detail::cut_tiles(layout, sharing, cut, all.wide, tiles_);
    asked_ = {&layout, &sharing, shape, cut, max_rows, split};
    chosen_ = &mixture_.choose(tiles_, cut, all, split);
    return {.price = chosen_->price,
            .num_items = static_cast<int64_t>(chosen_->cut.chunks.size()) * cut.num_kv_heads,
            .num_workers = mixture_.workers().count(),
            .max_rows = max_rows};
  }

  /// Writes the plan of what was chosen.
  PlanView write(PlanMemory& memory, const Capacity& capacity) {
    data_ = writer_.write(asked_, tiles_, mixture_, *chosen_, capacity, memory);
    header_ = view().header();
    return view();
  }

  /// Copies the plan of another, whose shape differs in nothing but a window that hides nothing.
  PlanView take(const Planner& other, int32_t window_left, PlanMemory& memory) {
    header_ = other.header_;
    header_.window_left = window_left;
    data_ = memory.next(header_.total_size);
    std::memcpy(data_, other.data_, other.buffer().size_bytes());
    std::memcpy(data_, &header_, sizeof(header_));
    return view();
  }

  /// The plan written last.
  PlanView view() const { return PlanView{data_}; }
  std::span<const int32_t> buffer() const {
    return {data_, data_ ? static_cast<size_t>(header_.total_size) : 0};
  }

 private:
  detail::Asked asked_;  ///< of the last choice
  std::vector<detail::Tile> tiles_;
  detail::Mixture mixture_;
  detail::Candidate* chosen_ = nullptr;  ///< in mixture_

  detail::PlanWriter writer_;
  HeapPlanMemory own_;
  int32_t* data_ = nullptr;
  PlanHeader header_{};
};

}  // namespace flashbsr
