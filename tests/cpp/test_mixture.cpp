// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The price of the kernel for mixed batches against that of Hopper's other one, on batches that
// were measured (H200; docs/kernels/mixed.md): the cheaper one is the faster one, and what either
// takes is within a fifth.

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/share.h>

namespace flashbsr {
namespace {

/// Query tokens and KV tokens, and how many requests have as many.
struct Requests {
  int32_t q_len, kv_len, count;
};

Layout layout_of(const std::vector<Requests>& batch) {
  Layout layout;
  for (const Requests& r : batch) {
    for (int32_t i = 0; i < r.count; ++i) {
      layout.requests.push_back({.q_begin = static_cast<int32_t>(layout.num_q_tokens),
                                 .q_len = r.q_len,
                                 .kv_begin = 0,
                                 .kv_len = r.kv_len,
                                 .mask_lo = -1,
                                 .mask_hi = -1,
                                 .index = static_cast<int32_t>(layout.requests.size()),
                                 .mask_begin = 0});
      layout.num_q_tokens += r.q_len;
    }
  }
  return layout;
}

/// One part of `tokens` over all requests; none without tokens.
Sharing shared_by_all(const Layout& layout, int32_t tokens) {
  Sharing sharing;
  const int32_t count = static_cast<int32_t>(layout.requests.size());
  if (tokens == 0) return sharing;
  for (int32_t i = 0; i < count; ++i) sharing.order.push_back(i);
  sharing.kv_first.assign(layout.requests.size(), tokens);
  sharing.parts.push_back({0, tokens, 0, count});
  return sharing;
}

struct Prices {
  double hopper, mixed;  // us
};

Prices prices_of(const std::vector<Requests>& batch, int32_t shared = 0) {
  const Shape shape{.num_qo_heads = 32, .num_kv_heads = 8, .causal = true, .may_share = true};
  const Layout layout = layout_of(batch);
  const Sharing sharing = shared_by_all(layout, shared);
  const auto price = [&](const Workers& workers) {
    return static_cast<double>(Sharer::price(layout, shape, workers, sharing)) / kGpuUnitsPerUs;
  };
  return {price(gpu_hopper_limits({.rows = 192, .kv_tile = 80})),
          price(gpu_mixed_limits({.rows = 128, .kv_tile = 80}, 8))};
}

void expect_near(const Prices& found, double hopper, double mixed) {
  EXPECT_LT(found.mixed, found.hopper);
  EXPECT_NEAR(found.hopper, hopper, hopper / 5);
  EXPECT_NEAR(found.mixed, mixed, mixed / 5);
}

TEST(Mixture, PricesAreThoseThatWereMeasured) {
  expect_near(prices_of({{1, 8448, 64}}, 8192), 85, 48);
  expect_near(prices_of({{512, 4096, 4}, {1, 4096, 60}}), 418, 368);
  expect_near(prices_of({{512, 4096, 4}, {1, 4096, 30}}), 309, 283);
}

TEST(Mixture, LongPrefillsKeepThreeWarpgroups) {
  // 1 x 8192: 705 us on three warpgroups, about 900 on two.
  const Prices found = prices_of({{8192, 8192, 1}, {1, 64, 1}});
  EXPECT_LT(found.hopper, found.mixed);
  EXPECT_NEAR(found.mixed, 900, 180);
}

}  // namespace
}  // namespace flashbsr
