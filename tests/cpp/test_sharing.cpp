// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Plans with shared parts over many random trees of prefixes, found and given: every visible (row,
// KV position) in exactly one item, whoever it belongs to; merges that take each row's states once
// and in order; slots apart; capacities never overrun.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/levels.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr {
namespace {

using Ints = std::vector<int32_t>;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  /// In [0, n).
  int below(int n) { return static_cast<int>(engine_() % static_cast<uint32_t>(n)); }
  int pick(std::initializer_list<int> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

 private:
  std::mt19937 engine_;
};

/// A page table whose requests mostly begin with one of a few stems, some of which begin alike.
struct Table {
  Ints indptr{0}, pages, lens, qo{0};
  int32_t page_size;

  explicit Table(Random& random) : page_size(random.pick({1, 3, 16, 16})) {
    int32_t next = 0;
    const auto extend = [&](Ints& list, int tokens) {
      for (int i = random.below(tokens / page_size + 1); i > 0; --i) list.push_back(next++);
    };
    std::vector<Ints> stems(7);
    for (size_t i = 0; i < stems.size(); ++i) {
      if (i > 2) stems[i] = stems[static_cast<size_t>(random.below(3))];
      extend(stems[i], i > 2 ? 1000 : 4000);
    }
    const bool decode = random.below(2);
    for (int b = 1 + random.below(60); b > 0; --b) {
      Ints list;
      if (random.below(10)) list = stems[static_cast<size_t>(random.below(7))];
      extend(list, 400);
      const int32_t full = static_cast<int32_t>(list.size()) * page_size;
      pages.insert(pages.end(), list.begin(), list.end());
      indptr.push_back(static_cast<int32_t>(pages.size()));
      lens.push_back(full ? full - random.below(page_size) : 0);
      qo.push_back(qo.back() + (decode ? 1 : random.below(random.below(4) ? 6 : 300)));
    }
  }

