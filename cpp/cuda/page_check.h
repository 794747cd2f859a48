// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Validates the page table that a plan has in device memory. For sources of cpp/cuda only.
#pragma once

#include <flashbsr/core/plan.h>

#include "memory.h"
#include "registry.h"

namespace flashbsr::cuda {

class PageCheck {
 public:
  explicit PageCheck(int device) : device_(device), first_bad_(device) {}

  /// Throws Error(kIndexRange) for an id that is no page of a cache of `pages`. Waits for the
  /// stream. The plan is in device memory, so that its header says how many ids there are.
  void operator()(const PlanHeader* plan, const int32_t* kv_indices, int64_t pages,
                  CUstream stream);

 private:
  int device_;
  const KernelRow* kernel_ = nullptr;
  DeviceMemory first_bad_;
};

}  // namespace flashbsr::cuda
