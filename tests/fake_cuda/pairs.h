// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Plans whose items read two KV heads, on an engine whose items read one.
#pragma once

#include <flashbsr/core/launch.h>

#include <string>
#include <vector>

namespace fake {

/// Every second head of K and V, from the first or from the second on.
inline flashbsr::Params every_second(flashbsr::Params p, int first) {
  for (flashbsr::PagedView* view : {&p.k, &p.v, &p.k_scales, &p.v_scales}) {
    view->data = view->row(0, 0, first);
    view->heads /= 2;
    view->stride_head *= 2;
  }
  return p;
}

/// Calls run(params), or where items read pairs of heads, for the first heads of all pairs and for
/// the second. All rows meet both; each keeps what its own head gave.
template <class Run>
void attend_pairs(const flashbsr::KernelArgs& args, const Run& run) {
  const flashbsr::Params& p = args.params;
  if (args.header->heads_of_item == 1) return run(p);
  const int32_t group = args.header->group_size;
  const size_t bytes = static_cast<size_t>(p.out.dim) * flashbsr::dtype_size(p.out.dtype);
  struct Row {
    std::string out;
    float lse;
  };
  std::vector<Row> kept;
  const auto each_first = [&](const auto& f) {
    size_t next = 0;
    for (int64_t token = 0; token < p.out.tokens; ++token) {
      for (int32_t head = 0; head < p.out.heads; ++head) {
        if (head % group >= group / 2) continue;
        float* lse =
            p.lse ? p.lse + token * p.lse_stride_token + head * p.lse_stride_head : nullptr;
        f(next++, p.out.row(token, head), lse);
      }
    }
  };
  run(every_second(p, 0));
  each_first([&](size_t, const char* out, const float* lse) {
    kept.push_back({std::string(out, bytes), lse ? *lse : 0.0f});
  });
  run(every_second(p, 1));
  each_first([&](size_t i, char* out, float* lse) {
    kept[i].out.copy(out, bytes);
    if (lse) *lse = kept[i].lse;
  });
}

}  // namespace fake
