// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The front-ends: every way to name the same queries and KV gives the same BSR layout, and every
// bad value is named.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include <flashbsr/core/launch.h>
#include <flashbsr/plan/bsr.h>

namespace flashbsr {
namespace {

using Ints = std::vector<int32_t>;

// Three requests, page size 4: lengths 6, 0, 9 on pages {7, 2}, {}, {0, 5, 1}; 2, 1, 3 query
// tokens.
const Ints kQo = {0, 2, 3, 6}, kKv = {0, 2, 2, 5}, kPages = {7, 2, 0, 5, 1};
const Ints kLens = {6, 0, 9}, kLast = {2, 0, 1};

IndexView view(const Ints& v) { return IndexView(v); }

void expect_requests(const Layout& layout, const Ints& kv_begin) {
  ASSERT_EQ(layout.requests.size(), 3u);
  for (int b = 0; b < 3; ++b) {
    const Request& r = layout.requests[b];
    EXPECT_EQ(r.q_begin, kQo[b]);
    EXPECT_EQ(r.q_len, kQo[b + 1] - kQo[b]);
    EXPECT_EQ(r.kv_begin, kv_begin[b]);
    EXPECT_EQ(r.kv_len, kLens[b]);
  }
  EXPECT_EQ(layout.num_q_tokens, 6);
  EXPECT_EQ(layout.mask_bits, 2 * 6 + 0 + 3 * 9);
  EXPECT_EQ(layout.mask_bytes, 2 + 0 + 4);
}

TEST(Layout, PagedByLastPageLenAndByLengthsAgree) {
  const IndexView qo = view(kQo), last = view(kLast), lens = view(kLens);
  Layout a, b;
  paged_layout(a, &qo, view(kKv), view(kPages), &last, nullptr, 4);
  paged_layout(b, &qo, view(kKv), view(kPages), nullptr, &lens, 4);
  for (const Layout* layout : {&a, &b}) {
    expect_requests(*layout, {0, 2, 2});
    EXPECT_TRUE(layout->paged);
    EXPECT_EQ(layout->page_size, 4);
    EXPECT_EQ(layout->kv_indices, kPages);
    EXPECT_EQ(layout->num_kv_rows, 8);  // pages 0 to 7
  }
}

TEST(Layout, BorrowedPagesStayWhereTheyAreUntilTheyAreOwned) {
  const IndexView qo = view(kQo), lens = view(kLens);
  Layout layout;
  layout.borrow_pages = true;
  paged_layout(layout, &qo, view(kKv), view(kPages), nullptr, &lens, 4);
  expect_requests(layout, {0, 2, 2});
  EXPECT_EQ(layout.pages().data(), kPages.data());
  EXPECT_EQ(layout.pages().size(), kPages.size());
  EXPECT_TRUE(layout.kv_indices.empty());
  EXPECT_EQ(layout.num_kv_rows, 8);
  layout.own_pages();
  EXPECT_EQ(layout.kv_indices, kPages);
  EXPECT_EQ(layout.pages().data(), layout.kv_indices.data());
  // Others are copied, and what follows borrows nothing of them.
  const std::vector<int64_t> wide(kPages.begin(), kPages.end());
  paged_layout(layout, &qo, view(kKv), IndexView(wide.data(), 5), nullptr, &lens, 4);
  EXPECT_EQ(layout.kv_indices, kPages);
  paged_layout(layout, &qo, view(kKv), view(kPages), nullptr, &lens, 4);
  ragged_layout(layout, &qo, view(kKv));
  EXPECT_TRUE(layout.pages().empty());
}

TEST(Layout, BorrowedPagesAreChecked) {
  const IndexView lens = view(kLens);
  for (const int32_t bad : {-1, std::numeric_limits<int32_t>::max()}) {
    Ints pages = kPages;
    pages[3] = bad;
    Layout layout;
    layout.borrow_pages = true;
    try {
      paged_layout(layout, nullptr, view(kKv), view(pages), nullptr, &lens, 4);
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kIndexRange);
      EXPECT_EQ(error.argument, "kv_indices[3]");
    }
  }
}

TEST(Layout, BlockTableReadsOnlyTheEntriesThatLengthsNeed) {
  const Ints table = {7, 2, -1, -1, -1, -1, 0, 5, 1};  // padding is never looked at
  const IndexView qo = view(kQo);
  Layout layout;
  block_table_layout(layout, &qo, view(table), 3, view(kLens), 4);
  expect_requests(layout, {0, 2, 2});
  EXPECT_EQ(layout.kv_indices, kPages);
  EXPECT_EQ(layout.num_kv_rows, 8);
}

TEST(Layout, RaggedHasNoPages) {
  const Ints kv = {0, 6, 6, 15};
  const IndexView qo = view(kQo);
  Layout layout;
  ragged_layout(layout, &qo, view(kv));
  expect_requests(layout, {0, 6, 6});
  EXPECT_FALSE(layout.paged);
  EXPECT_EQ(layout.page_size, 1);
  EXPECT_TRUE(layout.kv_indices.empty());
  EXPECT_EQ(layout.num_kv_rows, 15);
}

TEST(Layout, ContiguousIsRaggedWithEqualLengths) {
  Layout layout;
  contiguous_layout(layout, 3, 2, 7);
  ASSERT_EQ(layout.requests.size(), 3u);
  for (int b = 0; b < 3; ++b) {
    EXPECT_EQ(layout.requests[b].q_begin, 2 * b);
    EXPECT_EQ(layout.requests[b].kv_begin, 7 * b);
    EXPECT_EQ(layout.requests[b].kv_len, 7);
  }
  EXPECT_EQ(layout.num_q_tokens, 6);
  EXPECT_EQ(layout.num_kv_rows, 21);
}

TEST(Layout, WithoutQueryLengthsEveryRequestDecodesOneToken) {
  const IndexView last = view(kLast);
  Layout layout;
  paged_layout(layout, nullptr, view(kKv), view(kPages), &last, nullptr, 4);
  for (int b = 0; b < 3; ++b) {
    EXPECT_EQ(layout.requests[b].q_begin, b);
    EXPECT_EQ(layout.requests[b].q_len, 1);
  }
}

TEST(Layout, BlockSparseRowsAreRequestsAndColumnsArePages) {
  // 7 rows in blocks of 3, 8 columns in blocks of 2: the last block row has one row.
  const Ints indptr = {0, 2, 2, 3}, indices = {0, 3, 1};
  Layout layout;
  bsr_layout(layout, view(indptr), view(indices), {7, 8, 3, 2});
  ASSERT_EQ(layout.requests.size(), 3u);
  EXPECT_EQ(layout.requests[0].q_len, 3);
  EXPECT_EQ(layout.requests[0].kv_len, 4);
  EXPECT_EQ(layout.requests[1].kv_len, 0);
  EXPECT_EQ(layout.requests[2].q_begin, 6);
  EXPECT_EQ(layout.requests[2].q_len, 1);
  EXPECT_EQ(layout.requests[2].kv_len, 2);
  EXPECT_EQ(layout.page_size, 2);
  EXPECT_EQ(layout.num_q_tokens, 7);
  EXPECT_EQ(layout.num_kv_rows, 4);
}

TEST(Layout, MasksOfEachRequestStartAtAByte) {
  const IndexView qo = view(kQo), lens = view(kLens);
  Layout layout;
  paged_layout(layout, &qo, view(kKv), view(kPages), nullptr, &lens, 4);
  EXPECT_EQ(layout.requests[0].mask_offset(), -1);
  place_masks(layout);
  EXPECT_EQ(layout.requests[0].mask_offset(), 0);
  EXPECT_EQ(layout.requests[1].mask_offset(), 2);
  EXPECT_EQ(layout.requests[2].mask_offset(), 2);
}

TEST(Layout, MasksOfNewTokensHaveBitsOfTheirColumns) {
  const Ints qo_lens = {0, 3, 3, 12}, lens_of = {3, 0, 30};
  const IndexView qo = view(qo_lens);
  const Ints kv = {0, 3, 3, 33};
  Layout layout;
  ragged_layout(layout, &qo, view(kv));
  mask_new_tokens(layout, "tree_parents");
  place_masks(layout);
  for (size_t b = 0; b < 3; ++b) {
    const Request& r = layout.requests[b];
    EXPECT_EQ(r.mask_begin, lens_of[b] - r.q_len);
  }
  EXPECT_EQ(layout.mask_bits, 9 + 0 + 81);
  EXPECT_EQ(layout.mask_bytes, 2 + 0 + 11);
  EXPECT_EQ(layout.requests[2].mask_offset(), 2);
  // Another layout in the same memory has full rows again.
  ragged_layout(layout, &qo, view(kv));
  EXPECT_EQ(layout.requests[2].mask_begin, 0);
  EXPECT_EQ(layout.mask_bits, 9 + 0 + 270);
}

TEST(Layout, NewTokensAreInTheirKv) {
  const Ints qo_lens = {0, 3}, kv = {0, 2};
  const IndexView qo = view(qo_lens);
  Layout layout;
  ragged_layout(layout, &qo, view(kv));
  try {
    mask_new_tokens(layout, "tree_parents");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.argument, "tree_parents");
  }
}

