// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The last steps of a row, shared by unsplit items and merges: sink, v scale, output type, LSE
// unit; and the merge itself.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/core/quantize.h>
#include <flashbsr/core/state.h>
#include <flashbsr/cpu/built_in.h>
#include <flashbsr/cpu/convert.h>
#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// As NVFP4: codes, and a scale of each 16.
FLASHBSR_FN void write_codes(const Params& p, const float* o, int64_t token, int32_t head) {
  char* const codes = p.out.row(token, head);
  char* const scales = p.out_scales.row(token, head);
  for (int g = 0; g < p.out_scales.dim; ++g) {
    const float* x = o + g * kNvfp4Group;
    const GroupScale s = scale_of(x, kNvfp4Group, DType::kE2M1, DType::kE4M3);
    store_from_float(scales, g, DType::kE4M3, s.stored);
    for (int i = 0; i < kNvfp4Group; ++i) {
      store_from_float(codes, g * kNvfp4Group + i, DType::kE2M1, s.code_of(x[i]));
    }
  }
}

/// Writes normalised `o` [D_vo] (overwritten) and its base-2 `lse`.
template <class Variant>
FLASHBSR_FN void write_row(const Params& p, const Variant& variant, bool softmax, const RowAt& at,
                           int32_t kv_head, float* o, float lse) {
  float scale = p.out_scale * (p.v_head_scale ? p.v_head_scale[kv_head] : 1.0f);
  if (softmax && p.sinks) {
    const MergeWeights w = sink_weights(lse, p.sinks[at.head]);
    scale *= w.weight_a;
    lse = w.lse;
  }
  for (int d = 0; d < p.v.dim; ++d) o[d] *= scale;
  if constexpr (Variant::transforms_outputs) variant.output_transform(o, at);
  const int64_t token = int64_t{at.request->q_begin} + at.token;
  char* dst = p.out.row(token, at.head);
  switch (p.out.dtype) {
    case DType::kF16: row_from_float<DType::kF16>(o, dst, p.v.dim); break;
    case DType::kBF16: row_from_float<DType::kBF16>(o, dst, p.v.dim); break;
    case DType::kE4M3:
      for (int d = 0; d < p.v.dim; ++d) store_from_float(dst, d, DType::kE4M3, o[d]);
      break;
    case DType::kE2M1: write_codes(p, o, token, at.head); break;
    default: row_from_float<DType::kF32>(o, dst, p.v.dim); break;
  }
  if (p.lse) p.lse[token * p.lse_stride_token + at.head * p.lse_stride_head] = lse * p.lse_unit;
}

/// Calls visit(first row of the state) for all states of a merge, in order.
template <class Visit>
FLASHBSR_FN void for_each_state(PlanView plan, const Merge& m, const Visit& visit) {
  const MergePart own{m.slot, m.state_count, m.row_count, 0};
  const MergePart* parts = m.part < 0 ? &own : plan.merge_parts() + m.part;
  for (int32_t p = 0; p < (m.part < 0 ? 1 : m.part_count); ++p) {
    for (int32_t i = 0; i < parts[p].count; ++i) visit(parts[p].slot + i * parts[p].stride);
  }
}

/// Contracts the partial states of a merge, one after another: deterministic. States of variants
/// without softmax add up.
template <class Variant>
void merge_tile(const Params& p, PlanView plan, Activation activation, int32_t index) {
  const bool softmax = has_softmax<Variant>(activation);
  const Variant variant(p);
  const PlanHeader& h = plan.header();
  const Merge& m = plan.merges()[index];
  const Request request = counted(h, plan.requests()[m.request]);
  const int32_t position = first_position(plan.requests()[m.request]);
  float o[kMaxHeadDim];
  for (int32_t r = 0; r < m.row_count; ++r) {
    float top = -infinity();
    if (softmax) {
      for_each_state(plan, m, [&](int64_t slot) { top = max_of(p.partial_lse[slot + r], top); });
    }
    float sum = 0;
    for (int d = 0; d < p.v.dim; ++d) o[d] = 0;
    for_each_state(plan, m, [&](int64_t slot) {
      float weight = 1.0f;
      if (softmax) {
        const float lse = p.partial_lse[slot + r];
        weight = lse == -infinity() ? 0.0f : __builtin_exp2f(lse - top);
        sum += weight;
      }
      const float* part = p.partial_out + (slot + r) * p.v.dim;
      for (int d = 0; d < p.v.dim; ++d) o[d] += weight * part[d];
    });
    float lse = 0;
    if (softmax) {
      const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
      for (int d = 0; d < p.v.dim; ++d) o[d] *= inverse;
      lse = sum == 0 ? -infinity() : top + __builtin_log2f(sum);
    }
    const int32_t packed = m.row_begin + r;
    const int32_t token = packed / h.group_size;
    const RowAt at{&request, token, position + token,
                   m.kv_head * h.group_size + packed % h.group_size, p.v.dim};
    write_row(p, variant, softmax, at, m.kv_head, o, lse);
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
