// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What kernels behind attention do to rows of outputs, on the host.
#pragma once

#include <cstring>

#include <flashbsr/core/quantize.h>
#include <flashbsr/kernel/ops/args.h>

namespace fake {

inline void clear_rows(const flashbsr::ops::ClearRowsArgs& a) {
  for (int64_t t = a.header->num_q_tokens_now; t < a.header->num_q_tokens; ++t) {
    for (int32_t h = 0; h < a.out.heads; ++h) {
      std::memset(a.out.row(t, h), 0,
                  static_cast<size_t>(a.out.dim) * flashbsr::dtype_size(a.out.dtype));
      if (a.lse) a.lse[t * a.lse_stride_token + h * a.lse_stride_head] = -flashbsr::infinity();
    }
  }
}

inline void quantize_outputs(const flashbsr::ops::QuantizeOutputsArgs& a) {
  constexpr flashbsr::DType kCodes = flashbsr::DType::kE2M1, kScales = flashbsr::DType::kE4M3;
  constexpr int kGroup = flashbsr::kNvfp4Group;
  for (int64_t t = 0; t < a.header->num_q_tokens; ++t) {
    for (int32_t h = 0; h < a.in.heads; ++h) {
      const auto* x = reinterpret_cast<const float*>(a.in.row(t, h));
      for (int32_t g = 0; g < a.scales.dim; ++g, x += kGroup) {
        const flashbsr::GroupScale s = flashbsr::scale_of(x, kGroup, kCodes, kScales);
        flashbsr::store_from_float(a.scales.row(t, h), g, kScales, s.stored);
        for (int i = 0; i < kGroup; ++i) {
          flashbsr::store_from_float(a.codes.row(t, h), g * kGroup + i, kCodes, s.code_of(x[i]));
        }
      }
    }
  }
}

}  // namespace fake
