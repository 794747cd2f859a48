// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of K and V to codes with a scale of every token, head and group, and back. The formulas are
// in docs/kv-quantization.md. Host code, called through views.
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/core/params.h>

namespace flashbsr::cpu {

/// Of one group: the scale as it is stored (with int4's zero point), and what its codes are made
/// with: round(x * inverse + zero).
struct GroupScale {
  float stored;
  float inverse;
  float zero;
};

/// Divides the range by what codes can say, and rounds to the type of the scales.
inline GroupScale group_scale(const float* x, int count, DType codes, DType scales) {
  float low = 0, high = 0, poison = 0;
  for (int i = 0; i < count; ++i) {
    low = min_of(low, x[i]);
    high = max_of(high, x[i]);
    poison += x[i] - x[i];  // NaN for NaN and infinities
  }
  const auto inverse_of = [](float scale) { return scale == 0 ? 0.0f : 1.0f / scale; };
  if (poison != 0) return {bits_float(0x7fc00000u), 0, 0};
  if (codes == DType::kI4) {
    const float scale = int4_scale((high - low) / 15.0f), inverse = inverse_of(scale);
    const int32_t zero = round_within(-low * inverse, 0, 15);
    return {bits_float(float_bits(scale) | static_cast<uint32_t>(zero)), inverse,
            static_cast<float>(zero)};
  }
  const float most = codes == DType::kI8     ? 127.0f
                     : codes == DType::kE4M3 ? 448.0f
                     : codes == DType::kE5M2 ? 57344.0f
                                             : 6.0f;
  char rounded[4] = {};
  const float scale = max_of(high, -low) / most;
  // The largest of float16: a scale of infinity would make NaN of a finite row.
  store_from_float(rounded, 0, scales, scales == DType::kF16 ? min_of(scale, 65504.0f) : scale);
  const float stored = load_as_float(rounded, 0, scales);
  return {stored, inverse_of(stored), 0};
}

/// Writes the codes of a row and its scales. `scales` says their type and number.
inline void quantize_row(const float* x, int dim, DType codes, char* row, const PagedView& scales,
                         char* scale_row) {
  const int size = dim / scales.dim;
  for (int g = 0; g < scales.dim; ++g) {
    const GroupScale s = group_scale(x + g * size, size, codes, scales.dtype);
    store_from_float(scale_row, g, scales.dtype, s.stored);
    for (int d = g * size; d < (g + 1) * size; ++d) {
      store_from_float(row, d, codes, x[d] * s.inverse + s.zero);
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
