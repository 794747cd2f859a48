// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Step 4 of the scheduler: items, most expensive first, each to the worker with the least
// accumulated cost, ties to the lowest worker.
//
// Equal items come in runs, the KV heads of a chunk at least, so what is kept are runs of
// neighbouring workers that carry the same load: a run of 8 items over 132 workers is one step or
// two. They are kept in order of their loads. Costs fall, and loads differ by no more than the last
// few of them, so a worker that was given an item mostly goes to the end: 4096 decodes take 22 us,
// by a heap 180.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include <flashbsr/core/math.h>
#include <flashbsr/core/plan.h>
#include <flashbsr/plan/added.h>

namespace flashbsr::detail {

class Deal {
 public:
  /// Items [item, item + count) go to the workers [worker, worker + count), one each.
  struct Segment {
    int32_t item, worker, count;
    int32_t round;  ///< items that each of them has already
    bool split;
  };

  std::vector<Segment> segments;  ///< in item order

  void start(int32_t workers) {
    runs_.resize(1 + kRoom * static_cast<size_t>(workers));
    runs_[0] = {-1, 0, 0};  // below all others
    runs_[1] = {0, workers, 0};
    begin_ = 1;
    end_ = 2;
    num_workers_ = workers;
    segments.clear();
    next_item_ = 0;
    any_split_ = false;
  }

  /// The next `count` items, of `cost` > 0 each, no more than those before.
  void give(int64_t cost, int64_t count, bool split) {
    while (count > 0) {
      if (count <= runs_[begin_].workers) return insert(take(cost, count, split));
      // Runs that were given an item wait until all of them are, or one of them is the least: what
      // they go past moves once. 4096 decodes have eight runs at a time, and take 19 us less.
      given_.clear();
      do {
        added(given_) = take(cost, count, split);
        count -= given_.back().workers;
      } while (count > 0 && begin_ < end_ && runs_[begin_].key < given_[0].key);
      insert_given();
    }
  }

  /// Cost of the longest queue.
  int64_t longest() const { return runs_[end_ - 1].load(); }

  /// How long all queues take if what costs 1024 takes pace(n) while n workers are busy.
  template <class Pace>
  int64_t time(const Pace& pace) const {
    int64_t time = 0, before = 0;
    int32_t busy = num_workers_;
    for (const Run* run = first(); run != last(); ++run) {
      const int64_t end = run->load();
      if (end > before) time += (end - before) * pace(busy);
      before = end;
      busy -= run->workers;
    }
    return time / 1024;
  }