  Layout layout() const {
    Layout out;
    const IndexView q(qo), kv(lens);
    paged_layout(out, &q, IndexView(indptr), IndexView(pages), nullptr, &kv, page_size);
    return out;
  }
};

Workers random_workers(Random& random) {
  GpuKernel kernel{.sms = random.pick({4, 132})};
  switch (random.below(6)) {
    case 0: kernel.rows = 16; return gpu_decode_limits(kernel);
    case 1:
      kernel.rows = random.pick({128, 192});
      kernel.kv_tile = 128;
      return gpu_hopper_limits(kernel);
    case 2: kernel.rows = kernel.kv_tile = 64; return gpu_prefill_limits(kernel);
    case 3:
      kernel.rows = random.pick({128, 192});
      kernel.kv_tile = 80;
      return gpu_mixed_limits(kernel, 8);
    default:
      return DeviceLimits{.num_workers = random.pick({1, 4, 32}),
                          .tile_rows = random.pick({7, 128})};
  }
}

/// A row of a request: its query token and which head of the group.
using Row = std::pair<int32_t, int32_t>;

/// What a row of an item is: of a part, a row of one of its requests.
Row row_of(const PlanView& plan, const Layout& layout, const WorkItem& item, int32_t row) {
  const int32_t group = plan.header().group_size, at = item.row_begin + row;
  const int32_t token = query_row(plan.requests()[item.request], at / group, plan.q_rows());
  int32_t request = item.request;
  if (plan.requests()[request].shared()) {
    request = 0;
    while (token < layout.requests[static_cast<size_t>(request)].q_begin ||
           token >= layout.requests[static_cast<size_t>(request)].q_begin +
                        layout.requests[static_cast<size_t>(request)].q_len) {
      ++request;
    }
  }
  const int32_t first = layout.requests[static_cast<size_t>(request)].q_begin;
  return {request, (token - first) * group + at % group};
}

/// Checks that wide items come first and are in the queues of wide workers, narrow ones in theirs.
void check_kinds(const PlanView& plan) {
  const PlanHeader& h = plan.header();
  std::vector<int32_t> queue_of(static_cast<size_t>(h.num_items), -1);
  const int32_t first_narrow = h.num_workers - h.num_narrow_workers;
  ASSERT_EQ(plan.queue_indptr()[h.num_workers], h.num_items);
  for (int32_t w = 0; w < h.num_workers; ++w) {
    for (int32_t i = plan.queue_indptr()[w]; i < plan.queue_indptr()[w + 1]; ++i) {
      queue_of.at(static_cast<size_t>(plan.queue_items()[i])) = w;
    }
  }
  for (int32_t i = 0; i < h.num_items; ++i) {
    const bool narrow = plan.items()[i].row_count <= h.narrow_rows;
    ASSERT_EQ(narrow, i >= h.num_wide_items);
    const int32_t queue = queue_of[static_cast<size_t>(i)];
    ASSERT_GE(queue, 0) << "in no queue";
    ASSERT_EQ(narrow, queue >= first_narrow);
  }
}

/// Checks that a plan's items cover the layout, and that its merges take their states.
void check_plan(const PlanView& plan, const Layout& layout, const Sharing& sharing) {
  const PlanHeader& h = plan.header();
  ASSERT_EQ(h.num_requests, static_cast<int32_t>(layout.requests.size()));
  ASSERT_EQ(h.num_shared, static_cast<int32_t>(sharing.parts.size()));
  std::map<Row, std::vector<Span>> spans;
  std::vector<std::pair<int32_t, Row>> states(static_cast<size_t>(h.num_partial_rows), {-1, {}});
  std::vector<int32_t> arrivals(static_cast<size_t>(h.num_merges), 0);
  for (int32_t i = 0; i < h.num_items; ++i) {
    const WorkItem& item = plan.items()[i];
    ASSERT_EQ(item.slot < 0, item.merge < 0);
    ASSERT_EQ(item.slot < 0, item.merge_count == 0);
    for (int32_t m = item.merge; m < item.merge + item.merge_count; ++m) {
      ASSERT_LT(m, h.num_merges);
      ++arrivals[static_cast<size_t>(m)];
    }
    for (int32_t r = 0; r < item.row_count; ++r) {
      const Row row = row_of(plan, layout, item, r);
      if (item.kv_head == 0) spans[row].push_back({item.kv_begin, item.kv_end});
      if (item.slot < 0) continue;
      ASSERT_LT(item.slot + r, h.num_partial_rows);
      auto& state = states[static_cast<size_t>(item.slot + r)];
      ASSERT_EQ(state.first, -1) << "two items share a row of the partial states";
      state = {i, row};
    }
  }
  for (const auto& state : states) ASSERT_GE(state.first, 0) << "a row that nobody writes";
  check_kinds(plan);

  for (auto& [row, ranges] : spans) {
    const Request& request = layout.requests[static_cast<size_t>(row.first)];
    std::sort(ranges.begin(), ranges.end(), [](Span a, Span b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    const Span seen = visible_keys(h, request, row.second / h.group_size);
    EXPECT_LE(ranges.front().begin, seen.begin);
    EXPECT_GE(ranges.back().end, seen.end);
    for (size_t i = 0; i + 1 < ranges.size(); ++i) {
      // A level that ends inside of a page leaves the rest of it to nobody.
      const int32_t end = ranges[i].end, next = ranges[i + 1].begin;
      EXPECT_TRUE(next == end || next == round_up(end, h.page_size)) << end << " to " << next;
    }
  }
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    for (int32_t r = 0; r < layout.requests[b].q_len * h.group_size; ++r) {
      ASSERT_TRUE(spans.count({static_cast<int32_t>(b), r})) << "a row without an item";
    }
  }

  std::set<std::pair<int32_t, Row>> merged;
  for (int32_t m = 0; m < h.num_merges; ++m) {
    const Merge& merge = plan.merges()[m];
    ASSERT_EQ(arrivals[static_cast<size_t>(m)], merge.state_count);
    for (int32_t r = 0; r < merge.row_count; ++r) {
      const Row row{merge.request, merge.row_begin + r};
      ASSERT_TRUE(merged.insert({merge.kv_head, row}).second) << "a row that two merges write";
      int32_t end = -1, count = 0;
      const auto take = [&](int32_t slot) {
        const auto& [index, owner] = states.at(static_cast<size_t>(slot));
        const WorkItem& item = plan.items()[index];
        ASSERT_EQ(owner, row);
        ASSERT_EQ(item.kv_head, merge.kv_head);
        ASSERT_TRUE(item.merge <= m && m < item.merge + item.merge_count);
        ASSERT_GE(item.kv_begin, end) << "out of order";
        end = item.kv_end;
        ++count;
      };
      if (merge.part < 0) {
        for (int32_t i = 0; i < merge.state_count; ++i) take(merge.slot + i * merge.row_count + r);
      }
      for (int32_t p = merge.part; p >= 0 && p < merge.part + merge.part_count; ++p) {
        ASSERT_LT(p, h.num_merge_parts);
        const MergePart& part = plan.merge_parts()[p];
        for (int32_t i = 0; i < part.count; ++i) take(part.slot + i * part.stride + r);
      }
      ASSERT_EQ(count, merge.state_count);
    }
  }
}

/// Of every part: whether its rows of q follow each other, as the plan says.
void check_rows(const PlanView& plan) {
  for (int32_t p = 0; p < plan.header().num_shared; ++p) {
    const Request& part = plan.requests()[plan.header().num_requests + p];
    bool together = true;
    for (int32_t t = 0; t < part.q_len; ++t) {
      const int32_t row = plan.q_rows()[part.q_begin + t];
      ASSERT_EQ(query_row(part, t, plan.q_rows()), row);
      together = together && row == plan.q_rows()[part.q_begin] + t;
    }
    ASSERT_TRUE(part.shared());
    ASSERT_EQ(part.rows_together(), together);
  }
}

class Sharings : public testing::TestWithParam<uint32_t> {};

TEST_P(Sharings, PlansOfFoundPrefixesAreWhole) {
  Random random(GetParam());
  Planner planner;
  PrefixTree tree;
  Sharer sharer;
  Sharing sharing;
  const Workers limits = random_workers(random);
  const bool fixed = random.below(2) && !limits.mixed();
  const Capacity capacity = fixed ? Capacity{60, 20000, 200000} : Capacity{};
  const Shape shape{.num_qo_heads = random.pick({8, 2}),
                    .num_kv_heads = 2,
                    .causal = random.below(2) == 1,
                    .window_left = random.pick({-1, -1, 3000, 50}),
                    .may_share = true};
  int32_t words = 0;
  for (int round = 0; round < 4; ++round) {
    const Table table(random);
    const Layout layout = table.layout();
    tree.find(layout, shape);
    sharer.choose(tree, layout, shape, limits, capacity.fixed(), sharing);
    sharer.sort_members(layout, sharing);
    const PlanView plan = planner.plan(layout, shape, limits, {}, capacity, sharing);
    check_plan(plan, layout, sharing);
    check_rows(plan);
    if (HasFatalFailure()) return;
    const PlanHeader& h = plan.header();
    EXPECT_LE(h.num_merge_parts, h.max_merge_parts);
    EXPECT_LE(h.num_q_rows, h.max_q_rows);
    if (capacity.fixed() && round > 0) {
      EXPECT_EQ(h.total_size, words);
    }
    words = h.total_size;
  }
}

TEST_P(Sharings, TreeIsThatOfBruteForce) {
  Random random(GetParam());
  const Table table(random);
  const Layout layout = table.layout();
  const Shape shape{.causal = random.below(2) == 1};
  PrefixTree tree;
  tree.find(layout, shape);
  // Of any two requests: the pages they have in common, by looking, and as deep as a node with
  // both.
  std::map<std::pair<int32_t, int32_t>, int32_t> found;
  for (size_t n = 0; n < tree.nodes.size(); ++n) {
    const PrefixNode& node = tree.nodes[n];
    ASSERT_GE(node.last - node.first, 2);
    for (size_t p = 0; p < n; ++p) {
      const PrefixNode& other = tree.nodes[p];
      const bool inside = other.first <= node.first && node.last <= other.last;
      ASSERT_TRUE(inside ? other.end < node.end
                         : node.last <= other.first || other.last <= node.first);
    }
    for (int32_t i = node.first; i < node.last; ++i) {
      for (int32_t j = node.first; j < node.last; ++j) {
        found[{tree.order[static_cast<size_t>(i)], tree.order[static_cast<size_t>(j)]}] = node.end;
      }
    }
  }
  const auto limit = [&](const Request& r) {
    const int32_t seen = r.kv_len - (shape.causal ? r.q_len - 1 : 0);
    return r.q_len == 0 ? 0 : max_of(seen, 0) / layout.page_size;
  };
  for (size_t a = 0; a < layout.requests.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      const Request &x = layout.requests[a], &y = layout.requests[b];
      const int32_t* p = layout.kv_indices.data() + x.kv_begin;
      const int32_t* q = layout.kv_indices.data() + y.kv_begin;
      int32_t common = 0;
      while (common < min_of(limit(x), limit(y)) && p[common] == q[common]) ++common;
      const auto at = found.find({static_cast<int32_t>(a), static_cast<int32_t>(b)});
      ASSERT_EQ(at == found.end() ? 0 : at->second, common * layout.page_size);
    }
  }
}

TEST_P(Sharings, PlansOfGivenLevelsAreWhole) {
  Random random(GetParam());
  const int32_t page_size = random.pick({1, 5, 16});
  struct Arrays {
    Ints qo{0}, indptr{0}, pages, last;
  };
  std::vector<Arrays> levels(static_cast<size_t>(1 + random.below(3)));
  Ints qo{0};
  for (int b = 1 + random.below(12); b > 0; --b) qo.push_back(qo.back() + random.below(4));
  // From the requests up: every level's groups are runs of those below.
  int32_t page = 0;
  for (size_t l = levels.size(); l-- > 0;) {
    Arrays& level = levels[l];
    if (l + 1 == levels.size()) {
      level.qo = qo;
    } else {
      const Ints& below = levels[l + 1].qo;
      for (size_t i = 1; i < below.size(); ++i) {
        if (i + 1 == below.size() || random.below(3) == 0) level.qo.push_back(below[i]);
      }
    }
    for (size_t g = 0; g + 1 < level.qo.size(); ++g) {
      const int32_t tokens = random.below(4) ? random.below(l + 1 < levels.size() ? 900 : 60) : 0;
      for (int32_t i = ceil_div(tokens, page_size); i > 0; --i) level.pages.push_back(page++);
      level.indptr.push_back(static_cast<int32_t>(level.pages.size()));
      level.last.push_back(tokens ? (tokens - 1) % page_size + 1 : 0);
    }
  }
  std::vector<LevelView> views;
  for (const Arrays& a : levels) {
    views.push_back({IndexView(a.qo), IndexView(a.indptr), IndexView(a.pages), IndexView(a.last)});
  }
  Layout layout;
  Sharing sharing;
  bool needed = false;
  levels_layout(layout, sharing, views, page_size, needed);
  const Shape shape{.num_qo_heads = 8, .num_kv_heads = 2, .may_share = true};
  Planner planner;
  const PlanView plan = planner.plan(layout, shape, random_workers(random), {}, {}, sharing);
  check_plan(plan, layout, sharing);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Sharings, testing::Range(0u, 60u));

TEST(Sharing, MembersAreInTheBatchsOrder) {
  // Pages of the first request are the highest: the tree has them the other way round. 0 to 3 share
  // four pages, 0 and 2 another four, and so do 1 and 3.
  Layout layout;
  layout.page_size = 16;
  for (int32_t b = 0; b < 4; ++b) {
    layout.requests.push_back({.q_begin = b,
                               .q_len = 1,
                               .kv_begin = static_cast<int32_t>(layout.kv_indices.size()),
                               .kv_len = 16 * 300,
                               .mask_lo = -1,
                               .mask_hi = -1,
                               .index = b,
                               .mask_begin = 0});
    for (int32_t page = 0; page < 300; ++page) {
      layout.kv_indices.push_back(page < 200   ? page
                                  : page < 290 ? 2000 - 1000 * (b % 2) + page
                                               : 9000 - 100 * b + page);
    }
  }
  layout.num_q_tokens = 4;
  layout.paged = true;
  const Shape shape{.num_qo_heads = 2, .num_kv_heads = 2, .may_share = true};
  const Workers limits = gpu_decode_limits({.rows = 8, .kv_tile = 16});
  PrefixTree tree;
  tree.find(layout, shape);
  Sharing sharing;
  Sharer sharer;
  sharer.choose(tree, layout, shape, limits, false, sharing);
  sharer.sort_members(layout, sharing);
  ASSERT_EQ(sharing.parts.size(), 3u);
  EXPECT_EQ(sharing.order, (std::vector<int32_t>{0, 2, 1, 3}));
  Planner planner;
  const PlanView plan = planner.plan(layout, shape, limits, {}, {}, sharing);
  check_rows(plan);
  check_plan(plan, layout, sharing);
  // All four rows are in a part; in the order of the inner ones they are not together.
  const Request& part = plan.requests()[4];
  EXPECT_EQ(part.q_len, 4);
  EXPECT_FALSE(part.rows_together());
}

TEST(Sharing, RandomTablesDoShare) {
  int with_parts = 0, nested = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const Layout layout = Table(random).layout();
    const Shape shape{.num_qo_heads = 8, .num_kv_heads = 2, .may_share = true};
    PrefixTree tree;
    Sharer sharer;
    Sharing sharing;
    tree.find(layout, shape);
    sharer.choose(tree, layout, shape, {}, false, sharing);
    sharer.sort_members(layout, sharing);
    with_parts += !sharing.empty();
    for (const SharedPart& part : sharing.parts) nested += part.begin > 0;
  }
  EXPECT_GT(with_parts, 40);
  EXPECT_GT(nested, 40);
}

