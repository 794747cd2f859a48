// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The algebra of attention states: identity, commutativity, associativity, and NaN that is not
// lost.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <flashbsr/core/state.h>

namespace flashbsr {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One output component with its LSE (base 2).
struct State {
  float o = 0;
  float lse = -kInf;
};

State merge(State a, State b) {
  const MergeWeights w = merge_weights(a.lse, b.lse);
  return {w.weight_a * a.o + w.weight_b * b.o, w.lse};
}

std::vector<State> random_states(int count, float spread) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<State> states(count);
  for (State& s : states) s = {normal(random), spread * normal(random)};
  return states;
}

// The definition, in double and natural order.
State reference(const std::vector<State>& states) {
  double top = -kInf, sum = 0, o = 0;
  for (const State& s : states) top = std::max<double>(top, s.lse);
  for (const State& s : states) {
    sum += std::exp2(s.lse - top);
    o += std::exp2(s.lse - top) * s.o;
  }
  return {static_cast<float>(o / sum), static_cast<float>(top + std::log2(sum))};
}

TEST(State, EmptyIsTheIdentity) {
  for (const State& s : random_states(100, 30)) {
    for (const State& merged : {merge(s, State{}), merge(State{}, s)}) {
      EXPECT_EQ(merged.o, s.o);
      EXPECT_EQ(merged.lse, s.lse);
    }
  }
}

TEST(State, EmptyWithEmptyIsEmpty) {
  const State merged = merge(State{}, State{});
  EXPECT_EQ(merged.o, 0.0f);
  EXPECT_EQ(merged.lse, -kInf);
}

TEST(State, CommutesBitForBit) {
  const auto states = random_states(200, 10);
  for (size_t i = 0; i + 1 < states.size(); ++i) {
    const MergeWeights ab = merge_weights(states[i].lse, states[i + 1].lse);
    const MergeWeights ba = merge_weights(states[i + 1].lse, states[i].lse);
    EXPECT_EQ(ab.weight_a, ba.weight_b);
    EXPECT_EQ(ab.weight_b, ba.weight_a);
    EXPECT_EQ(ab.lse, ba.lse);
  }
}

TEST(State, AnyGroupingGivesTheSameState) {
  for (float spread : {0.1f, 5.0f, 60.0f}) {
    const auto states = random_states(64, spread);
    const State expected = reference(states);
    State forward, backward;
    for (size_t i = 0; i < states.size(); ++i) {
      forward = merge(forward, states[i]);
      backward = merge(states[states.size() - 1 - i], backward);
    }
    std::vector<State> tree = states;
    while (tree.size() > 1) {
      std::vector<State> next;
      for (size_t i = 0; i < tree.size(); i += 2) next.push_back(merge(tree[i], tree[i + 1]));
      tree = next;
    }
    for (const State& actual : {forward, backward, tree[0]}) {
      EXPECT_NEAR(actual.o, expected.o, 1e-5);
      EXPECT_NEAR(actual.lse, expected.lse, 1e-5 * (1 + std::fabs(expected.lse)));
    }
  }
}

TEST(State, WeightsAddUpToOne) {
  for (float gap = 0; gap < 300; gap += 0.37f) {
    const MergeWeights w = merge_weights(17.0f, 17.0f - gap);
    EXPECT_NEAR(w.weight_a + w.weight_b, 1.0f, 2e-7f);
    EXPECT_GE(w.lse, 17.0f);
  }
}

TEST(State, HugeExponentsDoNotOverflow) {
  for (float lse : {1e4f, 1e30f, -1e30f}) {
    const State merged = merge({1.0f, lse}, {3.0f, lse});
    EXPECT_EQ(merged.o, 2.0f);
    EXPECT_NEAR(merged.lse, lse + 1, std::fabs(lse) * 1e-6);
  }
}

TEST(State, NanIsNeverLost) {
  for (float other : {-kInf, -3.0f, 0.0f, 1e30f, kNan}) {
    EXPECT_TRUE(std::isnan(merge_weights(kNan, other).lse)) << "other = " << other;
    EXPECT_TRUE(std::isnan(merge_weights(other, kNan).lse)) << "other = " << other;
  }
}

TEST(State, SinkJoinsTheDenominatorOnly) {
  // Softmax over {x, sink} with V = 0 for the sink: O = p(x) v, LSE = log2(2^lse + e^sink).
  const float lse = 1.25f, sink = 0.5f;
  const double total = std::exp2(lse) + std::exp(sink);
  const MergeWeights w = sink_weights(lse, sink);
  EXPECT_NEAR(w.weight_a, std::exp2(lse) / total, 1e-6);
  EXPECT_NEAR(w.lse, std::log2(total), 1e-6);
  // A row that sees no key at all: all of the mass is the sink's.
  const MergeWeights alone = sink_weights(-kInf, sink);
  EXPECT_EQ(alone.weight_a, 0.0f);
  EXPECT_NEAR(alone.lse, sink * kLog2e, 1e-6);
  // A sink of -inf is none.
  EXPECT_EQ(sink_weights(lse, -kInf).weight_a, 1.0f);
  EXPECT_EQ(sink_weights(lse, -kInf).lse, lse);
}

}  // namespace
}  // namespace flashbsr
