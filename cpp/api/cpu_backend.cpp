// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "cpu_backend.h"

#include "../cpu/dispatch.h"
#include "../cpu/library.h"

namespace flashbsr::api {

CpuBackend::CpuBackend(const AttentionOptions& options)
    : options_(options),
      built_in_(cpu::chosen_table()),
      engine_(built_in_, options.num_threads > 0 ? options.num_threads : cpu::available_cores()) {}

/// As many queues as twice the cores, and never fewer than 32: the thread count is left out, so
/// that results do not depend on it.
Workers CpuBackend::limits(const Batch&) {
  DeviceLimits limits;
  limits.num_workers = max_of(32, 2 * cpu::available_cores());
  return limits;
}

void CpuBackend::take_plan(const HostPlan& plan, const Borrowed& borrowed, void*) {
  plan_ = plan;
  const PlanHeader& h = plan.plan.header();
  workspace_ = borrowed.workspace
                   ? borrowed.workspace
                   : owned_.fit(partial_bytes(h.max_partial_rows, options_.head_dim_vo));
}

/// Which type products are made in, and so which kernels to compile, depends on the arrays.
const cpu::KernelTable& CpuBackend::kernels(const Params& params) {
  if (!options_.custom_variant) return built_in_;
  const cpu::Compute compute =
      options_.rewrites_rows ? cpu::Compute::kF32 : cpu::compute_for(built_in_, params);
  const cpu::KernelTable*& table = custom_[static_cast<int>(compute)];
  if (!table) {
    table = &cpu::load_table(options_.provider->cpu_library(cpu::level_for(compute)));
  }
  return *table;
}

void CpuBackend::run(Params& params, const RunOptions&) {
  const PlanHeader& h = plan_.plan.header();
  params.custom_mask = plan_.mask;
  params.rope = plan_.rope;
  if (!params.alibi_slopes) params.alibi_slopes = plan_.slopes;
  place_partials(params, h, workspace_, options_.head_dim_vo);
  engine_.use(kernels(params));
  engine_.run(plan_.plan, params, options_.activation);
}

RunStats CpuBackend::stats() const {
  return {.kernel_seconds = engine_.stats().kernel_seconds,
          .busy_seconds = engine_.stats().busy_seconds,
          .threads = engine_.threads()};
}

}  // namespace flashbsr::api
