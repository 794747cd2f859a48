// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Layout, plan and engine together against naive loops in double precision: what a C++ user gets
// who includes nothing but headers. Compiled once per SIMD level.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <tuple>
#include <vector>

#include <flashbsr/cpu/engine.h>

#include "dispatch.h"
#include "problem.h"

namespace flashbsr::test {
namespace {

constexpr DType kBf16 = DType::kBF16, kF16 = DType::kF16, kE4M3 = DType::kE4M3,
                kE5M2 = DType::kE5M2;
constexpr Shape kCausal{.causal = true};

const Case kCases[] = {
    {.name = "plain"},
    {.name = "ragged", .page_size = 0},
    {.name = "causal", .shape = kCausal},
    {.name = "causal_ragged_large_tiles", .page_size = 0, .shape = kCausal, .tile_rows = 128},
    {.name = "window", .shape = {.causal = true, .window_left = 9}},
    {.name = "window_not_causal", .shape = {.window_left = 20}},
    {.name = "head_major_page_1", .page_size = 1, .head_major = true},
    {.name = "page_7_dim_8", .dim_qk = 8, .dim_vo = 8, .page_size = 7},
    {.name = "dims_differ", .dim_qk = 72, .dim_vo = 24, .shape = kCausal},
    {.name = "dim_256", .dim_qk = 256, .dim_vo = 256},
    {.name = "no_group", .num_kv_heads = 4, .group = 1},
    {.name = "group_32", .num_kv_heads = 1, .group = 32, .shape = kCausal},
    {.name = "soft_cap", .soft_cap = 1.5f},
    {.name = "alibi", .shape = kCausal, .alibi = true},
    {.name = "sinks", .shape = kCausal, .sinks = true},
    {.name = "custom_mask", .mask = true},
    {.name = "mask_of_new_tokens",
     .lengths = {{5, 70}, {1, 300}, {0, 8}, {17, 17}, {9, 137}, {30, 31}},
     .mask = true,
     .masks_new_tokens = true},
    {.name = "mask_of_new_tokens_soft_cap",
     .lengths = {{5, 70}, {8, 263}, {21, 21}},
     .soft_cap = 3,
     .mask = true,
     .masks_new_tokens = true},
    {.name = "rope", .shape = kCausal, .rope = true},
    {.name = "head_scales", .head_scales = true},
    {.name = "everything",
     .shape = {.causal = true, .window_left = 50},
     .soft_cap = 3.0f,
     .alibi = true,
     .sinks = true,
     .mask = true,
     .rope = true,
     .head_scales = true},
    {.name = "sigmoid", .shape = kCausal, .activation = Activation::kSigmoid},
    {.name = "fixed_split", .shape = kCausal, .split = {.fixed_size = 32}},
    {.name = "no_split", .split = {.disabled = true}},
    {.name = "decode_bundles",
     .lengths = std::vector<std::pair<int, int>>(40, {1, 130}),
     .num_kv_heads = 8,
     .group = 4},
    {.name = "fp16", .q = kF16, .kv = kF16, .out = kF16, .shape = kCausal},
    {.name = "bf16", .q = kBf16, .kv = kBf16, .out = kBf16, .shape = kCausal},
    {.name = "bf16_ragged_dim_24",
     .dim_qk = 24,
     .dim_vo = 40,
     .page_size = 0,
     .q = kBf16,
     .kv = kBf16,
     .out = kBf16},
    {.name = "bf16_everything",
     .q = kBf16,
     .kv = kBf16,
     .out = kBf16,
     .shape = {.causal = true, .window_left = 50},
     .soft_cap = 3.0f,
     .alibi = true,
     .sinks = true,
     .mask = true,
     .rope = true,
     .head_scales = true},
    {.name = "bf16_sigmoid",
     .q = kBf16,
     .kv = kBf16,
     .out = kBf16,
     .activation = Activation::kSigmoid},
    {.name = "bf16_to_fp32", .q = kBf16, .kv = kBf16, .out = DType::kF32},
    {.name = "e4m3_cache", .q = kBf16, .kv = kE4M3, .out = kBf16, .head_scales = true},
    {.name = "e5m2_cache", .q = kF16, .kv = kE5M2, .out = kF16, .head_scales = true},
    {.name = "empty_batch", .lengths = {}},
    {.name = "nothing_to_see", .lengths = {{2, 0}, {4, 2}}, .shape = kCausal, .sinks = true},
};

// One run with its partial states poisoned.
struct Execution {
  Execution(Problem& problem, const cpu::KernelTable& table, int threads) : engine(table, threads) {
    const PlanView plan =
        planner.plan(problem.layout(), problem.shape(), problem.limits(), problem.spec().split);
    const PlanHeader& h = plan.header();
    const int64_t rows = int64_t{h.num_partial_rows};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    partial_out.assign(rows * problem.spec().dim_vo, nan);
    partial_lse.assign(rows, nan);
    Params params = problem.params();
    params.partial_out = partial_out.data();
    params.partial_lse = partial_lse.data();
    engine.run(plan, params, problem.spec().activation);
    compute = engine.compute_for(params);
  }