TEST(Layout, MaskOffsetsAre64Bit) {
  Layout layout;
  layout.requests.resize(2);
  layout.requests[0].q_len = 2000000000;
  layout.requests[0].kv_len = 1000;
  place_masks(layout);
  EXPECT_EQ(layout.requests[1].mask_offset(), 250000000000);
}

TEST(Layout, Int64IndicesAreTaken) {
  const std::vector<int64_t> qo(kQo.begin(), kQo.end()), kv(kKv.begin(), kKv.end()),
      pages(kPages.begin(), kPages.end()), lens(kLens.begin(), kLens.end());
  const IndexView qo_view(qo.data(), 4), lens_view(lens.data(), 3);
  Layout layout;
  paged_layout(layout, &qo_view, IndexView(kv.data(), 4), IndexView(pages.data(), 5), nullptr,
               &lens_view, 4);
  expect_requests(layout, {0, 2, 2});
  EXPECT_EQ(layout.kv_indices, kPages);
}

TEST(Layout, ReuseLeavesNothingBehind) {
  const IndexView qo = view(kQo), lens = view(kLens);
  const Ints kv = {0, 6, 6, 15};
  Layout layout;
  paged_layout(layout, &qo, view(kKv), view(kPages), nullptr, &lens, 4);
  place_masks(layout);
  ragged_layout(layout, &qo, view(kv));
  expect_requests(layout, {0, 6, 6});
  EXPECT_TRUE(layout.kv_indices.empty());
  EXPECT_EQ(layout.requests[2].mask_offset(), -1);
}

