// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The scheduler's promises over many random batches: every visible (row, KV position) in exactly
// one item, no queue above the greedy bound, capacity never overrun, equal input gives an equal
// plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include <flashbsr/plan/bsr.h>
#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr {
namespace {

struct Problem {
  Layout layout;
  Shape shape;
  DeviceLimits limits;
  SplitPolicy split;
};

Problem random_problem(uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](std::initializer_list<int> values) {
    return *(values.begin() + random() % values.size());
  };
  Problem p;
  const int batch = pick({0, 1, 2, 7, 40});
  const int longest = pick({1, 70, 1000, 20000}), most_queries = pick({1, 1, 9, 300});
  p.shape.num_kv_heads = pick({1, 2, 8});
  p.shape.num_qo_heads = p.shape.num_kv_heads * pick({1, 3, 4, 8});
  p.shape.causal = random() % 2 == 0;
  p.shape.window_left = pick({-1, -1, 0, 100});
  p.limits.num_workers = pick({1, 2, 32, 132});
  p.limits.tile_rows = pick({1, 16, 128});
  p.limits.min_chunk = pick({64, 512});
  if (seed % 3 == 0) {  // a GPU's decode kernel: several cuts are priced
    p.limits = gpu_decode_limits({.sms = p.limits.num_workers,
                                  .rows = pick({8, 16}),
                                  .kv_tile = pick({16, 32}),
                                  .bytes_per_token = pick({64, 512})});
  }
  if (seed % 3 == 1) {  // Hopper's: claimed request by request
    p.limits = gpu_hopper_limits({.sms = p.limits.num_workers,
                                  .rows = pick({128, 190, 192}),
                                  .kv_tile = pick({80, 128}),
                                  .bytes_per_token = pick({64, 512})});
  }
  p.split.fixed_size = pick({0, 0, 0, 64, 100});
  p.split.disabled = random() % 5 == 0;
  std::vector<int32_t> qo{0}, kv{0};
  for (int b = 0; b < batch; ++b) {
    // A skewed batch: most requests short, a few long, some empty.
    const int shift = random() % 8;
    qo.push_back(qo.back() + static_cast<int>(random() % (most_queries + 1)));
    kv.push_back(kv.back() + (static_cast<int>(random() % (longest + 1)) >> shift));
  }
  const IndexView qo_view(qo);
  ragged_layout(p.layout, &qo_view, IndexView(kv));
  if (seed % 4 == 2) {  // a request belongs to one KV head
    for (int b = 0; b < batch; ++b) p.layout.kv_heads.push_back(random() % p.shape.num_kv_heads);
  }
  return p;
}

class Schedule : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    problem_ = random_problem(GetParam());
    plan_ = planner_.plan(problem_.layout, problem_.shape, problem_.limits, problem_.split);
  }

  int64_t cost(const WorkItem& item) const {
    const DeviceLimits& l = problem_.limits;
    return l.cost_per_item +
           static_cast<int64_t>(item.kv_end - item.kv_begin) *
               (l.cost_per_kv +
                l.cost_per_kv_row * ceil_div(item.row_count, 1 << l.cost_row_shift)) +
           (item.slot >= 0 ? l.cost_per_split : 0);
  }

  /// Items before those that are claimed last, whatever their request (Cut::count_last).
  int32_t grouped_items() const {
    const PlanHeader& h = plan_.header();
    const int32_t heads = problem_.layout.kv_heads.empty() ? h.num_kv_heads : 1;
    const int32_t chunks = h.num_items / heads, round = ceil_div(h.num_workers, heads);
    if (h.num_slots > 0 || chunks <= problem_.limits.tail_rounds * round) return h.num_items;
    return h.num_items - heads * std::min(6 * round, chunks / 4);
  }

  Problem problem_;
  Planner planner_;
  PlanView plan_{};
};

