// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Small integers as floats: sums of their products are exact.
#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace flashbsr::cpu {

inline std::vector<float> random_integers(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> small(-4, 4);
  std::vector<float> out(n);
  for (float& x : out) x = static_cast<float>(small(random));
  return out;
}

}  // namespace flashbsr::cpu