  Planner planner;
  cpu::Engine engine;
  cpu::Compute compute;
  std::vector<float> partial_out, partial_lse;
};

double unit_roundoff(DType t) { return t == kBf16 ? 0x1p-8 : t == kF16 ? 0x1p-11 : 0x1p-24; }

class Engine : public testing::TestWithParam<std::tuple<const cpu::KernelTable*, Case>> {
 protected:
  const cpu::KernelTable& table() const { return *std::get<0>(GetParam()); }
  const Case& spec() const { return std::get<1>(GetParam()); }
};

TEST_P(Engine, MatchesNaiveLoops) {
  Problem problem(spec());
  const Execution run(problem, table(), 2);
  // Weights rounded to bf16 after the short polynomial (1e-4), or fp32 throughout.
  const double work = run.compute == cpu::Compute::kBf16 ? unit_roundoff(kBf16) + 2e-4 : 2e-6;
  const double out = 1.01 * unit_roundoff(spec().out);
  const auto& requests = problem.layout().requests;
  for (size_t b = 0; b < requests.size(); ++b) {
    for (int t = 0; t < requests[b].q_len; ++t) {
      for (int h = 0; h < problem.shape().num_qo_heads; ++h) {
        const auto expected = problem.reference(static_cast<int>(b), t, h);
        const int64_t token = requests[b].q_begin + t;
        for (int d = 0; d < spec().dim_vo; ++d) {
          const double limit = out * std::fabs(expected.o[d]) + work * expected.magnitude[d] + 1e-7;
          ASSERT_NEAR(problem.out_at(token, h, d), expected.o[d], limit)
              << "request " << b << " token " << t << " head " << h << " d " << d;
        }
        if (spec().activation == Activation::kSigmoid) continue;
        const double lse = problem.lse()[token * problem.shape().num_qo_heads + h];
        if (std::isinf(expected.lse)) {
          ASSERT_EQ(lse, expected.lse);
        } else {
          ASSERT_NEAR(lse, expected.lse, work + 1e-5) << "request " << b << " token " << t;
        }
      }
    }
  }
  EXPECT_TRUE(problem.padding_untouched());
}

TEST_P(Engine, ThreadsDoNotChangeABit) {
  Problem one(spec()), many(spec());
  Execution(one, table(), 1);
  for (int repeat = 0; repeat < 3; ++repeat) {
    Execution(many, table(), 3);
    ASSERT_EQ(one.out_bytes(), many.out_bytes());
    for (size_t i = 0; i < one.lse().size(); ++i) {
      ASSERT_EQ(float_bits(one.lse()[i]), float_bits(many.lse()[i]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Engine,
                         testing::Combine(testing::ValuesIn(cpu::available_tables()),
                                          testing::ValuesIn(kCases)),
                         [](const auto& info) {
                           return std::get<1>(info.param).name + "_on_" +
                                  std::get<0>(info.param)->isa;
                         });

// A thread keeps its scratch and only grows it, so a large case hides what a small one lacks: here
// every head dim meets a thread that has none. AddressSanitizer sees an overrun.
TEST(EngineScratch, IsLargeEnoughForEveryHeadDim) {
  const std::vector<std::pair<int, int>> decode(40, {1, 70}), prefill = {{40, 70}, {3, 9}};
  for (const cpu::KernelTable* table : cpu::available_tables()) {
    for (int dim = 8; dim <= 512; dim += dim < 256 ? 8 : 64) {
      for (const auto& lengths : {decode, prefill}) {
        for (DType type : {DType::kF32, kBf16}) {
          Problem problem({.name = "scratch",
                           .lengths = lengths,
                           .group = 1,
                           .dim_qk = dim,
                           .dim_vo = dim,
                           .q = type,
                           .kv = type,
                           .out = type});
          std::thread([&] { Execution(problem, *table, 1); }).join();
          EXPECT_TRUE(problem.padding_untouched()) << table->isa << " dim " << dim;
        }
      }
    }
  }
}

TEST(EngineSplits, AreExercised) {
  Problem problem({.name = "long", .lengths = {{1, 3000}, {1, 10}}, .num_workers = 16});
  const Execution run(problem, cpu::chosen_table(), 2);
  EXPECT_GT(PlanView{run.planner.buffer().data()}.header().num_merges, 0);
}

}  // namespace
}  // namespace flashbsr::test