TEST_P(Schedule, EveryVisiblePositionIsInExactlyOneItem) {
  const PlanHeader& h = plan_.header();
  // (request, kv head, packed row) -> KV ranges.
  std::vector<std::vector<std::vector<Span>>> ranges(problem_.layout.requests.size());
  for (size_t b = 0; b < ranges.size(); ++b) {
    ranges[b].resize(static_cast<size_t>(problem_.layout.requests[b].q_len) * h.group_size *
                     h.num_kv_heads);
  }
  for (int32_t i = 0; i < h.num_items; ++i) {
    const WorkItem& item = plan_.items()[i];
    ASSERT_LE(item.row_count, h.tile_rows);
    ASSERT_GT(item.row_count, 0);
    ASSERT_LE(item.kv_begin, item.kv_end);
    for (int32_t r = 0; r < item.row_count; ++r) {
      const size_t row = static_cast<size_t>(item.row_begin + r) * h.num_kv_heads + item.kv_head;
      ASSERT_LT(row, ranges[item.request].size());
      ranges[item.request][row].push_back({item.kv_begin, item.kv_end});
    }
  }
  for (size_t b = 0; b < ranges.size(); ++b) {
    for (size_t row = 0; row < ranges[b].size(); ++row) {
      auto& spans = ranges[b][row];
      const std::vector<int32_t>& heads = problem_.layout.kv_heads;
      if (!heads.empty() && static_cast<int32_t>(row) % h.num_kv_heads != heads[b]) {
        ASSERT_TRUE(spans.empty());
        continue;
      }
      // Even a row that sees nothing has an item: somebody must write its zeros.
      ASSERT_FALSE(spans.empty());
      std::sort(spans.begin(), spans.end(), [](Span x, Span y) { return x.begin < y.begin; });
      for (size_t i = 0; i + 1 < spans.size(); ++i) ASSERT_EQ(spans[i].end, spans[i + 1].begin);
      const int32_t token = static_cast<int32_t>(row) / h.num_kv_heads / h.group_size;
      const Span visible = visible_keys(h, plan_.requests()[b], token);
      if (visible.begin == visible.end) continue;
      ASSERT_LE(spans.front().begin, visible.begin);
      ASSERT_GE(spans.back().end, visible.end);
    }
  }
}

TEST_P(Schedule, MergesNameTheirItemsInKvOrder) {
  const PlanHeader& h = plan_.header();
  std::vector<const WorkItem*> of_slot(h.num_partial_rows, nullptr);
  for (int32_t i = 0; i < h.num_items; ++i) {
    const WorkItem& item = plan_.items()[i];
    ASSERT_EQ(item.slot < 0, item.merge < 0);
    if (item.slot < 0) continue;
    ASSERT_LE(item.slot + item.row_count, h.num_partial_rows);
    ASSERT_EQ(item.merge_count, 1);
    ASSERT_LT(item.merge, h.num_merges);
    ASSERT_EQ(of_slot[item.slot], nullptr) << "two items share a slot";
    of_slot[item.slot] = &item;
  }
  std::set<int32_t> seen;
  for (int32_t m = 0; m < h.num_merges; ++m) {
    const Merge& merge = plan_.merges()[m];
    ASSERT_GT(merge.state_count, 1);
    ASSERT_LT(merge.part, 0);
    for (int32_t i = 0; i < merge.state_count; ++i) {
      const int32_t s = merge.slot + i * merge.row_count;
      ASSERT_TRUE(s >= 0 && s < h.num_partial_rows && seen.insert(s).second);
      const WorkItem* item = of_slot[s];
      ASSERT_NE(item, nullptr);
      EXPECT_EQ(item->merge, m);
      EXPECT_EQ(item->request, merge.request);
      EXPECT_EQ(item->row_begin, merge.row_begin);
      EXPECT_EQ(item->row_count, merge.row_count);
      EXPECT_EQ(item->kv_head, merge.kv_head);
      if (i > 0) {
        EXPECT_EQ(of_slot[s - merge.row_count]->kv_end, item->kv_begin);
      }
    }
  }
  EXPECT_EQ(static_cast<int32_t>(seen.size()), h.num_slots);
}

