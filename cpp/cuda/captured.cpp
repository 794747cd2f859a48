// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "captured.h"

#include <flashbsr/core/error.h>

namespace flashbsr::cuda {

/// A replay has the arguments of the captured launch: pointers, arrays, grid. Whatever they could
/// not serve must not be planned.
void check_captured(const Captured& c, const KernelRow& kernel, const api::HostPlan& plan) {
  if (c.kernel != &kernel) {
    throw Error(ErrorCode::kPlan, "plan", std::string("a batch for ") + kernel.name,
                std::string("one for ") + c.kernel->name +
                    ", which a captured run has (custom masks, types and, where splits are fixed, "
                    "a qo_indptr decide); take another flashbsr.Attention");
  }
  const PlanHeader& h = plan.plan.header();
  const auto refuse = [](const char* name, const std::string& actual, const std::string& most) {
    throw Error(ErrorCode::kCapacity, name, actual, most + ", since a captured run has that much");
  };
  if (((h.flags & kPlanPaged) != 0) != c.paged || h.page_size != c.page_size) {
    const auto text = [](bool paged, int32_t size) {
      return paged ? "pages of " + std::to_string(size) : std::string("ragged KV");
    };
    throw Error(ErrorCode::kPlan, "layout", text((h.flags & kPlanPaged) != 0, h.page_size),
                text(c.paged, c.page_size) +
                    ", as for the captured run; another flashbsr.Attention for the other");
  }
  if ((h.off_bounds != 0) != c.bounds) {
    throw Error(ErrorCode::kPlan, "layout", c.bounds ? "lengths" : "bounds",
                std::string(c.bounds ? "bounds" : "lengths") +
                    ", as for the captured run; another flashbsr.Attention for the other");
  }
  if ((plan.mask != nullptr) != c.masked) {
    throw Error(ErrorCode::kPlan, "custom_mask", c.masked ? "None" : "an array",
                std::string(c.masked ? "an array" : "None") +
                    ", as for the captured run; another flashbsr.Attention for the other");
  }
  if (h.num_q_tokens > c.q_rows) {
    refuse("qo_indptr", std::to_string(h.num_q_tokens) + " query tokens",
           "at most " + std::to_string(c.q_rows));
  }
  if (h.num_kv_rows > c.kv_rows) {
    refuse(c.paged ? "kv_indices" : "kv_indptr",
           std::to_string(h.num_kv_rows) + (c.paged ? " pages" : " token rows"),
           "at most " + std::to_string(c.kv_rows));
  }
  if (h.num_kv_tokens != c.kv_tokens) {
    throw Error(ErrorCode::kPlan, "N", std::to_string(h.num_kv_tokens) + " KV tokens",
                std::to_string(c.kv_tokens) +
                    " as for the captured run (0: whole blocks), whose last block is as short");
  }
}

}  // namespace flashbsr::cuda
