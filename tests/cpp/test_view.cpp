// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Views: NHD, HND, stacked and separate caches are strides of one addressing rule, in 64 bits.
#include <gtest/gtest.h>

#include <vector>

#include <flashbsr/core/math.h>
#include <flashbsr/core/view.h>

namespace flashbsr {
namespace {

constexpr int kPages = 3, kPageSize = 4, kHeads = 2, kDim = 8;

float* as_float(char* p) { return reinterpret_cast<float*>(p); }

TEST(PagedView, LayoutsDifferInStridesOnly) {
  // Stacked 5-D caches, K of page p at [p, 0], V at [p, 1].
  const int64_t plane = static_cast<int64_t>(kPageSize) * kHeads * kDim;
  std::vector<float> memory(kPages * 2 * plane);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i);

  PagedView nhd{.data = memory.data() + plane,
                .dtype = DType::kF32,
                .pages = kPages,
                .page_size = kPageSize,
                .heads = kHeads,
                .dim = kDim,
                .stride_page = 2 * plane,
                .stride_token = kHeads * kDim,
                .stride_head = kDim};
  PagedView hnd = nhd;
  hnd.stride_token = kDim;
  hnd.stride_head = kPageSize * kDim;
  for (int page = 0; page < kPages; ++page) {
    for (int token = 0; token < kPageSize; ++token) {
      for (int head = 0; head < kHeads; ++head) {
        const int64_t base = (2 * page + 1) * plane;
        EXPECT_EQ(as_float(nhd.row(page, token, head))[3],
                  static_cast<float>(base + (token * kHeads + head) * kDim + 3));
        EXPECT_EQ(as_float(hnd.row(page, token, head))[3],
                  static_cast<float>(base + (head * kPageSize + token) * kDim + 3));
      }
    }
  }
}

TEST(PagedView, OffsetsAre64BitAndScaledByElementSize) {
  PagedView view{.dtype = DType::kBF16,
                 .page_size = 16,
                 .stride_page = int64_t{1} << 20,
                 .stride_token = 1024,
                 .stride_head = 128};
  const char* base = view.row(0, 0, 0);
  EXPECT_EQ(view.row(100000, 15, 7) - base, 2 * ((int64_t{100000} << 20) + 15 * 1024 + 7 * 128));
  view.dtype = DType::kE4M3;
  EXPECT_EQ(view.row(100000, 15, 7) - base, (int64_t{100000} << 20) + 15 * 1024 + 7 * 128);
}

TEST(RaggedView, RowsOfStridedTokens) {
  std::vector<float> memory(5 * 40);
  RaggedView view{.data = memory.data(),
                  .dtype = DType::kF32,
                  .tokens = 5,
                  .heads = 2,
                  .dim = 8,
                  .stride_token = 40,
                  .stride_head = 16};
  EXPECT_EQ(as_float(view.row(4, 1)), memory.data() + 4 * 40 + 16);
}

TEST(IntegerMath, CeilDivAndRoundUp) {
  for (int64_t a = 0; a < 100; ++a) {
    for (int64_t b = 1; b < 20; ++b) {
      const int64_t quotient = ceil_div(a, b);
      EXPECT_TRUE(quotient * b >= a && (quotient - 1) * b < a);
      EXPECT_EQ(round_up(a, b), quotient * b);
    }
  }
}

}  // namespace
}  // namespace flashbsr
