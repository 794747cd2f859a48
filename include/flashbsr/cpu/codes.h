// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of K and V with scales of every token and head (docs/kv-quantization.md). Codes go into the
// products: they are exact in bf16. Scales are multiplied into logits and weights, group by group
// of a row's dims. Where rows are edited on their way (RoPE, a variant's hooks) they take their
// scales first, and products are in float.
#pragma once

#include <flashbsr/core/params.h>
#include <flashbsr/cpu/convert.h>
#include <flashbsr/cpu/kernel_table.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// K or V of a tile: row pointers, and those of the rows' scales.
struct Operand {
  const PagedView& x;
  const PagedView& scales;  ///< without data: none
  const char* const* rows;
  const char* const* scale_rows;
  bool scaled;  ///< rows take their scales: whoever reads them does not

  int groups() const { return scales.data ? scales.dim : 1; }
  int group_size() const { return x.dim / groups(); }
  /// From token `first` on.
  Operand from(int first) const { return {x, scales, rows + first, scale_rows + first, scaled}; }
};

/// Codes of NVFP4 take the scales of their 16 with them: the product is exact in bf16.
FLASHBSR_FN bool folds(const PagedView& x, const PagedView& scales) {
  return scales.data != nullptr && x.dtype != DType::kE2M1;
}

FLASHBSR_FN float scale_at(const PagedView& scales, const char* row, int group) {
  return load_as_float(row, group, scales.dtype);
}

/// 2 x kLanes codes of four bits: lane i of `even` and `odd` has those of byte i.
FLASHBSR_FN void unpack_codes(const char* bytes, IntV& even, IntV& odd) {
  const UintV both = widen8(bytes);
  even = reinterpret_cast<IntV>(both & 15u);
  odd = reinterpret_cast<IntV>(both >> 4);
}

/// 16 codes in order, from 8 bytes.
#if defined(__AVX2__)
FLASHBSR_FN __m128i unpack_16(const char* bytes) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  return _mm_unpacklo_epi8(_mm_and_si128(both, mask), _mm_and_si128(_mm_srli_epi16(both, 4), mask));
}

/// 16 integers of a byte, times `scale`.
FLASHBSR_FN void store_16(float* dst, __m128i codes, float scale) {
  alignas(16) char bytes[16];
  if constexpr (kLanes == 16) {
    _mm_store_si128(reinterpret_cast<__m128i*>(bytes), codes);
    store(dst, __builtin_convertvector(widen_i8(bytes), FloatV) * scale);
  } else {
#if !defined(__AVX512F__)
    const auto half = [&](__m128i x) {
      return FloatV(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x))) * scale;
    };
    store(dst, half(codes));
    store(dst + kLanes, half(_mm_unpackhi_epi64(codes, codes)));
#endif
  }
}
#endif

/// `count` codes around a zero point, times `scale`, exact for a scale of one.
FLASHBSR_FN void int4_to_float(const char* src, float* dst, int count, int32_t zero, float scale) {
  int i = 0;
#if defined(__AVX2__)
  const __m128i zeros = _mm_set1_epi8(static_cast<char>(zero));
  for (; i + 16 <= count; i += 16) {
    store_16(dst + i, _mm_sub_epi8(unpack_16(src + i / 2), zeros), scale);
  }
#else
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    IntV even, odd;
    unpack_codes(src + i / 2, even, odd);
    store_zipped(dst + i, __builtin_convertvector(even - zero, FloatV) * scale,
                 __builtin_convertvector(odd - zero, FloatV) * scale);
  }
#endif
  for (; i < count; ++i) {
    dst[i] = static_cast<float>(static_cast<int32_t>(packed_code(src, i)) - zero) * scale;
  }
}

/// Codes of e2m1 as floats.
FLASHBSR_FN FloatV e2m1_to_float_v(IntV code) {
  const IntV size = code & 7;
  // From 1 on exponent and mantissa are float's own; below there are 0 and 0.5.
  const FloatV large = as_float(reinterpret_cast<UintV>((size << 22) + (126 << 23)));
  const FloatV small = __builtin_convertvector(size, FloatV) * 0.5f;
  const FloatV value = select(size < 2, small, large);
  return as_float(bits(value) | (reinterpret_cast<UintV>(code & 8) << 28));
}

