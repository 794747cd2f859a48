// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Sorted as by std::stable_sort, whatever the number of keys and the bits in which they differ.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include <flashbsr/plan/radix.h>

namespace flashbsr::detail {
namespace {

using Key = RadixSort::Key;

TEST(RadixSort, IsStable) {
  std::mt19937_64 random(1);
  RadixSort sorter;
  for (const size_t count : {0, 1, 2, 23, 24, 25, 95, 96, 511, 512, 3000}) {
    for (const int bits : {0, 1, 5, 11, 12, 23, 33, 63}) {
      const uint64_t mask = (uint64_t{1} << bits) - 1;
      for (const uint64_t common : {uint64_t{0}, uint64_t{1} << 63}) {
        sorter.keys.clear();
        for (size_t i = 0; i < count; ++i) {
          sorter.keys.push_back({common | (random() & mask), static_cast<uint32_t>(random() % 7)});
        }
        std::vector<Key> expected = sorter.keys;
        std::ranges::stable_sort(expected, {}, &Key::rank);
        sorter.sort();
        const bool equal = std::ranges::equal(
            expected, sorter.keys,
            [](const Key& a, const Key& b) { return a.rank == b.rank && a.index == b.index; });
        EXPECT_TRUE(equal) << count << " keys of " << bits << " bits";
      }
    }
  }
}

}  // namespace
}  // namespace flashbsr::detail
