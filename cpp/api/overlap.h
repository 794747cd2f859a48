// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Whether two strided arrays have a byte in common, exactly: views that interleave do not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "array.h"

namespace flashbsr::api {

namespace detail {

/// Bytes of an array as nested steps, the largest first: `first` + sum of i * step, and `run` bytes
/// from there.
struct Extent {
  struct Step {
    int64_t step, count;
  };
  int64_t first = 0, run = 0;
  std::vector<Step> steps;

  explicit Extent(const Array& a) {
    const int64_t bytes = element_bytes(a.element);
    first = static_cast<int64_t>(reinterpret_cast<uintptr_t>(a.data));
    run = bytes;
    for (int i = 0; i < a.ndim; ++i) {
      int64_t step = a.stride[i] * bytes;
      if (a.shape[i] == 1 || step == 0) continue;
      if (step < 0) {
        first += step * (a.shape[i] - 1);
        step = -step;
      }
      steps.push_back({step, a.shape[i]});
    }
    std::sort(steps.begin(), steps.end(), [](Step x, Step y) { return x.step > y.step; });
    while (!steps.empty() && steps.back().step <= run) {  // one after another: a longer run
      run += steps.back().step * (steps.back().count - 1);
      steps.pop_back();
    }
  }

  /// Bytes from the first to behind the last, of the steps from `at` on.
  int64_t span(size_t at) const {
    int64_t total = run;
    for (; at < steps.size(); ++at) total += steps[at].step * (steps[at].count - 1);
    return total;
  }
};

/// Of the steps from `i` of a and `j` of b on; b begins `off` bytes behind a.
inline bool meets(const Extent& a, size_t i, const Extent& b, size_t j, int64_t off) {
  const int64_t span_a = a.span(i), span_b = b.span(j);
  if (off >= span_a || -off >= span_b) return false;
  if (i == a.steps.size() && j == b.steps.size()) return true;
  // The copies of an inner part that can meet: of a where its step is the larger one.
  const bool of_a =
      j == b.steps.size() || (i < a.steps.size() && a.steps[i].step >= b.steps[j].step);
  const Extent::Step s = of_a ? a.steps[i] : b.steps[j];
  const bool both = i < a.steps.size() && j < b.steps.size() && a.steps[i].step == b.steps[j].step;
  if (both) {  // the same step: only how many of them apart matters
    const int64_t most_a = a.steps[i].count - 1, most_b = b.steps[j].count - 1;
    const int64_t inner_a = a.span(i + 1), inner_b = b.span(j + 1);
    // off + k * step must be in (-inner_b, inner_a).
    const int64_t low = -off - inner_b, high = inner_a - off;
    for (int64_t k = low / s.step - 1; k <= high / s.step + 1; ++k) {
      if (k < -most_a || k > most_b) continue;
      if (meets(a, i + 1, b, j + 1, off + k * s.step)) return true;
    }
    return false;
  }
  const int64_t inner = of_a ? a.span(i + 1) : b.span(j + 1);
  const int64_t other = of_a ? span_b : span_a, begin = of_a ? off : -off;
  // The other's [begin, begin + other) against copies at k * step of `inner` bytes.
  const int64_t first = std::max<int64_t>((begin - inner) / s.step, 0);
  const int64_t last = std::min(s.count - 1, std::max<int64_t>((begin + other) / s.step, 0));
  for (int64_t k = first; k <= last; ++k) {
    const int64_t moved = of_a ? off - k * s.step : off + k * s.step;
    if (of_a ? meets(a, i + 1, b, j, moved) : meets(a, i, b, j + 1, moved)) return true;
  }
  return false;
}

}  // namespace detail

/// Whether the two are the same elements in the same places.
inline bool same_view(const Array& a, const Array& b) {
  return a.data == b.data && a.element == b.element && a.ndim == b.ndim &&
         std::equal(a.shape, a.shape + a.ndim, b.shape) &&
         std::equal(a.stride, a.stride + a.ndim, b.stride);
}

inline bool overlaps(const Array& a, const Array& b) {
  if (a.size() == 0 || b.size() == 0 || !(a.place == b.place)) return false;
  const auto range = [](const Array& x) {
    int64_t low = 0, high = 0;
    for (int i = 0; i < x.ndim; ++i) {
      const int64_t end = x.stride[i] * (x.shape[i] - 1);
      (end < 0 ? low : high) += end;
    }
    const int64_t bytes = element_bytes(x.element);
    const int64_t at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data));
    return std::pair{at + low * bytes, at + (high + 1) * bytes};
  };
  const auto [a_low, a_high] = range(a);
  const auto [b_low, b_high] = range(b);
  if (a_low >= b_high || b_low >= a_high) return false;  // nearly always
  const detail::Extent ea(a), eb(b);
  return detail::meets(ea, 0, eb, 0, eb.first - ea.first);
}

}  // namespace flashbsr::api
