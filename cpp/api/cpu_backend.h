// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU engine as a backend. The plan stays where the planner wrote it.
#pragma once

#include <optional>

#include <flashbsr/cpu/engine.h>

#include "backend.h"
#include "options.h"

namespace flashbsr::api {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const AttentionOptions& options);

  Place place() const override { return {}; }
  Workers limits(const Batch& batch) override;
  std::shared_ptr<PlanMemory> plan_memory() override { return plans_; }
  void take_plan(const HostPlan& plan, const Borrowed& borrowed, void* stream) override;
  void resolve(const LengthViews& lengths, const ResolveOptions& options) override;
  bool serves(const Params&, void*) override { return true; }
  void run(Params& params, const RunOptions& options) override;
  bool captured() const override { return false; }

  std::string kernel_name() const override { return std::string("cpu_") + engine_.table().isa; }
  std::string device_name() const override { return "cpu"; }
  double bandwidth() const override { return 0; }
  RunStats stats() const override;

 private:
  const cpu::KernelTable& kernels(const Params& params);

  const AttentionOptions options_;
  const cpu::KernelTable& built_in_;
  /// Of the user's variant, by cpu::Compute; none: not asked for yet.
  std::optional<cpu::KernelTable> custom_[2];
  cpu::Engine engine_;
  std::shared_ptr<PlanMemory> plans_ = std::make_shared<HeapPlanMemory>();
  HostPlan plan_;
  std::vector<int32_t> resolved_;  ///< of a plan of bounds, with the lengths
  char* workspace_ = nullptr;
  cpu::AlignedBuffer owned_;
};

}  // namespace flashbsr::api