// One bad call: what is wrong, and the argument that the error must name.
struct Bad {
  const char* name;
  const char* argument;
  ErrorCode code;
  Ints qo = kQo, kv = kKv, pages = kPages, last = kLast;
  int32_t page_size = 4;
};

const Bad kBad[] = {
    {"QoStartsAtOne", "qo_indptr[0]", ErrorCode::kIndexRange, {1, 2, 3, 6}},
    {"QoDecreases", "qo_indptr[2]", ErrorCode::kIndexRange, {0, 3, 2, 6}},
    {"QoTooShort", "qo_indptr", ErrorCode::kShape, {0, 2, 3}},
    {"QoEmpty", "qo_indptr", ErrorCode::kShape, {}},
    {"KvNegative", "kv_indptr[1]", ErrorCode::kIndexRange, kQo, {0, -1, 2, 5}},
    {"KvEmpty", "kv_indptr", ErrorCode::kShape, kQo, {}},
    {"PagesTooFew", "kv_indices", ErrorCode::kShape, kQo, kKv, {7, 2, 0, 5}},
    {"PageNegative", "kv_indices[3]", ErrorCode::kIndexRange, kQo, kKv, {7, 2, 0, -5, 1}},
    {"LastPageZero", "last_page_len[2]", ErrorCode::kIndexRange, kQo, kKv, kPages, {2, 0, 0}},
    {"LastPageTooLong", "last_page_len[0]", ErrorCode::kIndexRange, kQo, kKv, kPages, {5, 0, 1}},
    {"LastPageMissing", "last_page_len", ErrorCode::kShape, kQo, kKv, kPages, {2, 0}},
    {"PageSizeZero", "page_size", ErrorCode::kValue, kQo, kKv, kPages, kLast, 0},
    {"KvTooLong", "kv length of request[2]", ErrorCode::kIndexRange, kQo, kKv, kPages, kLast,
     1 << 30},
};

class BadPagedLayout : public testing::TestWithParam<Bad> {};

