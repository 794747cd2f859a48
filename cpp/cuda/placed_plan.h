// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A plan on a device: the memory that kernels of it use besides the caller's arrays. For sources of
// cpp/cuda only.
#pragma once

#include <memory>
#include <utility>

#include "../api/backend.h"
#include "../api/options.h"
#include "dequantize.h"
#include "memory.h"

namespace flashbsr::cuda {

/// Where a plan comes from in host memory, its mask by the second.
struct PlanSource {
  PinnedPlans& plans;
  Staging& staging;
};

/// Who holds the memory of a plan.
enum class Hold {
  kNobody,
  kByGraphs,  ///< what has no room in it is an error, and nothing is changed
  kAtOnce,    ///< a graph alone, which may begin when the plan is there
};

class PlacedPlan {
 public:
  PlacedPlan(const api::AttentionOptions& options, int device);

  /// Puts a plan there, on `stream`, where the one before was. The device's context is current,
  /// captures are relaxed.
  void take(const api::HostPlan& plan, const api::Borrowed& borrowed, const PlanSource& from,
            CUstream stream, Hold hold);
  /// The lengths of a plan of bounds; those in host memory are copied.
  void resolve(const api::LengthViews& views, Staging& staging, CUstream stream);
  /// Whether its lengths are known.
  bool complete() const { return header_.off_bounds == 0 || resolved_; }
  /// Whether the lengths may still be on their way, so that the next kernel must not read the plan
  /// before those ahead of it have finished; the ones behind it start no earlier than that.
  bool take_fresh() { return std::exchange(fresh_, false); }

  /// What a kernel is launched with; the caller's arrays are in `params`. Outputs that become codes
  /// are float32 first, in memory of the plan.
  KernelArgs args(Params& params) const;

  /// Where codes of the plan are written as 16 bits.
  DensePages& dense() { return dense_; }

  /// Behind the kernel of `args`: what is still to be done to the outputs of `params`. Rows whose
  /// queries did not come are cleared, float32 ones become codes.
  void finish(const KernelArgs& args, const Params& params, CUstream stream) const;

  const PlanHeader& header() const { return header_; }
  bool masked() const { return masked_; }

 private:
  void grow(DeviceMemory& memory, int64_t bytes, const char* what, bool held);
  void take_mask(const api::HostPlan& plan, int64_t mask_at, Staging& staging, CUstream stream);
  void take_rope(const api::HostPlan& plan, CUstream stream, bool held);
  void take_slopes(const api::HostPlan& plan, CUstream stream);

  const int device_;
  const int32_t head_dim_qk_, head_dim_vo_, num_qo_heads_;
  const bool packs_outputs_;
  const int64_t max_q_tokens_;  ///< of a capacity
  PlanHeader header_{};
  bool masked_ = false;
  int64_t mask_at_ = 0;
  bool resolved_ = false, fresh_ = false;
  bool fewer_queries_ = false;  ///< there may be fewer query tokens than were planned

  DeviceMemory plan_;  ///< the plan, and behind it the mask
  DeviceMemory counters_;
  DeviceMemory partials_;
  DeviceMemory outputs_;  ///< in float32, where they become codes
  DeviceMemory slopes_;
  DensePages dense_;
  DeviceMemory lengths_;        ///< of the caller's that were in host memory
  DeviceMemory coarse_, fine_;  ///< RoPE tables
  int64_t rope_rows_ = 0;       ///< of the coarse table that are there
  RopeTables rope_;             ///< of the last plan
  api::Borrowed borrowed_;      ///< of the caller's, kept
};

}  // namespace flashbsr::cuda
