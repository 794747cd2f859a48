// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Integers for products with int8 and int4 codes: what codes are multiplied with becomes digits to
// base 256, as many as a level's instruction has room for.
#pragma once

#include <flashbsr/cpu/codes.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Codes are taken so many at once.
inline constexpr int kChunkDims = 64;

/// Whether rows have codes that may be multiplied as integers.
FLASHBSR_FN bool whole_chunks(const PagedView& x, const PagedView& scales) {
  const bool codes = x.dtype == DType::kI8 || x.dtype == DType::kI4;
  return codes && scales.data && x.dim / scales.dim % kChunkDims == 0;
}

/// Calls f.operator()<T>() for the type of such codes.
template <class F>
FLASHBSR_FN void with_integers(DType codes, const F& f) {
  if (codes == DType::kI8) {
    f.template operator()<DType::kI8>();
  } else {
    f.template operator()<DType::kI4>();
  }
}

#if defined(__AVX512BW__)

/// 64 codes of a row, from byte `at * 64` of what is unpacked, less `zero`.
template <DType T>
FLASHBSR_FN __m512i load_codes(const char* row, int at, int zero) {
  if constexpr (T == DType::kI8) {
    return _mm512_loadu_si512(row + at * 64);
  } else {
    const __m512i bytes =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + at * 32)));
    const __m512i codes =
        _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi16(bytes, 4)), _mm512_set1_epi8(15));
    return _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(zero)));
  }
}

/// The zero point of group `g` of a row.
template <DType T>
FLASHBSR_FN int zero_of(const Operand& o, int i, int g) {
  return T == DType::kI4 ? static_cast<int>(load<uint32_t>(o.scale_rows[i] + g * 4) & 15) : 0;
}

/// `kDigits` digits of each element of a query row, the highest first: put(d, digit, value). The
/// leading digit ends at 127, one of which rounding may need. Returns what the whole number is to
/// be multiplied by. Queries so small that the inverse overflows are zeros.
template <int kDigits, class Put>
FLASHBSR_FN float split_row(const float* q, int dim, const Put& put) {
  float largest = 0, poison = 0;
  for (int d = 0; d < dim; ++d) {
    largest = max_of(largest, q[d] < 0 ? -q[d] : q[d]);
    poison += q[d] - q[d];
  }
  constexpr float kMost = 126.0f * static_cast<float>(1 << 8 * (kDigits - 1));
  const float inverse = largest > 0 ? kMost / largest : 0.0f;
  const bool finite = poison == 0 && inverse <= 0x1p126f;
  for (int d = 0; d < dim; ++d) {
    int32_t x = finite ? static_cast<int32_t>(__builtin_rintf(q[d] * inverse)) : 0;
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      const int8_t low = static_cast<int8_t>(x);
      put(d, digit, low);
      x = (x - low) >> 8;
    }
  }
  return poison == 0 ? (finite ? largest / kMost : 0.0f) : poison;
}

/// Likewise of the weights of a row times V's scales, in vectors: put(i, digit, 16 digits) for
/// tokens i to i + 15, up to `end`, where those from `count` on weigh nothing. Weights below 2^-96
/// of the tile's are zeros.
template <int kDigits, class Put>
FLASHBSR_FN float split_weights(const float* weights, const float* scale, int count, int end,
                                const Put& put) {
  FloatV largest{}, poison{};
  for (int i = 0; i < count; i += kLanes) {
    const FloatV w = load(weights + i) * load(scale + i);
    largest = max(largest, as_float(bits(w) & 0x7fffffffu));
    poison += w - w;
  }
  constexpr float kMost = 126.0f * static_cast<float>(1 << 8 * (kDigits - 1));
  const float top = reduce_max(largest), inverse = top > 0x1p-96f ? kMost / top : 0.0f;
  for (int i = 0; i < end; i += kLanes) {
    __m512i x = _mm512_setzero_si512();
    if (i < count) x = _mm512_cvtps_epi32(load(weights + i) * load(scale + i) * inverse);
#pragma GCC unroll 4
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      put(i, digit, _mm512_cvtepi32_epi8(x));
      // What is left when the digit, from -128 to 127, is taken away.
      x = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
    }
  }
  return top / kMost + reduce_add(poison);
}

/// Four tokens of 64 dims, interleaved by token: column 4 l + i of the j-th vector is dim
/// 16 l + 4 j + i.
FLASHBSR_FN void interleave_four(const __m512i (&x)[4], __m512i (&out)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi8(x[0], x[1]);
  const __m512i high01 = _mm512_unpackhi_epi8(x[0], x[1]);
  const __m512i low23 = _mm512_unpacklo_epi8(x[2], x[3]);
  const __m512i high23 = _mm512_unpackhi_epi8(x[2], x[3]);
  out[0] = _mm512_unpacklo_epi16(low01, low23);
  out[1] = _mm512_unpackhi_epi16(low01, low23);
  out[2] = _mm512_unpacklo_epi16(high01, high23);
  out[3] = _mm512_unpackhi_epi16(high01, high23);
}

/// o[0..64) += unit x, of sums whose columns are as interleave_four leaves them: a square of four
/// numbers each, turned.
FLASHBSR_FN void add_columns(const FloatV (&sums)[4], float unit, float* o) {
  __m512i x[4];
  for (int j = 0; j < 4; ++j) x[j] = reinterpret_cast<__m512i>(sums[j]);
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
  const __m512i b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
  const __m512i d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
  const __m512i out[4] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                          _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
  for (int l = 0; l < 4; ++l) {
    float* to = o + l * kLanes;
    store(to, load(to) + reinterpret_cast<FloatV>(out[l]) * unit);
  }
}

#endif  // __AVX512BW__

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
