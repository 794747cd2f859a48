// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "cpu_backend.h"

#include "../cpu/dispatch.h"

namespace flashbsr::api {

CpuBackend::CpuBackend(const AttentionOptions& options)
    : activation_(options.activation),
      head_dim_vo_(options.head_dim_vo),
      engine_(cpu::chosen_table(),
              options.num_threads > 0 ? options.num_threads : cpu::available_cores()) {}

/// As many queues as twice the cores, and never fewer than 32: the thread count is left out, so
/// that results do not depend on it.
DeviceLimits CpuBackend::limits(const Batch&) {
  DeviceLimits limits;
  limits.num_workers = max_of(32, 2 * cpu::available_cores());
  return limits;
}

void CpuBackend::take_plan(const HostPlan& plan, char* workspace, void*) {
  plan_ = plan;
  const PlanHeader& h = plan.plan.header();
  workspace_ =
      workspace ? workspace : owned_.fit(partial_bytes(h.max_slots, h.tile_rows, head_dim_vo_));
}

void CpuBackend::run(Params& params, const RunOptions&) {
  const PlanHeader& h = plan_.plan.header();
  params.custom_mask = plan_.mask;
  params.rope = plan_.rope;
  if (!params.alibi_slopes) params.alibi_slopes = plan_.slopes;
  place_partials(params, h, workspace_, head_dim_vo_);
  engine_.run(plan_.plan, params, activation_);
}

RunStats CpuBackend::stats() const {
  return {.kernel_seconds = engine_.stats().kernel_seconds,
          .busy_seconds = engine_.stats().busy_seconds,
          .threads = engine_.threads()};
}

}  // namespace flashbsr::api
