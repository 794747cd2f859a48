// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Step 4 of the scheduler: items, most expensive first, each to the worker with the least
// accumulated cost, ties to the lowest worker.
//
// Equal items come in runs, the KV heads of a chunk at least, so the heap holds runs of
// neighbouring workers that carry the same load instead of single workers: a run of 8 items over
// 132 workers is two steps of the heap, not eight. The result is the same.
#pragma once

#include <algorithm>
#include <vector>

#include <flashbsr/core/math.h>
#include <flashbsr/core/plan.h>

namespace flashbsr::detail {

class Deal {
 public:
  /// Items [item, item + count) go to the workers [worker, worker + count), one each.
  struct Segment {
    int32_t item, worker, count;
    bool split;
  };

  std::vector<Segment> segments;  ///< in item order

  void start(int32_t workers) {
    runs_.resize(static_cast<size_t>(workers));
    runs_[0] = {workers, 0};
    heap_.assign(1, 0);
    segments.clear();
    next_item_ = 0;
  }

  /// The next `count` items, of `cost` > 0 each.
  void give(int64_t cost, int64_t count, bool split) {
    while (count > 0) {
      const int64_t top = heap_[0];
      const int32_t worker = static_cast<int32_t>(top & kWorkerMask);
      const Run run = runs_[static_cast<size_t>(worker)];
      const int32_t taken = static_cast<int32_t>(min_of<int64_t>(count, run.workers));
      runs_[static_cast<size_t>(worker)] = {taken, run.items + 1};
      if (taken == run.workers) {
        sink(top + (cost << kWorkerBits));
      } else {
        // The rest of the run keeps its load.
        runs_[static_cast<size_t>(worker + taken)] = {run.workers - taken, run.items};
        sink(top + taken);
        push(top + (cost << kWorkerBits));
      }
      segments.push_back({static_cast<int32_t>(next_item_), worker, taken, split});
      next_item_ += taken;
      count -= taken;
    }
  }

  /// Cost of the longest queue.
  int64_t longest() const {
    int64_t most = 0;
    for (const int64_t key : heap_) most = max_of(most, key >> kWorkerBits);
    return most;
  }

  /// How long all queues take if what costs 1024 takes pace(n) while n workers are busy.
  template <class Pace>
  int64_t time(const Pace& pace) {
    ends_ = heap_;
    std::sort(ends_.begin(), ends_.end());
    int64_t time = 0, before = 0;
    int32_t busy = static_cast<int32_t>(runs_.size());
    for (const int64_t key : ends_) {
      const int64_t end = key >> kWorkerBits;
      if (end > before) time += (end - before) * pace(busy);
      before = end;
      busy -= runs_[static_cast<size_t>(key & kWorkerMask)].workers;
    }
    return time / 1024;
  }

  /// Writes the queues. With `splits_first` a queue begins with its parts of split tiles, so that
  /// merges happen while other workers still stream.
  void write_queues(bool splits_first, int32_t* indptr, int32_t* items) {
    const int32_t workers = static_cast<int32_t>(runs_.size());
    for (const int64_t key : heap_) {
      const int32_t worker = static_cast<int32_t>(key & kWorkerMask);
      const Run& run = runs_[static_cast<size_t>(worker)];
      std::fill_n(indptr + worker + 1, run.workers, run.items);
    }
    indptr[0] = 0;
    for (int32_t w = 0; w < workers; ++w) indptr[w + 1] += indptr[w];
    const int32_t count = indptr[workers];
    const int32_t gap = count / workers < kLongQueue ? 0 : kCacheLine;
    next_.resize(static_cast<size_t>(workers));
    for (int32_t w = 0; w < workers; ++w) next_[static_cast<size_t>(w)] = indptr[w] + w * gap;
    if (gap) apart_.resize(static_cast<size_t>(count + workers * gap));
    put_all(splits_first, gap ? apart_.data() : items);
    for (int32_t w = 0; gap && w < workers; ++w) {
      std::copy_n(apart_.data() + indptr[w] + w * gap, indptr[w + 1] - indptr[w],
                  items + indptr[w]);
    }
  }

 private:
  /// Neighbouring workers with equal loads, under the lowest of them.
  struct Run {
    int32_t workers, items;
  };

  // A key is cost << 16 | lowest worker: one comparison, and equal costs go to the lowest worker.
  static constexpr int kWorkerBits = 16;
  static constexpr int64_t kWorkerMask = (1 << kWorkerBits) - 1;

  // Queues of 1024 items are 4 KB apart, so all their ends fall into one set of the first cache:
  // with a line between them a plan of 4096 decodes, 32 such queues, takes 340 us instead of 490.
  static constexpr int32_t kCacheLine = 16;  // items
  static constexpr int32_t kLongQueue = 128;

  void put_all(bool splits_first, int32_t* items) {
    if (splits_first) {
      for (const Segment& s : segments) {
        if (s.split) put(s, items);
      }
    }
    for (const Segment& s : segments) {
      if (!(splits_first && s.split)) put(s, items);
    }
  }

  void put(const Segment& s, int32_t* items) {
    int32_t* next = next_.data() + s.worker;
    for (int32_t i = 0; i < s.count; ++i) items[next[i]++] = s.item + i;
  }

  /// Replaces the root by `key`, which is not less, and sinks it to its place.
  void sink(int64_t key) {
    const size_t n = heap_.size();
    size_t at = 0;
    for (size_t child = 1; child < n; child = 2 * at + 1) {
      child += child + 1 < n && heap_[child + 1] < heap_[child];
      if (key < heap_[child]) break;
      heap_[at] = heap_[child];
      at = child;
    }
    heap_[at] = key;
  }

  void push(int64_t key) {
    size_t at = heap_.size();
    heap_.push_back(key);
    while (at > 0 && key < heap_[(at - 1) / 2]) {
      heap_[at] = heap_[(at - 1) / 2];
      at = (at - 1) / 2;
    }
    heap_[at] = key;
  }

  std::vector<int64_t> heap_, ends_;
  std::vector<Run> runs_;              ///< by lowest worker
  std::vector<int32_t> next_, apart_;  ///< next place of each queue; queues with gaps
  int64_t next_item_ = 0;
};

}  // namespace flashbsr::detail
