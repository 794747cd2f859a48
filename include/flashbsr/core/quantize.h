// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// How a group of elements becomes codes with a scale (docs/kv-quantization.md): the same bits on
// the host and on a device.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr {

/// Of one group: the scale as it is stored (of int4 with its zero point), and what codes are made
/// with.
struct GroupScale {
  float stored = 0;
  float inverse = 0;
  float zero = -0.0f;  ///< adds nothing, not even to the sign of a zero

  /// What rounds to the code of x: 0 where all of the group are nearly 0, or one is not finite.
  /// Both operations round, wherever it is computed.
  FLASHBSR_FN float code_of(float x) const {
    if (!(inverse > 0)) return 0;
#if defined(__CUDA_ARCH__)
    return __fadd_rn(__fmul_rn(x, inverse), zero);
#else
    return x * inverse + zero;
#endif
  }
};

FLASHBSR_FN constexpr float largest_code(DType codes) {
  return codes == DType::kI8     ? 127.0f
         : codes == DType::kE4M3 ? 448.0f
         : codes == DType::kE5M2 ? 57344.0f
                                 : 6.0f;
}

/// Of a scale that float32 has in full; below, where this would be infinite, codes are 0.
FLASHBSR_FN float inverse_of(float scale) { return scale < 0x1p-126f ? 0.0f : 1.0f / scale; }

/// Divides the range of a group by what codes can say, and rounds to the type of the scales.
/// @param low, high  of its elements and of 0
/// @param finite     whether all of them are finite; otherwise the scale is NaN
FLASHBSR_FN GroupScale scale_of(float low, float high, bool finite, DType codes, DType scales) {
  GroupScale s;
  if (!finite) {
    s.stored = bits_float(0x7fc00000u);
    return s;
  }
  if (codes == DType::kI4) {
    const float scale = int4_scale((high - low) / 15.0f);
    s.inverse = inverse_of(scale);
    const int32_t zero = round_within(s.code_of(-low), 0, 15);
    s.stored = bits_float(float_bits(scale) | static_cast<uint32_t>(zero));
    s.zero = static_cast<float>(zero);
    return s;
  }
  const float scale = max_of(high, -low) / largest_code(codes);
  s.stored = scale;
  // The largest of float16: a scale of infinity would make NaN of a finite row.
  if (scales == DType::kF16) s.stored = f16_to_float(float_to_f16(min_of(scale, 65504.0f)));
  if (scales == DType::kE4M3) s.stored = e4m3_to_float(float_to_e4m3(scale));
  s.inverse = inverse_of(s.stored);
  return s;
}

/// Of `count` elements in a row.
FLASHBSR_FN GroupScale scale_of(const float* x, int count, DType codes, DType scales) {
  float low = 0, high = 0;
  bool finite = true;
  for (int i = 0; i < count; ++i) {
    low = min_of(low, x[i]);
    high = max_of(high, x[i]);
    finite = finite && x[i] - x[i] == 0;  // NaN for NaN and infinities
  }
  return scale_of(low, high, finite, codes, scales);
}

/// Elements that share a scale of NVFP4.
inline constexpr int kNvfp4Group = 16;

}  // namespace flashbsr
