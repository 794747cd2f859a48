// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Where plans are written: on the heap, or where a device copies them from, so that nobody has to
// copy them there first (a plan of 4096 decodes has 2.4 MB).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashbsr {

class PlanMemory {
 public:
  virtual ~PlanMemory() = default;
  /// Room for a plan of so many words, with whatever it held before. The plan written last may move
  /// or lose its contents.
  virtual int32_t* next(int64_t words) = 0;
};

class HeapPlanMemory final : public PlanMemory {
 public:
  int32_t* next(int64_t words) override {
    const size_t size = static_cast<size_t>(words);
    if (size > words_.size())
      words_.resize(size > words_.size() * 3 / 2 ? size : words_.size() * 3 / 2);
    return words_.data();
  }

 private:
  std::vector<int32_t> words_;
};

}  // namespace flashbsr
