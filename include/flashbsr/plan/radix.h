// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A stable sort of many small numbers, by the bits in which they differ: 1024 costs of 20 bits take
// 2.6 us, by std::sort 31 (Zen 5).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashbsr::detail {

class RadixSort {
 public:
  struct Key {
    uint64_t rank;
    uint32_t index;
  };

  std::vector<Key> keys;

  /// From the least rank to the greatest. Equal ones stay as they are.
  void sort() {
    uint64_t differ = 0;
    bool sorted = true;
    for (size_t i = 1; i < keys.size(); ++i) {
      differ |= keys[i].rank ^ keys[0].rank;
      sorted = sorted && keys[i - 1].rank <= keys[i].rank;
    }
    if (sorted) return;
    if (keys.size() <= kFew) return insert_all();
    const int bits = static_cast<int>(std::bit_width(differ));
    const int most = keys.size() < kSome ? 6 : keys.size() < kMany ? 8 : kMostBits;
    const int passes = (bits + most - 1) / most, width = (bits + passes - 1) / passes;
    scratch_.resize(keys.size());
    for (int shift = 0; shift < bits; shift += width) {
      const uint64_t mask = (uint64_t{1} << width) - 1;
      if (differ >> shift & mask) pass(shift, mask);
    }
  }

 private:
  // A pass of 11 bits goes through 2048 counters, which is worth another pass from 512 keys on.
  static constexpr int kMostBits = 11;
  static constexpr size_t kMany = 512, kSome = 96, kFew = 24;

  void insert_all() {
    for (size_t i = 1; i < keys.size(); ++i) {
      const Key key = keys[i];
      size_t at = i;
      for (; at > 0 && key.rank < keys[at - 1].rank; --at) keys[at] = keys[at - 1];
      keys[at] = key;
    }
  }

  void pass(int shift, uint64_t mask) {
    uint32_t begin[1 << kMostBits];  // of the keys with a digit
    std::fill_n(begin, mask + 1, 0);
    for (const Key& key : keys) ++begin[key.rank >> shift & mask];
    uint32_t at = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      const uint32_t count = begin[digit];
      begin[digit] = at;
      at += count;
    }
    for (const Key& key : keys) scratch_[begin[key.rank >> shift & mask]++] = key;
    keys.swap(scratch_);
  }

  std::vector<Key> scratch_;
};

}  // namespace flashbsr::detail
