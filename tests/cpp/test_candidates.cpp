// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The plans of a GPU's decode kernel for the batches that benchmarks name, and what the choice
// among cuts promises: a price no higher than that of the whole cut, capacity, batch invariance
// when asked.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <flashbsr/plan/gpu.h>
#include <flashbsr/plan/schedule.h>

namespace flashbsr {
namespace {

constexpr int kSms = 132;
/// As its driver says; of three and six what GPCs of 18, 16 and 10 SMs have.
constexpr ClusterBlocks kBlocksOfH200{132, 129, 120, 126, 120, 112};

using Lengths = std::vector<int32_t>;

Lengths mixed_lengths() {
  Lengths lengths(64, 512);
  lengths[31] = 131072;
  return lengths;
}

const std::map<std::string, Lengths> kBatches = {
    {"const1024", Lengths(16, 1024)},
    {"unif512-1024",
     {993, 593, 669, 843, 554, 788, 561, 533, 721, 945, 960, 512, 657, 1018, 538, 629}},
    {"zipf1024",
     {808, 4846, 373, 485, 1212, 303, 606, 2423, 441, 323, 1615, 538, 346, 692, 404, 969}},
    {"16x8192", Lengths(16, 8192)},
    {"64x4096", Lengths(64, 4096)},
    {"1x131072", Lengths(1, 131072)},
    {"63x512+1x131072", mixed_lengths()},
    {"128x1024", Lengths(128, 1024)},
    {"1x1024", Lengths(1, 1024)},
    {"4x1024", Lengths(4, 1024)},
};

struct Summary {
  PlanHeader header;
  double imbalance = 0;  ///< most KV tokens of a queue over the mean
  int most_items = 0, most_parts = 0;
};

/// Decode of 32 query and 8 KV heads of dim 128 in bf16, on a GPU like an H200.
Summary plan_of(const Lengths& lengths, const SplitPolicy& split = {}) {
  Lengths kv{0};
  for (const int32_t n : lengths) kv.push_back(kv.back() + n);
  Layout layout;
  ragged_layout(layout, nullptr, IndexView(kv));
  Planner planner;
  const PlanView plan = planner.plan(layout, {.num_qo_heads = 32, .num_kv_heads = 8},
                                     gpu_decode_limits({.sms = kSms}), split);
  Summary s{plan.header()};
  int64_t total = 0, most = 0;
  for (int32_t w = 0; w < kSms; ++w) {
    int64_t tokens = 0;
    int items = 0, parts = 0;
    for (int32_t q = plan.queue_indptr()[w]; q < plan.queue_indptr()[w + 1]; ++q) {
      const WorkItem& item = plan.items()[plan.queue_items()[q]];
      EXPECT_FALSE(item.slot >= 0 && parts < items) << "parts of split tiles come first";
      tokens += item.kv_end - item.kv_begin;
      ++items;
      parts += item.slot >= 0;
    }
    total += tokens;
    most = std::max(most, tokens);
    s.most_items = std::max(s.most_items, items);
    s.most_parts = std::max(s.most_parts, parts);
  }
  s.imbalance = total ? static_cast<double>(most) * kSms / static_cast<double>(total) : 1.0;
  return s;
}

TEST(Candidates, EvenBatchesStayWhole) {
  for (const char* name : {"const1024", "unif512-1024", "16x8192", "64x4096", "128x1024"}) {
    const Lengths& lengths = kBatches.at(name);
    const Summary s = plan_of(lengths);
    EXPECT_EQ(s.header.policy, kPolicyWhole) << name;
    EXPECT_EQ(s.header.num_items, static_cast<int32_t>(lengths.size()) * 8) << name;
    EXPECT_EQ(s.header.num_slots, 0) << name;
  }
}

TEST(Candidates, OneRequestIsCutIntoOneRoundOfAllWorkers) {
  const Summary s = plan_of(kBatches.at("1x131072"));
  EXPECT_LE(s.header.num_items, kSms);
  EXPECT_GT(s.header.num_items, kSms * 9 / 10);
  EXPECT_EQ(s.most_items, 1);
  EXPECT_LT(s.imbalance, 1.05);
}

// A merge is longer the more parts it has: 128 items of 64 tokens are no faster than 32.
TEST(Candidates, ShortOnesLeaveWorkersIdle) {
  const std::pair<const char*, double> measured[] = {{"1x1024", 5.97}, {"4x1024", 8.52}};
  for (const auto& [name, us] : measured) {
    const Summary s = plan_of(kBatches.at(name));
    EXPECT_LT(s.header.num_items, kSms) << name;
    EXPECT_GT(s.header.num_merges, 0) << name;
    EXPECT_EQ(s.most_items, 1) << name;
    EXPECT_NEAR(static_cast<double>(s.header.price) / kGpuUnitsPerUs, us, 0.5) << name;
  }
}

TEST(Candidates, SkewedBatchesAreBalancedWithFewParts) {
  const Summary mixed = plan_of(kBatches.at("63x512+1x131072"));
  EXPECT_LE(mixed.imbalance, 1.1);
  EXPECT_LE(mixed.most_parts, 2);
  const Summary zipf = plan_of(kBatches.at("zipf1024"));
  // Measured: 64 parts with a longest queue of 1.22 times the mean take 19.9 us, 96 parts with one
  // of 1.15 take 21.6.
  EXPECT_EQ(zipf.header.num_slots, 64);
  EXPECT_EQ(zipf.most_parts, 1);
}

TEST(Candidates, BatchesJustAboveARoundSplitWhatIsLeft) {
  // 20 x 8 items are 132 and 28: whole, a queue would have 1.65 times the mean.
  for (const int batch : {20, 24}) {
    const Summary s = plan_of(Lengths(static_cast<size_t>(batch), 4096));
    EXPECT_EQ(s.header.policy, kPolicyTail) << batch;
    EXPECT_LE(s.imbalance, 1.1) << batch;
    EXPECT_LE(s.most_parts, 4) << batch;
  }
}

// Requests that pad a graph change no cut: nine of 16 were cut as if they were 16, into queues of
// 10752 tokens in place of 9696.
TEST(Candidates, RequestsWithoutKeysChangeNothing) {
  std::mt19937 random(3);
  for (const int batch : {1, 2, 5, 8, 9, 12, 20, 33}) {
    for (int trial = 0; trial < 20; ++trial) {
      Lengths lengths(static_cast<size_t>(batch), 16128);
      for (int32_t& length : lengths)
        length = trial ? 1 + static_cast<int32_t>(random() % 9000) : length;
      const PlanHeader alone = plan_of(lengths).header;
      lengths.resize(64, 0);
      const Summary s = plan_of(lengths);
      EXPECT_EQ(s.header.policy, alone.policy) << batch << ", trial " << trial;
      EXPECT_EQ(s.header.policy_percent, alone.policy_percent) << batch << ", trial " << trial;
      EXPECT_EQ(s.header.num_slots, alone.num_slots) << batch << ", trial " << trial;
      EXPECT_EQ(s.header.price, alone.price) << batch << ", trial " << trial;
      EXPECT_EQ(s.header.num_items, alone.num_items + 8 * (64 - batch));
      // No queue has them all.
      EXPECT_LE(s.header.max_cost, alone.max_cost + 8 * s.header.cost_per_item);
    }
  }
}

TEST(Candidates, NeverDearerThanWhole) {
  for (const auto& [name, lengths] : kBatches) {
    const PlanHeader h = plan_of(lengths).header;
    EXPECT_GT(h.price, 0) << name;
    if (h.policy != kPolicyWhole) {
      EXPECT_LT(h.price, h.other_price) << name;
    } else if (h.other_price > 0) {
      // Less than 0.2 % is not worth the search.
      EXPECT_LE(h.price, h.other_price + h.other_price / 500) << name;
    }
  }
}

TEST(Candidates, WhatIsAskedForIsNotSearched) {
  const Lengths& lengths = kBatches.at("63x512+1x131072");
  const Summary whole = plan_of(lengths, {.disabled = true});
  EXPECT_EQ(whole.header.policy, kPolicyDisabled);
  EXPECT_EQ(whole.header.num_items, 64 * 8);
  // Batch invariance: the parts of a request do not depend on the others.
  const Summary fixed = plan_of(lengths, {.fixed_size = 4096});
  EXPECT_EQ(fixed.header.policy, kPolicyFixed);
  EXPECT_EQ(fixed.header.num_items, (63 + 32) * 8);
  EXPECT_EQ(fixed.header.num_slots, 32 * 8);
}

TEST(Candidates, CapacityHoldsWhateverTheLengths) {
  constexpr int64_t kMostRequests = 70, kMostTokens = 300000;
  const Capacity capacity{
      .max_requests = kMostRequests, .max_q_tokens = kMostRequests, .max_kv_indices = kMostTokens};
  std::mt19937 random(11);
  Planner planner;
  Layout layout;
  int policies[7] = {};
  for (int round = 0; round < 3000; ++round) {
    const int batch = 1 + static_cast<int>(random() % kMostRequests);
    const int skew = 1 + static_cast<int>(random() % 12);
    const bool equal = random() % 4 == 0;
    Lengths kv{0};
    for (int b = 0; b < batch; ++b) {
      const int64_t room = kMostTokens - kv.back();
      const int64_t any = static_cast<int64_t>(random() % (kMostTokens / 4 + 1)) >>
                          (random() % static_cast<uint32_t>(skew));
      const int64_t length = equal ? kMostTokens / batch : any;
      kv.push_back(kv.back() + static_cast<int32_t>(std::min(length, room)));
    }
    ragged_layout(layout, nullptr, IndexView(kv));
    const int heads = 1 << random() % 4;
    const DeviceLimits limits = gpu_decode_limits(
        {.sms = 1 + static_cast<int32_t>(random() % 200), .bytes_per_token = 256});
    const PlanHeader h =
        planner
            .plan(layout, {.num_qo_heads = 4 * heads, .num_kv_heads = heads}, limits, {}, capacity)
            .header();
    ASSERT_LE(h.num_slots, limits.max_slots());
    ASSERT_LE(h.num_partial_rows, h.max_partial_rows);
    ASSERT_LE(h.num_merges, h.max_merges);
    ASSERT_LE(h.num_items, h.max_items);
    ++policies[h.policy];
  }
  for (const int policy : {kPolicyWhole, kPolicyQuota, kPolicyEven, kPolicyTail})
    EXPECT_GT(policies[policy], 0) << policy;
}

TEST(GpuLimits, FollowBytesAndBandwidth) {
  const DeviceLimits bf16 = gpu_decode_limits({.bytes_per_token = 512});
  const DeviceLimits fp8 = gpu_decode_limits({.bytes_per_token = 256});
  EXPECT_NEAR(bf16.cost_per_kv, 2 * fp8.cost_per_kv, 1);
  EXPECT_EQ(bf16.cost_per_item, fp8.cost_per_item);
  EXPECT_EQ(bf16.num_workers, 132);
  EXPECT_TRUE(bf16.price_splits);
  // 132 SMs at 4.55 TB/s: 512 bytes in 15 ns.
  EXPECT_NEAR(bf16.cost_per_kv / static_cast<double>(kGpuUnitsPerUs), 0.015, 0.0005);
  EXPECT_GE(gpu_decode_limits({.bytes_per_token = 16, .bytes_per_second = 1e15}).cost_per_kv, 1);

  const DeviceLimits prefill = gpu_prefill_limits({.blocks_per_sm = 2, .rows = 64, .kv_tile = 64});
  EXPECT_EQ(prefill.num_workers, 264);
  EXPECT_EQ(prefill.tile_rows, 64);
  EXPECT_FALSE(prefill.price_splits);
  EXPECT_FALSE(prefill.by_request);
  EXPECT_GE(prefill.cost_per_kv, 2 * bf16.cost_per_kv - 60);

  const DeviceLimits hopper = gpu_hopper_limits({.rows = 192, .kv_tile = 80});
  EXPECT_EQ(hopper.num_workers, 132);
  EXPECT_TRUE(hopper.by_request && hopper.short_tile_first && !hopper.memory_bound);
  const auto us = [](int64_t units) { return static_cast<double>(units) / kGpuUnitsPerUs; };
  EXPECT_NEAR(us(detail::kv_weight(hopper, 192)), 0.0154, 0.0002);
  EXPECT_NEAR(us(detail::kv_weight(hopper, 64)), 0.0087, 0.0002);
  // Half of the products at half of the bytes.
  const DeviceLimits half = gpu_hopper_limits({.rows = 192, .bytes_per_token = 256});
  EXPECT_NEAR(us(detail::kv_weight(half, 192)), 0.0077, 0.0003);
}

// 352 equal items on 132 SMs: two whole rounds, and the other 88 in parts that fill rounds.
/// Latent attention, 128 heads: two tiles of 64 rows per request.
PlanHeader latent_plan(const Lengths& lengths, const DeviceLimits& limits) {
  Lengths kv{0};
  for (const int32_t n : lengths) kv.push_back(kv.back() + n);
  Layout layout;
  ragged_layout(layout, nullptr, IndexView(kv));
  Planner planner;
  return planner.plan(layout, {.num_qo_heads = 128, .num_kv_heads = 1}, limits).header();
}

TEST(GpuLimits, LatentTilesHaveFewerPartsWhereMergesAreDear) {
  const GpuKernel kernel{.sms = kSms, .rows = 64, .kv_tile = 64, .bytes_per_token = 1152};
  DeviceLimits limits = gpu_latent_limits(kernel);
  EXPECT_EQ(latent_plan(Lengths(64, 8192), limits).num_merges, 0);
  EXPECT_TRUE(latent_plan({8192}, limits).flags & kPlanSlicedMerges);
  // Merged by whose the tile is, about the same for any number of parts; and by a list.
  EXPECT_GT(latent_plan({32768}, limits).num_items, kSms * 9 / 10);
  limits.cost_of_own_merging = 0;
  limits.cost_per_merged_part = limits.cost_per_state = 0;
  const int32_t most = latent_plan({8192}, limits).num_items;
  EXPECT_GT(most, kSms * 9 / 10);
  limits.cost_per_merged_part = detail::gpu_units(1.0);
  const int32_t fewer = latent_plan({8192}, limits).num_items;
  EXPECT_LT(fewer, most / 2);
  EXPECT_GT(fewer, 2);
  limits.cost_of_merging = detail::gpu_units(1000.0);
  EXPECT_EQ(latent_plan({8192}, limits).num_items, 2);
}

TEST(GpuLimits, FewLatentRowsReadAtTheMemorysRate) {
  GpuKernel kernel{.sms = kSms, .rows = 16, .kv_tile = 64, .bytes_per_token = 656};
  kernel.cluster_blocks = kBlocksOfH200;
  const DeviceLimits limits = gpu_few_latent_limits(kernel);
  const double read_us = detail::gpu_stream_us(kernel, kernel.bytes_per_token);
  EXPECT_EQ(limits.cost_per_kv, detail::gpu_units(read_us));
  // Several parts of 8192 tokens, more than clusters have; those of 1024 merge within them.
  const PlanHeader h = latent_plan({8192}, limits);
  EXPECT_NE(h.policy, kPolicyCluster);
  EXPECT_GT(h.num_items, kSms / 3);
  EXPECT_EQ(latent_plan({1024}, limits).policy, kPolicyCluster);
  // Where memory is fast, L2.
  kernel.bytes_per_second *= 4;
  EXPECT_GT(gpu_few_latent_limits(kernel).cost_per_kv,
            detail::gpu_units(detail::gpu_stream_us(kernel, kernel.bytes_per_token)));
  // Beside the kernel of 64 rows there is one of 16, beside that none.
  EXPECT_EQ(gpu_latent_limits(kernel).fewer_rows, 16);
  EXPECT_EQ(limits.fewer_rows, 0);
}

TEST(GpuLimits, LatentTilesBeforeHopperKnowNoClusters) {
  GpuKernel kernel{.sms = kSms, .rows = 64, .kv_tile = 32, .bytes_per_token = 1152};
  for (int32_t& blocks : kernel.cluster_blocks) blocks = 132;
  const DeviceLimits limits = gpu_latent_mma_limits(kernel);
  EXPECT_EQ(latent_plan(Lengths(64, 8192), limits).num_merges, 0);
  for (const int32_t length : {1024, 8192}) {
    const PlanHeader h = latent_plan({length}, limits);
    EXPECT_EQ(h.num_merges, 2);
    EXPECT_NE(h.policy, kPolicyCluster);
    EXPECT_TRUE(h.flags & kPlanSlicedMerges);
  }
  kernel.rows = 32;
  EXPECT_GT(limits.cost_per_kv, gpu_latent_mma_limits(kernel).cost_per_kv);
  // Two blocks of 16 rows on an SM read at the memory's rate.
  kernel.rows = 16;
  kernel.blocks_per_sm = 2;
  const double read_us = detail::gpu_stream_us(kernel, kernel.bytes_per_token);
  EXPECT_EQ(gpu_latent_mma_limits(kernel).cost_per_kv, detail::gpu_units(read_us));
}

TEST(GpuLimits, HopperSplitsWhatIsLeftOfARound) {
  Lengths qo{0}, kv{0};
  for (int b = 1; b <= 4; ++b) {
    qo.push_back(512 * b);
    kv.push_back(8192 * b);
  }
  const IndexView qo_view(qo);
  Layout layout;
  ragged_layout(layout, &qo_view, IndexView(kv));
  Planner planner;
  const PlanHeader h = planner
                           .plan(layout, {.num_qo_heads = 32, .num_kv_heads = 8, .causal = true},
                                 gpu_hopper_limits({.rows = 192, .kv_tile = 80}))
                           .header();
  EXPECT_EQ(h.policy, kPolicyTail);
  EXPECT_EQ(h.num_merges, 88);
  EXPECT_LT(h.price, h.other_price);
}

/// Decode over a latent cache by 128 heads, on a GPU whose blocks merge within clusters.
PlanView latent_plan(Planner& planner, const Lengths& lengths, GpuKernel kernel = {},
                     bool own_merges = false) {
  Lengths kv{0};
  for (const int32_t n : lengths) kv.push_back(kv.back() + n);
  Layout layout;
  ragged_layout(layout, nullptr, IndexView(kv));
  kernel.sms = kSms;
  kernel.rows = kernel.kv_tile = 64;
  kernel.bytes_per_token = 1152;
  DeviceLimits limits = gpu_latent_limits(kernel);
  if (!own_merges) limits.cost_of_own_merging = 0;
  return planner.plan(layout, {.num_qo_heads = 128, .num_kv_heads = 1}, limits);
}

TEST(GpuLimits, LatentMergesWithinClusters) {
  const GpuKernel kernel{.cluster_blocks = kBlocksOfH200};
  for (const Lengths& lengths :
       {Lengths{1024}, Lengths{8192}, Lengths(16, 1024), Lengths{1000, 3, 0, 700, 64}}) {
    Planner planner;
    const PlanView plan = latent_plan(planner, lengths, kernel);
    const PlanHeader& h = plan.header();
    ASSERT_EQ(h.policy, kPolicyCluster);
    const int32_t parts = h.cluster_parts, tiles = 2 * static_cast<int32_t>(lengths.size());
    EXPECT_EQ(h.num_items, tiles * parts);
    EXPECT_LE(h.num_items, kSms);
    EXPECT_EQ(h.num_merges, tiles);
    for (int32_t t = 0; t < tiles; ++t) {
      int32_t at = 0;
      for (int32_t i = t * parts; i < (t + 1) * parts; ++i) {
        const WorkItem& item = plan.items()[i];
        EXPECT_EQ(item.merge, t);
        EXPECT_EQ(item.request, t / 2);
        EXPECT_EQ(item.kv_begin, at);
        at = item.kv_end;
      }
      EXPECT_EQ(at, lengths[static_cast<size_t>(t / 2)]);
    }
  }
  // 32 tiles are 96 blocks in clusters of three and would be 128 of 120 in those of four; 16 are 96
  // in clusters of six.
  const auto parts_of = [&](int requests) {
    Planner planner;
    return latent_plan(planner, Lengths(static_cast<size_t>(requests), 1024), kernel)
        .header()
        .cluster_parts;
  };
  EXPECT_EQ(parts_of(16), 3);
  EXPECT_EQ(parts_of(8), 6);
  Planner planner;
  EXPECT_EQ(latent_plan(planner, Lengths(64, 8192), kernel).header().policy, kPolicyWhole);
  EXPECT_NE(latent_plan(planner, Lengths{1024}).header().policy, kPolicyCluster);
  EXPECT_EQ(latent_plan(planner, Lengths{1024}).header().cluster_parts, 0);
  // Blocks that merge their own tiles need not be neighbours: long requests have more parts.
  EXPECT_EQ(latent_plan(planner, Lengths{1024}, kernel, true).header().policy, kPolicyCluster);
  const PlanHeader& own = latent_plan(planner, Lengths{8192}, kernel, true).header();
  EXPECT_NE(own.policy, kPolicyCluster);
  EXPECT_GT(own.num_items, 2 * 32);
}

/// One item after another to the first of the least loaded workers.
std::vector<std::vector<int32_t>> dealt_one_by_one(const std::vector<int64_t>& costs,
                                                   const std::vector<bool>& split, size_t workers) {
  std::vector<int64_t> loads(workers, 0);
  std::vector<std::vector<int32_t>> parts(workers), queues(workers);
  for (size_t i = 0; i < costs.size(); ++i) {
    const size_t w =
        static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[w] += costs[i];
    (split[i] ? parts : queues)[w].push_back(static_cast<int32_t>(i));
  }
  for (size_t w = 0; w < workers; ++w) {
    parts[w].insert(parts[w].end(), queues[w].begin(), queues[w].end());
  }
  return parts;
}

/// Queues of `length` items in the mean, dealt in runs; one in `parts` runs is of a split tile. The
/// first `busy` workers have one item each that takes longer than all others.
void expect_one_by_one(std::mt19937& random, int workers, int length, unsigned parts, int busy = 0,
                       bool splits_first = true) {
  const int64_t longest = int64_t{100} * length * workers;
  std::vector<int64_t> costs(static_cast<size_t>(busy), longest);
  std::vector<bool> split(static_cast<size_t>(busy), false);
  detail::Deal deal;
  deal.start(workers);
  deal.give(longest, busy, false);
  while (costs.size() < static_cast<size_t>(length * workers)) {
    const int64_t cost = 1 + static_cast<int64_t>(random() % 50);
    const size_t count =
        min_of<size_t>(1 + random() % 9, static_cast<size_t>(length * workers) - costs.size());
    const bool part = parts && random() % parts == 0;
    deal.give(cost, static_cast<int64_t>(count), part);
    costs.insert(costs.end(), count, cost);
    split.insert(split.end(), count, part);
  }
  std::vector<int32_t> indptr(static_cast<size_t>(workers) + 1, -1);
  std::vector<int32_t> items(costs.size(), -1);
  deal.write_queues(splits_first, indptr.data(), items.data());
  if (!splits_first) split.assign(split.size(), false);
  const auto queues = dealt_one_by_one(costs, split, static_cast<size_t>(workers));
  for (size_t w = 0; w < queues.size(); ++w) {
    ASSERT_EQ(queues[w],
              std::vector<int32_t>(items.begin() + indptr[w], items.begin() + indptr[w + 1]))
        << workers << " workers, " << length << " items each, worker " << w;
  }
}

/// Without parts they are written by rounds; short ones with parts in place, long ones apart.
TEST(Deal, QueuesAreThoseOfItemsDealtOneByOne) {
  std::mt19937 random(7);
  for (const int workers : {1, 3, 32, 132}) {
    for (const int length : {0, 1, 100, 127, 128, 129, 1024}) {
      for (const unsigned parts : {0u, 4u}) expect_one_by_one(random, workers, length, parts);
    }
  }
}

/// A table of rounds would be nearly empty, and as large as workers times the longest queue.
TEST(Deal, OneQueueHasNearlyAll) {
  std::mt19937 random(8);
  for (const int busy : {100, 131}) {
    for (const int length : {1, 100, 1024}) {
      for (const unsigned parts : {0u, 4u}) {
        for (const bool splits_first : {true, false}) {
          expect_one_by_one(random, 132, length, parts, busy, splits_first);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashbsr
