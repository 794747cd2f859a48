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

/// Lanes of two vectors by turns.
FLASHBSR_FN void store_zipped(float* dst, FloatV even, FloatV odd) {
  [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    store(dst, __builtin_shufflevector(even, odd, (I / 2 + I % 2 * kLanes)...));
    store(dst + kLanes,
          __builtin_shufflevector(even, odd, (kLanes / 2 + I / 2 + I % 2 * kLanes)...));
  }(LaneSequence{});
}

/// `count` codes around a zero point, times `scale`, exact for a scale of one.
FLASHBSR_FN void int4_to_float(const char* src, float* dst, int count, int32_t zero, float scale) {
  int i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    IntV even, odd;
    unpack_codes(src + i / 2, even, odd);
    store_zipped(dst + i, __builtin_convertvector(even - zero, FloatV) * scale,
                 __builtin_convertvector(odd - zero, FloatV) * scale);
  }
  for (; i < count; ++i) {
    dst[i] = static_cast<float>(static_cast<int32_t>(packed_code(src, i)) - zero) * scale;
  }
}

/// Row i of the operand as floats.
template <DType T>
FLASHBSR_FN void codes_to_float(const Operand& o, int i, float* row) {
  const char* src = o.rows[i];
  if constexpr (T == DType::kI4) {
    const int size = o.group_size();
    for (int g = 0; g < o.groups(); ++g) {
      const float packed = scale_at(o.scales, o.scale_rows[i], g);
      int4_to_float(src + g * size / 2, row + g * size, size, int4_zero(packed),
                    o.scaled ? int4_scale(packed) : 1.0f);
    }
  } else if constexpr (T == DType::kE2M1) {
    const int size = o.group_size();
    for (int g = 0; g < o.groups(); ++g) {
      const float scale = scale_at(o.scales, o.scale_rows[i], g);
      for (int d = g * size; d < (g + 1) * size; ++d) {
        row[d] = e2m1_to_float(packed_code(src, d)) * scale;
      }
    }
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

/// The scales of one tile, folded into logits and weights: those of group g of token i at
/// [g * kKvTile + i], zeros behind the last token up to a whole vector.
FLASHBSR_FN void load_scales(const PagedView& scales, bool with_zero, const char* const* rows,
                             int count, int stride, float* out) {
  for (int g = 0; g < scales.dim; ++g, out += stride) {
    if (scales.dtype == DType::kF32) {
      const uint32_t mask = with_zero ? ~15u : ~0u;
      for (int i = 0; i < count; ++i) out[i] = bits_float(load<uint32_t>(rows[i] + g * 4) & mask);
    } else {
      for (int i = 0; i < count; ++i) out[i] = scale_at(scales, rows[i], g);
    }
    for (int i = count; i < round_up(count, kLanes); ++i) out[i] = 0;
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

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