/// A row of NVFP4: a scale of e4m3 for each 16 codes, exact in float and in bf16.
FLASHBSR_FN void nvfp4_to_float(const char* src, const char* scales, float* dst, int dim) {
#if defined(__AVX2__)
  // Twice of what codes mean are integers.
  const __m128i halves = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int g = 0; g < dim / 16; ++g) {
    const float scale = 0.5f * e4m3_to_float(static_cast<uint8_t>(scales[g]));
    store_16(dst + 16 * g, _mm_shuffle_epi8(halves, unpack_16(src + 8 * g)), scale);
  }
#else
  int i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    IntV even, odd;
    unpack_codes(src + i / 2, even, odd);
    store_zipped(dst + i, e2m1_to_float_v(even), e2m1_to_float_v(odd));
  }
  for (; i < dim; ++i) dst[i] = e2m1_to_float(packed_code(src, i));
  for (int g = 0; g < dim / 16; ++g) {
    const float scale = e4m3_to_float(static_cast<uint8_t>(scales[g]));
    for (int d = g * 16; d < g * 16 + 16; d += kLanes) store(dst + d, load(dst + d) * scale);
  }
#endif
}

/// Row i of the operand as floats. Not inlined: its users differ by words, by edits and by K and V,
/// and a copy for each was half of a level's machine code and of its time to compile.
template <DType T>
__attribute__((noinline)) void codes_to_float(const Operand& o, int i, float* row) {
  const char* src = o.rows[i];
  if constexpr (T == DType::kI4) {
    const int size = o.group_size();
    for (int g = 0; g < o.groups(); ++g) {
      const float packed = scale_at(o.scales, o.scale_rows[i], g);
      int4_to_float(src + g * size / 2, row + g * size, size, int4_zero(packed),
                    o.scaled ? int4_scale(packed) : 1.0f);
    }
  } else if constexpr (T == DType::kE2M1) {
    nvfp4_to_float(src, o.scale_rows[i], row, o.x.dim);
  } else {
    row_to_float<T>(src, row, o.x.dim);
    if (!o.scaled || !o.scales.data) return;
    const int size = o.group_size();
    for (int g = 0; g < o.groups(); ++g) {
      const float scale = scale_at(o.scales, o.scale_rows[i], g);
      for (int d = g * size; d < (g + 1) * size; ++d) row[d] *= scale;
    }
  }
}

/// Scales of every token as they are folded into logits and weights: [groups][`stride`].
struct FoldedScales {
  float* scale;
  uint16_t* lift;  ///< of int4: 16 less a zero point (code_pairs)
  int stride;

  FoldedScales from(int token) const {
    return {scale + token, lift ? lift + token : nullptr, stride};
  }
};

/// Those of `count` tokens that lie `step` bytes apart.
FLASHBSR_FN void load_scales(const PagedView& scales, const char* first, int64_t step, int count,
                             FoldedScales out) {
  for (int g = 0; g < scales.dim; ++g) {
    const char* at = first;
    float* const to = out.scale + g * out.stride;
    if (out.lift) {
      uint16_t* const lift = out.lift + g * out.stride;
      at += g * 4;
      for (int i = 0; i < count; ++i, at += step) {
        const uint32_t packed = load<uint32_t>(at);
        to[i] = bits_float(packed & ~15u);
        lift[i] = static_cast<uint16_t>(16 - (packed & 15u));
      }
    } else if (scales.dtype == DType::kF32) {
      at += g * 4;
      for (int i = 0; i < count; ++i, at += step) to[i] = bits_float(load<uint32_t>(at));
    } else {
      for (int i = 0; i < count; ++i, at += step) to[i] = scale_at(scales, at, g);
    }
  }
}

/// Calls f.template operator()<T>() for every type that K and V have.
template <class F>
FLASHBSR_FN void with_codes(DType t, F&& f) {
  switch (t) {
    case DType::kI4: f.template operator()<DType::kI4>(); break;
    case DType::kE2M1: f.template operator()<DType::kE2M1>(); break;
    default: with_dtype(t, f); break;
  }
}

/// codes_to_float of a type that is known at run time.
using RowReader = void (*)(const Operand&, int, float*);
FLASHBSR_FN RowReader row_reader(DType t) {
  RowReader reader = nullptr;
  with_codes(t, [&]<DType T>() { reader = &codes_to_float<T>; });
  return reader;
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
