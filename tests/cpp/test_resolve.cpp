// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Plans of bounds that meet their lengths: every element is written, by however many threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include <flashbsr/core/resolve.h>
#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr {
namespace {

constexpr int32_t kPageSize = 16, kTablePages = 300, kPoison = 0x5a5a5a5a;

/// A plan of bounds, and lengths for it.
struct Bound {
  Layout layout;
  Planner planner;
  std::vector<int32_t> bounds, lens, tables;

  explicit Bound(std::vector<int32_t> most) : bounds(std::move(most)) {
    std::mt19937 random(7);
    for (const int32_t bound : bounds) lens.push_back(bound ? bound - bound / 3 : 0);
    tables.resize(bounds.size() * kTablePages);
    for (int32_t& page : tables) page = static_cast<int32_t>(random() % 100000);
    bounds_layout(layout, nullptr, IndexView(bounds), kPageSize, 0, 0);
    planner.plan(layout, {.num_qo_heads = 32, .num_kv_heads = 8}, gpu_decode_limits({}));
  }

  Lengths lengths() const {
    const auto indices = [](const std::vector<int32_t>& x) {
      return Indices{x.data(), static_cast<int64_t>(x.size()), false};
    };
    Lengths now;
    now.kv_lens = indices(lens);
    now.pages = indices(tables);
    now.row = kTablePages;
    return now;
  }

  /// What `threads` threads make of it, the last one first.
  std::vector<int32_t> resolved(int64_t threads) {
    const std::span<const int32_t> written = planner.buffer();
    std::vector<int32_t> plan(written.begin(), written.end());
    const PlanHeader h = planner.view().header();
    // What they write, poisoned.
    const auto poison = [&](int32_t from, int32_t words) {
      std::fill_n(plan.begin() + from, words, kPoison);
    };
    poison(h.off_requests, 8 * h.num_requests);
    poison(h.off_items, 8 * h.num_items);
    poison(h.off_merges, 8 * h.num_merges);
    poison(h.off_kv_indices, h.num_kv_indices);
    for (int64_t i = threads - 1; i >= 0; --i)
      BoundPlan(plan.data()).resolve(lengths(), i, threads);
    return plan;
  }
};

TEST(Resolve, AnyNumberOfThreadsWritesTheSame) {
  const std::vector<std::vector<int32_t>> batches = {
      std::vector<int32_t>(4, 4000), {4096, 0, 77, 1}, std::vector<int32_t>(40, 900), {0}, {16}};
  for (const std::vector<int32_t>& batch : batches) {
    Bound bound(batch);
    const std::vector<int32_t> one = bound.resolved(1);
    const PlanHeader h = PlanView{one.data()}.header();
    for (const int64_t threads : {2, 3, 7, 64, 255, 1000, 100000}) {
      EXPECT_EQ(bound.resolved(threads), one) << batch.size() << " requests, " << threads;
    }
    EXPECT_EQ(std::count(one.begin() + h.off_requests,
                         one.begin() + h.off_requests + 8 * h.num_requests, kPoison),
              0);
    int64_t tokens = 0;
    for (int32_t i = 0; i < h.num_items; ++i) {
      const WorkItem& item = PlanView{one.data()}.items()[i];
      tokens += item.kv_end - item.kv_begin;
    }
    int64_t expected = 0;
    for (size_t b = 0; b < batch.size(); ++b) {
      const Request& r = PlanView{one.data()}.requests()[b];
      EXPECT_EQ(r.kv_len, bound.lens[b]);
      expected += 8 * bound.lens[b];
      for (int32_t page = 0; page * kPageSize < r.kv_len; ++page) {
        EXPECT_EQ(PlanView{one.data()}.kv_indices()[r.kv_begin + page],
                  bound.tables[b * kTablePages + static_cast<size_t>(page)]);
      }
    }
    EXPECT_EQ(tokens, expected);
  }
}

}  // namespace
}  // namespace flashbsr