TEST_P(BadPagedLayout, NamesTheArgument) {
  const Bad& bad = GetParam();
  const IndexView qo = view(bad.qo), last = view(bad.last);
  Layout layout;
  try {
    paged_layout(layout, &qo, view(bad.kv), view(bad.pages), &last, nullptr, bad.page_size);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument, bad.argument) << error.what();
    EXPECT_EQ(error.code, bad.code) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadPagedLayout, testing::ValuesIn(kBad),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Layout, WideValuesBeyondInt32AreRefused) {
  const int64_t big = int64_t{1} << 31;
  const std::vector<int64_t> kv = {0, big}, pages = {0, big};
  Layout layout;
  EXPECT_THROW(ragged_layout(layout, nullptr, IndexView(kv.data(), 2)), Error);
  const Ints two = {0, 2}, last = {1};
  const IndexView last_view = view(last);
  EXPECT_THROW(
      paged_layout(layout, nullptr, view(two), IndexView(pages.data(), 2), &last_view, nullptr, 16),
      Error);
  // 2^32 looks like 0 to code that truncates.
  const std::vector<int64_t> wraps = {0, int64_t{1} << 32};
  EXPECT_THROW(ragged_layout(layout, nullptr, IndexView(wraps.data(), 2)), Error);
}

TEST(Layout, BsrRefusesColumnsBeyondTheMatrix) {
  const Ints indptr = {0, 1}, indices = {4};
  Layout layout;
  EXPECT_THROW(bsr_layout(layout, view(indptr), view(indices), {3, 8, 3, 2}), Error);
  EXPECT_THROW(bsr_layout(layout, view(indptr), view(indices), {3, 10, 0, 2}), Error);
  EXPECT_THROW(bsr_layout(layout, view(indptr), view(indices), {30, 10, 3, 2}), Error);
  EXPECT_THROW(bsr_layout(layout, view(indptr), view(indices), {3, 10, 3, 2, 2}), Error);
  bsr_layout(layout, view(indptr), view(indices), {3, 9, 3, 2});
  EXPECT_EQ(layout.requests[0].kv_len, 1);
}

