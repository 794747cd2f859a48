// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "cpu_backend.h"

#include <cstring>

#include <flashbsr/core/resolve.h>

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
  resolved_.clear();
  const PlanHeader& h = plan.plan.header();
  workspace_ = borrowed.workspace
                   ? borrowed.workspace
                   : owned_.fit(partial_bytes(h.max_partial_rows, options_.head_dim_vo));
}

void CpuBackend::resolve(const LengthViews& views, const ResolveOptions& options) {
  const PlanHeader& h = plan_.plan.header();
  if (resolved_.empty()) resolved_.assign(plan_.plan.data, plan_.plan.data + h.total_size);
  if (options.check) check_lengths(views.lengths.kv_lens, plan_.plan);
  BoundPlan(resolved_.data()).resolve(views.lengths, 0, 1);
  PlanHeader& now = *reinterpret_cast<PlanHeader*>(resolved_.data());
  const flashbsr::detail::PageRange range =
      flashbsr::detail::range_of(resolved_.data() + h.off_kv_indices, h.num_kv_indices);
  if (range.signs < 0) {
    resolved_.clear();
    throw Error(ErrorCode::kIndexRange, "block_tables", "a negative page id",
                "ids of pages for all tokens of kv_lens");
  }
  now.num_kv_rows = range.highest + 1;
}

/// Which type products are made in, and so which kernels to compile, depends on the arrays.
const cpu::KernelTable& CpuBackend::kernels(const Params& params) {
  if (!options_.custom_variant) return built_in_;
  const cpu::Compute compute =
      options_.rewrites_rows ? cpu::Compute::kF32 : cpu::compute_for(built_in_, params);
  std::optional<cpu::KernelTable>& table = custom_[static_cast<int>(compute)];
  if (!table) {
    const cpu::KernelTable& level = cpu::level_for(compute);
    table = cpu::load_table(options_.provider->cpu_library(level.isa), level);
  }
  return *table;
}

void CpuBackend::run(Params& params, const RunOptions&) {
  PlanView plan = plan_.plan;
  if (plan.header().off_bounds) {
    if (resolved_.empty()) lengths_missing("run(kv_lens=, block_tables=) or update()");
    plan = PlanView{resolved_.data()};
    const int64_t pages = min_of(params.k.pages, params.v.pages);
    if (plan.header().num_kv_rows > pages) {
      throw Error(ErrorCode::kIndexRange, "kv", std::to_string(pages) + " pages",
                  "at least " + std::to_string(plan.header().num_kv_rows) +
                      ", which the page tables refer to");
    }
  }
  const PlanHeader& h = plan.header();
  params.custom_mask = plan_.mask;
  params.rope = plan_.rope;
  if (!params.alibi_slopes) params.alibi_slopes = plan_.slopes;
  place_partials(params, h, workspace_, options_.head_dim_vo);
  engine_.use(kernels(params));
  engine_.run(plan, params, options_.activation);
  for (int64_t t = h.num_q_tokens_now; t < h.num_q_tokens; ++t) {
    for (int32_t head = 0; head < h.num_qo_heads; ++head) {
      std::memset(params.out.row(t, head), 0,
                  static_cast<size_t>(params.out.dim) * dtype_size(params.out.dtype));
      if (params.lse) {
        params.lse[t * params.lse_stride_token + head * params.lse_stride_head] = -infinity();
      }
    }
  }
}

RunStats CpuBackend::stats() const {
  return {.kernel_seconds = engine_.stats().kernel_seconds,
          .busy_seconds = engine_.stats().busy_seconds,
          .threads = engine_.threads()};
}

}  // namespace flashbsr::api
