// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the launches in CUDA graphs are fixed to, where replays follow later plans. For sources of
// cpp/cuda only.
#pragma once

#include "../api/backend.h"
#include "registry.h"

namespace flashbsr::cuda {

/// What launches of a CUDA graph are fixed to. Under a capacity their replays have later plans,
/// which must be such that they serve.
struct Captured {
  const KernelRow* kernel = nullptr;
  bool masked = false;
  bool paged = false;  ///< the plan then
  bool bounds = false;
  int32_t page_size = 1;
  int32_t kv_tokens = 0;
  int64_t q_rows = 0;  ///< most of all captured runs
  int64_t kv_rows = 0;
};

/// Throws Error(kPlan) or Error(kCapacity) for a plan that those launches could not serve.
void check_captured(const Captured& c, const KernelRow& kernel, const api::HostPlan& plan);

}  // namespace flashbsr::cuda