TEST_P(Schedule, QueuesHoldEveryItemOnceWithinTheGreedyBound) {
  const PlanHeader& h = plan_.header();
  ASSERT_EQ(h.num_workers, problem_.limits.num_workers);
  ASSERT_EQ(plan_.queue_indptr()[0], 0);
  ASSERT_EQ(plan_.queue_indptr()[h.num_workers], h.num_items);
  std::vector<int> taken(h.num_items, 0);
  int64_t total = 0, top = 0, largest = 0;
  for (int32_t w = 0; w < h.num_workers; ++w) {
    int64_t load = 0;
    for (int32_t q = plan_.queue_indptr()[w]; q < plan_.queue_indptr()[w + 1]; ++q) {
      const int32_t i = plan_.queue_items()[q];
      ASSERT_TRUE(i >= 0 && i < h.num_items);
      ++taken[i];
      load += cost(plan_.items()[i]);
      largest = std::max(largest, cost(plan_.items()[i]));
    }
    total += load;
    top = std::max(top, load);
  }
  EXPECT_TRUE(std::all_of(taken.begin(), taken.end(), [](int n) { return n == 1; }));
  EXPECT_LE(top, total / h.num_workers + largest);  // Graham's bound for list scheduling
  EXPECT_EQ(h.max_cost, std::min<int64_t>(top, std::numeric_limits<int32_t>::max()));
  const auto number = [&](const WorkItem& part) {
    return part.slot < 0 ? 0 : (part.slot - plan_.merges()[part.merge].slot) / part.row_count;
  };
  for (int32_t i = 1; i < h.num_items; ++i) {
    const WorkItem &a = plan_.items()[i - 1], &b = plan_.items()[i];
    const bool by_request = problem_.limits.by_request;
    if (by_request && i <= grouped_items() && a.request != b.request) continue;
    // Parts of tiles of a request that read the same keys are claimed together.
    if (by_request && number(a) != number(b)) {
      ASSERT_LT(number(a), number(b)) << "claim order";
      continue;
    }
    ASSERT_GE(cost(a), cost(b)) << "claim order";
  }
}

TEST_P(Schedule, RequestsAreClaimedOneByOneWhereAskedFor) {
  if (!problem_.limits.by_request) return;
  std::vector<int64_t> costs(problem_.layout.requests.size(), 0);
  std::vector<int32_t> order;
  for (int32_t i = 0; i < plan_.header().num_items; ++i) {
    const WorkItem& item = plan_.items()[i];
    // Without what splits cost: where requests are alike, those that are split come last.
    const int64_t split = item.slot >= 0 ? problem_.limits.cost_per_split : 0;
    costs[static_cast<size_t>(item.request)] += cost(item) - split;
    if (i >= grouped_items()) continue;
    if (order.empty() || order.back() != item.request) order.push_back(item.request);
  }
  EXPECT_EQ(std::set<int32_t>(order.begin(), order.end()).size(), order.size());
  for (size_t i = 1; i < order.size(); ++i) {
    const int64_t a = costs[static_cast<size_t>(order[i - 1])];
    const int64_t b = costs[static_cast<size_t>(order[i])];
    ASSERT_TRUE(a > b || (a == b && order[i - 1] < order[i]));
  }
}

TEST_P(Schedule, TheCheapestItemsOfAllRequestsAreClaimedLast) {
  const int32_t grouped = problem_.limits.by_request ? grouped_items() : 0;
  if (grouped == plan_.header().num_items) return;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int32_t i = 0; i < grouped; ++i) least = std::min(least, cost(plan_.items()[i]));
  EXPECT_LE(grouped ? cost(plan_.items()[grouped]) : 0, least);
}