  /// Writes the queues. With `splits_first` a queue begins with its parts of split tiles, so that
  /// merges happen while other workers still stream.
  void write_queues(bool splits_first, int32_t* indptr, int32_t* items) {
    const int32_t workers = num_workers_;
    for (const Run* run = first(); run != last(); ++run) {
      std::fill_n(indptr + run->first() + 1, run->workers, run->items);
    }
    indptr[0] = 0;
    for (int32_t w = 0; w < workers; ++w) indptr[w + 1] += indptr[w];
    const int32_t count = indptr[workers];
    int32_t rounds = 0;
    for (int32_t w = 0; w < workers; ++w) rounds = max_of(rounds, indptr[w + 1] - indptr[w]);
    // Few workers may have most items, while others have one that takes as long.
    const bool dense = int64_t{rounds} * workers <= kSparse * int64_t{count};
    splits_first = splits_first && any_split_;
    if (dense && !splits_first) return write_rounds(rounds, indptr, items);
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
  // A key is load << 16 | lowest worker: one comparison, and equal loads go to the lowest worker.
  static constexpr int kWorkerBits = 16;

  /// Neighbouring workers with equal loads.
  struct Run {
    int64_t key;
    int32_t workers, items;  ///< how many, and of each

    int32_t first() const { return static_cast<int32_t>(key & ((1 << kWorkerBits) - 1)); }
    int64_t load() const { return key >> kWorkerBits; }
  };

  // Queues of 1024 items are 4 KB apart, so all their ends fall into one set of the first cache:
  // with a line between them a plan of 4096 decodes, 32 such queues, takes 340 us instead of 490.
  static constexpr int32_t kCacheLine = 16;  // items
  static constexpr int32_t kLongQueue = 128;
  static constexpr int64_t kSparse = 4;  // places of a table of rounds, times the items in it

  /// Queues in the order of items: a segment is a run of one round, and has a column of a table
  /// whose lines are sixteen rounds of a queue, which are copied as they are. 4096 decodes of 8 KV
  /// heads take 25 us so, and 56 where rounds are rows of a table (Xeon); 1024 take 5 and 14.
  void write_rounds(int32_t rounds, const int32_t* indptr, int32_t* items) {
    constexpr int32_t kLine = 16;  // items
    const int32_t workers = num_workers_;
    const auto line = [&](int32_t round, int32_t worker) {
      return (static_cast<ptrdiff_t>(round / kLine) * workers + worker) * kLine;
    };
    rounds_.resize(static_cast<size_t>(line(rounds + kLine - 1, 0)));
    for (const Segment& s : segments) {
      int32_t* to = rounds_.data() + line(s.round, s.worker) + s.round % kLine;
      for (int32_t i = 0; i < s.count; ++i, to += kLine) *to = s.item + i;
    }
    for (int32_t w = 0; w < workers; ++w) {
      const int32_t length = indptr[w + 1] - indptr[w];
      int32_t* const queue = items + indptr[w];
      int32_t r = 0;
      for (; r + kLine <= length; r += kLine) {
        std::memcpy(queue + r, rounds_.data() + line(r, w), 4 * kLine);
      }
      std::copy_n(rounds_.data() + line(r, w), length - r, queue + r);
    }
  }

  void put_all(bool splits_first, int32_t* items) {
    for (const Segment& s : segments) {
      if (s.split || !splits_first) put(s, items);
    }
    for (const Segment& s : segments) {
      if (!s.split && splits_first) put(s, items);
    }
  }

  void put(const Segment& s, int32_t* items) {
    int32_t* next = next_.data() + s.worker;
    for (int32_t i = 0; i < s.count; ++i) items[next[i]++] = s.item + i;
  }

  const Run* first() const { return runs_.data() + begin_; }
  const Run* last() const { return runs_.data() + end_; }

  /// One item to each of the least run's first workers, at most `count`, which leave it.
  Run take(int64_t cost, int64_t count, bool split) {
    Run& least = runs_[begin_];
    const int32_t taken = static_cast<int32_t>(min_of<int64_t>(count, least.workers));
    const Run given{least.key + (cost << kWorkerBits), taken, least.items + 1};
    added(segments) = {static_cast<int32_t>(next_item_), least.first(), taken, least.items, split};
    any_split_ = any_split_ || split;
    next_item_ += taken;
    if (taken == least.workers) {
      ++begin_;
    } else {
      // The rest of the run keeps its load, and is the least still.
      least.key += taken;
      least.workers -= taken;
    }
    return given;
  }

  void make_room(size_t count) {
    if (end_ + count <= runs_.size()) return;
    std::copy(first(), last(), runs_.data() + 1);
    end_ -= begin_ - 1;
    begin_ = 1;
  }

  // Before the first run there is always one below all others: it was taken from there, or is
  // runs_[0].
  void insert(const Run& run) {
    make_room(1);
    Run* place = runs_.data() + end_++;
    for (; run.key < place[-1].key; --place) *place = place[-1];
    *place = run;
  }

  /// The runs in `given_`, which are in order.
  void insert_given() {
    std::ptrdiff_t left = static_cast<ptrdiff_t>(given_.size());
    make_room(given_.size());
    end_ += given_.size();
    for (Run* place = runs_.data() + end_ - 1; left > 0; --left, --place) {
      const Run& run = given_[static_cast<size_t>(left) - 1];
      for (; run.key < place[-left].key; --place) *place = place[-left];
      *place = run;
    }
  }

  static constexpr size_t kRoom = 4;  // times as many runs as there can be: the queue moves on

  std::vector<Run> runs_;   ///< begin_ to end_, by keys
  std::vector<Run> given_;  ///< of the items at hand
  size_t begin_ = 0, end_ = 0;
  int32_t num_workers_ = 0;
  std::vector<int32_t> next_, apart_;  ///< next place of each queue; queues with gaps
  std::vector<int32_t> rounds_;        ///< items by rounds and workers
  int64_t next_item_ = 0;
  bool any_split_ = false;
};

}  // namespace flashbsr::detail