TEST(Sharing, FourLevelsAreFound) {
  // Requests 2i and 2i + 1 share 40 pages of 16; groups of four 30, of eight 20, all 10.
  const Shape shape{.num_qo_heads = 8, .num_kv_heads = 2, .may_share = true};
  PrefixTree tree;
  for (const int first : {0, 2000000000}) {  // bits for all pages would not fit
    Ints indptr{0}, pages, lens;
    for (int b = 0; b < 16; ++b) {
      for (int i = 0; i < 41; ++i) {
        const int group = i < 10 ? 0 : i < 20 ? b / 8 : i < 30 ? b / 4 : i < 40 ? b / 2 : b;
        pages.push_back(first + 1000 * group + i);
      }
      indptr.push_back(static_cast<int32_t>(pages.size()));
      lens.push_back(41 * 16);
    }
    Layout layout;
    const IndexView kv(lens);
    paged_layout(layout, nullptr, IndexView(indptr), IndexView(pages), nullptr, &kv, 16);
    tree.find(layout, shape);
    std::map<int32_t, int> nodes;
    for (const PrefixNode& node : tree.nodes) ++nodes[node.end];
    EXPECT_EQ(nodes, (std::map<int32_t, int>{{160, 1}, {320, 2}, {480, 4}, {640, 8}}));
  }
}

