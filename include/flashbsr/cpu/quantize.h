// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of K and V to codes with a scale of every token, head and group, and back. The formulas are
// in docs/kv-quantization.md. Host code, called through views.
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/core/params.h>
#include <flashbsr/core/quantize.h>

namespace flashbsr::cpu {

/// Writes the codes of a row and its scales. `scales` says their type and number.
inline void quantize_row(const float* x, int dim, DType codes, char* row, const PagedView& scales,
                         char* scale_row) {
  const int size = dim / scales.dim;
  for (int g = 0; g < scales.dim; ++g) {
    const GroupScale s = scale_of(x + g * size, size, codes, scales.dtype);
    store_from_float(scale_row, g, scales.dtype, s.stored);
    for (int d = g * size; d < (g + 1) * size; ++d) {
      store_from_float(row, d, codes, s.code_of(x[d]));
    }
  }
}

/// A row of codes times their scales.
inline void dequantize_row(const char* row, int dim, DType codes, const PagedView& scales,
                           const char* scale_row, float* x) {
  const int size = dim / scales.dim;
  for (int d = 0; d < dim; ++d) {
    const float code = load_as_float(row, d, codes);
    const float scale = load_as_float(scale_row, d / size, scales.dtype);
    x[d] = codes != DType::kI4 ? code * scale
                               : (code - static_cast<float>(int4_zero(scale))) * int4_scale(scale);
  }
}

}  // namespace flashbsr::cpu