TEST(Layout, AShortBlockColumnIsTheLastOfARow) {
  // 7 columns in blocks of 3: the third has one.
  const Ints indptr = {0, 3, 4, 6}, indices = {0, 2, 1, 2, 1, 0};
  Layout layout;
  bsr_layout(layout, view(indptr), view(indices), {5, 7, 2, 3});
  EXPECT_EQ(layout.kv_indices, (Ints{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(layout.requests[0].kv_len, 7);
  EXPECT_EQ(layout.requests[1].kv_len, 1);
  EXPECT_EQ(layout.requests[2].kv_len, 6);
  EXPECT_EQ(layout.num_kv_rows, 3);
  EXPECT_EQ(layout.num_kv_tokens, 7);
  const Ints twice = {0, 2, 2, 2, 1, 0};
  EXPECT_THROW(bsr_layout(layout, view(indptr), view(twice), {5, 7, 2, 3}), Error);
  ragged_layout(layout, nullptr, view(indptr));
  EXPECT_EQ(layout.num_kv_tokens, 0);
}

TEST(Layout, EveryHeadMayHaveBlockRowsOfItsOwn) {
  const Ints indptr = {0, 1, 1, 3, 4}, indices = {2, 0, 1, 3};
  Layout layout;
  bsr_layout(layout, view(indptr), view(indices), {5, 8, 3, 2, 2});
  ASSERT_EQ(layout.requests.size(), 4u);
  EXPECT_EQ(layout.kv_heads, (Ints{0, 0, 1, 1}));
  EXPECT_EQ(layout.requests[2].q_begin, 0);
  EXPECT_EQ(layout.requests[3].q_begin, 3);
  EXPECT_EQ(layout.requests[3].q_len, 2);
  EXPECT_EQ(layout.num_q_tokens, 5);
  const Ints rows = {0, 4, 5, 0, 0, 5};
  variable_bsr_layout(layout, view(rows), view(indptr), view(indices), {5, 8, 1, 2, 2});
  EXPECT_EQ(layout.requests[0].q_len, 4);
  EXPECT_EQ(layout.requests[2].q_len, 0);
  EXPECT_EQ(layout.requests[3].q_begin, 0);
  EXPECT_EQ(layout.requests[3].q_len, 5);
  for (const Ints& bad : {Ints{0, 4, 5, 0, 0, 4}, Ints{0, 4, 5, 1, 2, 5}, Ints{0, 4, 3, 0, 0, 5},
                          Ints{0, 4, 5, 0, 5}, Ints{}}) {
    EXPECT_THROW(
        variable_bsr_layout(layout, view(bad), view(indptr), view(indices), {5, 8, 1, 2, 2}),
        Error);
  }
  ragged_layout(layout, nullptr, view(indptr));
  EXPECT_TRUE(layout.kv_heads.empty());
}

TEST(Layout, NeighbouringRowsWithTheSameColumnsAreJoined) {
  // Two heads of four block rows each; equal rows meet at the heads' border too.
  const Ints indptr = {0, 2, 4, 4, 5, 6, 7, 9, 11};
  const Ints indices = {0, 3, 0, 3, 1, 1, 1, 2, 0, 2, 0};
  Layout layout;
  bsr_layout(layout, view(indptr), view(indices), {7, 8, 2, 2, 2});
  join_equal_rows(layout);
  ASSERT_EQ(layout.requests.size(), 5u);
  EXPECT_EQ(layout.kv_heads, (Ints{0, 0, 0, 1, 1}));
  EXPECT_EQ(layout.kv_indices, (Ints{0, 3, 1, 1, 2, 0}));
  const Ints q_len = {4, 2, 1, 4, 3}, kv_len = {4, 0, 2, 2, 4};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(layout.requests[i].q_len, q_len[i]);
    EXPECT_EQ(layout.requests[i].kv_len, kv_len[i]);
    EXPECT_EQ(layout.requests[i].index, static_cast<int32_t>(i));
  }
}

/// What kernels ask for every logit is what the plan says, whatever the ranks and the interleave.
TEST(KeyShare, IsThePlansPositionWithoutADivision) {
  for (const int32_t size : {1, 2, 3, 8}) {
    for (const int32_t interleave : {1, 3, 16, 1000}) {
      PlanHeader h{};
      h.context_size = size;
      h.context_rank = size - 1;
      h.context_interleave = interleave;
      const KernelArgs args = kernel_args({}, h, nullptr, nullptr);
      EXPECT_EQ(args.share.whole(), size == 1);
      for (int32_t key = 0; key < (1 << 27); key = key * 3 / 2 + 1) {
        ASSERT_EQ(args.share.position(key), key_position(h, key)) << size << ' ' << interleave;
      }
    }
  }
}

/// Counted key by key: queries before the first key and behind the last, windows, odd shares.
TEST(KeyShare, RowsSeeTheKeysThatTheirPositionsLeave) {
  constexpr int32_t kKeys = 70;
  for (const int32_t size : {1, 2, 3, 8}) {
    for (const int32_t interleave : {1, 3, 16}) {
      for (const int32_t window : {-1, 0, 5, 40}) {
        PlanHeader h{};
        h.flags = window == 40 ? 0 : kPlanCausal;
        h.window_left = window;
        h.context_size = size;
        h.context_rank = size / 2;
        h.context_interleave = interleave;
        for (int32_t position = -20; position < (kKeys + 20) * size; ++position) {
          const Span seen = visible_keys(h, position, kKeys);
          ASSERT_LE(seen.begin, seen.end);
          for (int32_t key = 0; key < kKeys; ++key) {
            const int32_t at = key_position(h, key);
            const bool sees =
                (window == 40 || at <= position) && (window < 0 || at >= position - window);
            ASSERT_EQ(key >= seen.begin && key < seen.end, sees)
                << size << ' ' << interleave << ' ' << window << ' ' << position << ' ' << key;
          }
        }
      }
    }
  }
}

/// 32 bits are enough for the farthest position of a plan.
TEST(KeyShare, CountsToTheFarthestPosition) {
  PlanHeader h{};
  h.context_size = 3;
  h.context_interleave = 5;
  int64_t all = 0;
  for (h.context_rank = 0; h.context_rank < 3; ++h.context_rank) all += keys_before(h, 1 << 30);
  EXPECT_EQ(all, int64_t{1} << 30);
}

}  // namespace
}  // namespace flashbsr