TEST(Sharing, WindowsThatCutAreNotShared) {
  Ints indptr{0}, pages, lens;
  for (int b = 0; b < 8; ++b) {
    for (int i = 0; i < 65; ++i) pages.push_back(i < 64 ? i : 100 + b);
    indptr.push_back(static_cast<int32_t>(pages.size()));
    lens.push_back(65 * 16);
  }
  Layout layout;
  const IndexView kv(lens);
  paged_layout(layout, nullptr, IndexView(indptr), IndexView(pages), nullptr, &kv, 16);
  PrefixTree tree;
  Sharer sharer;
  Sharing sharing;
  // The last token's window of 1039 reaches position 0; of 1038 it does not.
  for (const int window : {-1, 1039, 1038, 10}) {
    const Shape shape{
        .num_qo_heads = 8, .num_kv_heads = 2, .window_left = window, .may_share = true};
    tree.find(layout, shape);
    sharer.choose(tree, layout, shape, DeviceLimits{.num_workers = 4}, false, sharing);
    sharer.sort_members(layout, sharing);
    EXPECT_EQ(sharing.parts.size(), window < 0 || window >= 1039 ? 1u : 0u) << window;
  }
}

TEST(Sharing, LevelsThatAreNotNestedAreNamed) {
  const Ints outer{0, 2, 4}, inner{0, 1, 3, 4}, longer{0, 5};
  const Ints two{0, 1, 2}, three{0, 1, 2, 3}, one{0, 1}, ids{0, 1, 2}, last{1, 1, 1};
  const auto level = [&](const Ints& qo, const Ints& indptr) {
    const int64_t groups = static_cast<int64_t>(indptr.size()) - 1;
    return LevelView{IndexView(qo), IndexView(indptr), IndexView(ids),
                     IndexView(last.data(), groups)};
  };
  const auto why = [&](const LevelView& a, const LevelView& b) -> std::string {
    Layout layout;
    Sharing sharing;
    bool needed = false;
    try {
      levels_layout(layout, sharing, {a, b}, 16, needed);
    } catch (const Error& error) {
      return error.argument;
    }
    return "";
  };
  EXPECT_EQ(why(level(outer, two), level(inner, three)), "qo_indptr[0][1]");
  EXPECT_EQ(why(level(longer, one), level(inner, three)), "qo_indptr[0][1]");
  EXPECT_EQ(why(level({0, 3}, one), level(inner, three)), "qo_indptr[0][1]");
}

}  // namespace
}  // namespace flashbsr