TEST_P(Schedule, RequestsOfOneMatrixAreClaimedHeadByHead) {
  problem_.layout.shared_kv = problem_.limits.by_head = true;
  Planner planner;
  const PlanView other =
      planner.plan(problem_.layout, problem_.shape, problem_.limits, problem_.split);
  const auto words = [](const WorkItem& item) {
    const int32_t* first = &item.request;
    return std::vector<int32_t>(first, first + sizeof(WorkItem) / 4);
  };
  // Of every head the same items in the same order, and of every worker.
  std::vector<std::vector<std::vector<int32_t>>> by_head(plan_.header().num_kv_heads);
  for (int32_t i = 0; i < plan_.header().num_items; ++i) {
    by_head[plan_.items()[i].kv_head].push_back(words(plan_.items()[i]));
  }
  int32_t at = 0;
  for (const auto& items : by_head) {
    for (const auto& item : items) ASSERT_EQ(words(other.items()[at++]), item);
  }
  ASSERT_EQ(at, other.header().num_items);
  for (int32_t w = 0; w <= plan_.header().num_workers; ++w) {
    ASSERT_EQ(other.queue_indptr()[w], plan_.queue_indptr()[w]);
  }
  for (int32_t i = 0; i < at; ++i) {
    ASSERT_EQ(words(other.items()[other.queue_items()[i]]),
              words(plan_.items()[plan_.queue_items()[i]]));
  }
}

TEST_P(Schedule, ShortTilesAreFirstWhereAskedFor) {
  const int32_t most = problem_.limits.tile_rows;
  const PlanHeader& h = plan_.header();
  for (int32_t i = 0; i < h.num_items; ++i) {
    const WorkItem& item = plan_.items()[i];
    const int32_t rows = plan_.requests()[item.request].q_len * h.group_size;
    const int32_t first = problem_.limits.short_tile_first && rows % most ? rows % most : most;
    ASSERT_EQ(item.row_count, std::min(item.row_begin == 0 ? first : most, rows - item.row_begin));
  }
}

// The heap of runs of workers against the definition: each item to the least loaded worker.
TEST_P(Schedule, QueuesAreThoseOfTheGreedyRule) {
  const PlanHeader& h = plan_.header();
  std::vector<int64_t> load(h.num_workers, 0);
  std::vector<std::vector<int32_t>> queues(h.num_workers), parts(h.num_workers);
  for (int32_t i = 0; i < h.num_items; ++i) {
    const size_t w = std::min_element(load.begin(), load.end()) - load.begin();
    load[w] += cost(plan_.items()[i]);
    // Parts of split tiles come first where the backend follows queues.
    const bool first = problem_.limits.price_splits && plan_.items()[i].slot >= 0;
    (first ? parts : queues)[w].push_back(i);
  }
  for (int32_t w = 0; w < h.num_workers; ++w) {
    parts[w].insert(parts[w].end(), queues[w].begin(), queues[w].end());
    const int32_t* begin = plan_.queue_items() + plan_.queue_indptr()[w];
    const int32_t* end = plan_.queue_items() + plan_.queue_indptr()[w + 1];
    ASSERT_EQ(std::vector<int32_t>(begin, end), parts[w]) << "worker " << w;
  }
}

TEST_P(Schedule, SplitPolicyIsKept) {
  const PlanHeader& h = plan_.header();
  if (problem_.split.disabled) {
    EXPECT_EQ(h.num_merges, 0);
  } else if (const int32_t size = problem_.split.fixed_size; size > 0) {
    for (int32_t i = 0; i < h.num_items; ++i) {
      const WorkItem& item = plan_.items()[i];
      if (item.kv_begin == item.kv_end) continue;
      EXPECT_EQ(item.kv_begin / size, (item.kv_end - 1) / size) << "a chunk crosses the grid";
    }
  }
}

TEST_P(Schedule, EqualInputGivesAnEqualPlan) {
  Planner fresh, used;
  Problem other = random_problem(GetParam() + 1);
  used.plan(other.layout, other.shape, other.limits, other.split);
  fresh.plan(problem_.layout, problem_.shape, problem_.limits, problem_.split);
  EXPECT_TRUE(std::ranges::equal(fresh.buffer(), planner_.buffer()));
  // A planner with a past writes the same, wherever.
  used.plan(problem_.layout, problem_.shape, problem_.limits, problem_.split);
  EXPECT_TRUE(std::ranges::equal(used.buffer(), planner_.buffer()));
}

// Pages of 16 tokens that back the lengths of a ragged problem.
Layout paged_like(const Layout& ragged) {
  std::vector<int32_t> qo{0}, kv{0}, lens, pages;
  for (const Request& r : ragged.requests) {
    qo.push_back(r.q_begin + r.q_len);
    lens.push_back(r.kv_len);
    kv.push_back(kv.back() + ceil_div(r.kv_len, 16));
  }
  for (int32_t i = 0; i < kv.back(); ++i) pages.push_back(i);
  const IndexView qo_view(qo), lens_view(lens);
  Layout layout;
  paged_layout(layout, &qo_view, IndexView(kv), IndexView(pages), nullptr, &lens_view, 16);
  layout.kv_heads = ragged.kv_heads;
  return layout;
}

TEST_P(Schedule, CapacityHoldsEveryPlanWithinIt) {
  for (const Layout& layout : {problem_.layout, paged_like(problem_.layout)}) {
    const int64_t kv = layout.paged ? layout.kv_indices.size() : layout.num_kv_rows;
    const Capacity capacity{.max_requests = std::max<int64_t>(1, layout.requests.size()),
                            .max_q_tokens = layout.num_q_tokens,
                            .max_kv_indices = kv};
    Planner planner;
    const PlanView plan =
        planner.plan(layout, problem_.shape, problem_.limits, problem_.split, capacity);
    const PlanHeader& h = plan.header();
    EXPECT_LE(h.num_requests, h.max_requests);
    EXPECT_LE(h.num_items, h.max_items);
    EXPECT_LE(h.num_merges, h.max_merges);
    EXPECT_LE(h.num_partial_rows, h.max_partial_rows);
    EXPECT_LE(h.num_kv_indices, h.max_kv_indices);
    EXPECT_EQ(h.total_size, static_cast<int64_t>(planner.buffer().size()));
    // A capacity changes where sections lie, not what is in them.
    EXPECT_EQ(h.num_items, plan_.header().num_items);
    EXPECT_EQ(h.policy, plan_.header().policy);
  }
}

INSTANTIATE_TEST_SUITE_P(Random, Schedule, testing::Range(0u, 240u));

TEST(ScheduleCapacity, SectionsStayWhereTheyAre) {
  const Capacity capacity{.max_requests = 8, .max_q_tokens = 64, .max_kv_indices = 72000};
  const Shape shape{.num_qo_heads = 8, .num_kv_heads = 2};
  Planner planner;
  Layout layout;
  contiguous_layout(layout, 1, 1, 5);
  const PlanHeader first = planner.plan(layout, shape, {}, {}, capacity).header();
  const int32_t* at = planner.buffer().data();
  contiguous_layout(layout, 8, 8, 9000);
  const PlanHeader second = planner.plan(layout, shape, {}, {}, capacity).header();
  EXPECT_EQ(planner.buffer().data(), at);
  EXPECT_EQ(first.total_size, second.total_size);
  EXPECT_EQ(first.off_items, second.off_items);
  EXPECT_EQ(first.off_queue_items, second.off_queue_items);
  EXPECT_EQ(first.off_merges, second.off_merges);
  EXPECT_EQ(first.off_kv_indices, second.off_kv_indices);
}

// Query tokens count once, though every head has block rows of them.
/// When blocks end that claim items in order, two before they begin them: the last, by the mean.
double imbalance(const PlanView& plan, int64_t (*cost)(const WorkItem&)) {
  const int32_t workers = plan.header().num_workers, count = plan.header().num_items;
  std::vector<std::vector<int32_t>> claimed(workers);
  std::set<std::pair<int64_t, int32_t>> ends;  // of what a worker has begun
  int32_t next = 0;
  for (int32_t round = 0; round < 2; ++round) {
    for (int32_t w = 0; w < workers; ++w) claimed[w].push_back(next++);
  }
  for (int32_t w = 0; w < workers; ++w) ends.insert({0, w});
  int64_t last = 0, total = 0;
  while (!ends.empty()) {
    const auto [now, w] = *ends.begin();
    ends.erase(ends.begin());
    const int32_t item = claimed[w].front();
    claimed[w].erase(claimed[w].begin());
    claimed[w].push_back(next++);
    if (item >= count) continue;
    const int64_t end = now + cost(plan.items()[item]);
    total += end - now;
    last = std::max(last, end);
    ends.insert({end, w});
  }
  return static_cast<double>(last) * workers / static_cast<double>(total);
}

// Cycles of an H200: 5200 an item, 1960 a tile of 80 tokens. With the last request's items at the
// end, large ones too, it was 5 % there and is in this model.
TEST(ClaimOrder, BlocksThatClaimTwoAheadEndTogether) {
  Layout layout;
  contiguous_layout(layout, 16, 1024, 1024);
  const DeviceLimits limits =
      gpu_hopper_limits({.sms = 132, .rows = 192, .kv_tile = 80, .bytes_per_token = 512});
  Planner planner;
  const PlanView plan =
      planner.plan(layout, {.num_qo_heads = 32, .num_kv_heads = 8, .causal = true}, limits, {});
  EXPECT_LT(imbalance(plan,
                      [](const WorkItem& item) -> int64_t {
                        return 5200 + 1960 * ceil_div(item.kv_end, 80);
                      }),
            1.02);
}

TEST(ScheduleCapacity, HoldsAMatrixForEachHead) {
  constexpr int32_t kHeads = 4, kRows = 100, kColumns = 50;
  std::mt19937 random(1);
  for (const int64_t r : {1, 7, 64}) {
    for (const int32_t tile_rows : {8, 64, 192}) {
      for (const int32_t fixed : {0, 96}) {
        std::vector<int32_t> indptr{0}, indices;
        for (int64_t i = 0; i < kHeads * ceil_div<int64_t>(kRows, r); ++i) {
          for (int32_t column = 0; column < kColumns; ++column) {
            if (random() % 2) indices.push_back(column);
          }
          indptr.push_back(static_cast<int32_t>(indices.size()));
        }
        Layout layout;
        bsr_layout(layout, indptr, indices, {kRows, 64 * kColumns, r, 64, kHeads});
        const Capacity capacity{.max_requests = static_cast<int64_t>(layout.requests.size()),
                                .max_q_tokens = kRows,
                                .max_kv_indices = static_cast<int64_t>(indices.size())};
        DeviceLimits limits;
        limits.tile_rows = tile_rows;
        limits.min_chunk = limits.kv_tile = 64;
        const PlanHeader h = Planner()
                                 .plan(layout, {.num_qo_heads = 3 * kHeads, .num_kv_heads = kHeads},
                                       limits, {.fixed_size = fixed}, capacity)
                                 .header();
        EXPECT_EQ(h.num_requests, h.max_requests);
        EXPECT_GE(h.num_items, kHeads * ceil_div(kRows * 3, tile_rows));
      }
    }
  }
}

TEST(ScheduleCapacity, MoreThanItIsRefusedByName) {
  const Capacity capacity{.max_requests = 2, .max_q_tokens = 4, .max_kv_indices = 20};
  const auto refused = [&](const Layout& layout) -> std::string {
    try {
      Planner().plan(layout, {}, {}, {}, capacity);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kCapacity);
      return error.argument;
    }
    return "nothing";
  };
  Layout layout;
  contiguous_layout(layout, 2, 2, 9);
  EXPECT_EQ(refused(layout), "nothing");
  contiguous_layout(layout, 3, 1, 5);
  EXPECT_EQ(refused(layout), "max_batch_size");
  contiguous_layout(layout, 1, 5, 9);
  EXPECT_EQ(refused(layout), "max_q_tokens");
  contiguous_layout(layout, 1, 1, 21);  // ragged KV: rows count
  EXPECT_EQ(refused(layout), "max_kv_pages");
  const std::vector<int32_t> kv{0, 21}, pages(21, 0), last{1};
  const IndexView last_view(last);
  paged_layout(layout, nullptr, IndexView(kv), IndexView(pages), &last_view, nullptr, 16);
  EXPECT_EQ(refused(layout), "max_kv_pages");
}

}  // namespace
}  // namespace flashbsr
