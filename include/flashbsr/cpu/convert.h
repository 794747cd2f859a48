// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A vector of any element type to float and back. Widening is exact; narrowing rounds to nearest
// even, as the scalar functions in core/dtype.h, against which the tests hold these.
#pragma once

#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Small formats whose exponent fits float's: move the fields, rebias, and treat the two
/// exceptions.
template <int kExp, int kMan, bool kFinite>
FLASHBSR_FN FloatV minifloat_to_float_v(UintV h) {
  constexpr int kBias = (1 << (kExp - 1)) - 1;
  constexpr uint32_t kMagnitude = (1u << (kExp + kMan)) - 1;
  const UintV sign = (h & (1u << (kExp + kMan))) << (31 - kExp - kMan);
  const UintV magnitude = h & kMagnitude;
  const UintV normal = (magnitude << (23 - kMan)) + (static_cast<uint32_t>(127 - kBias) << 23);
  // Subnormals by integer to float conversion: no denormal operands, whatever the FPU mode.
  const float unit = bits_float(static_cast<uint32_t>(127 + 1 - kBias - kMan) << 23);
  const FloatV small = __builtin_convertvector(reinterpret_cast<IntV>(magnitude), FloatV) * unit;
  FloatV value = select(reinterpret_cast<IntV>(magnitude < (1u << kMan)), small, as_float(normal));
  constexpr uint32_t kSpecial = kFinite ? kMagnitude : ((1u << kExp) - 1) << kMan;
  const UintV special = kFinite ? UintV{} + 0x7fc00000u : normal | 0x7f800000u;
  value = select(reinterpret_cast<IntV>(magnitude >= kSpecial), as_float(special), value);
  return as_float(bits(value) | sign);
}

/// float8 by way of fp16, of which e5m2 is the upper byte. Bits of e4m3 in their places there are
/// x / 256, but for NaN, which is 1.875: eight instructions in place of fourteen.
template <DType T>
FLASHBSR_FN FloatV load_float8(const void* p) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepi8_epi16(load<__m128i>(p));
  if constexpr (T == DType::kE5M2) return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
  // What sign extension leaves beside the sign.
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
  const FloatV x = FloatV(_mm512_cvtph_ps(half)) * 256.0f;
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  if constexpr (T == DType::kE5M2) return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
  const __m128i half =
      _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
  const FloatV x = FloatV(_mm256_cvtph_ps(half)) * 256.0f;
#else
  if constexpr (T == DType::kE5M2) return minifloat_to_float_v<5, 2, false>(widen8(p));
  return minifloat_to_float_v<4, 3, true>(widen8(p));
#endif
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))
  const IntV size = reinterpret_cast<IntV>(bits(x) & 0x7fffffffu);
  const IntV nan = size > 0x43e00000;  // 448
  return as_float(bits(x) | reinterpret_cast<UintV>(nan));
#endif
}

template <DType T>
FLASHBSR_FN FloatV load_as(const void* p) {
  if constexpr (T == DType::kF32) {
    return load<FloatV>(p);
  } else if constexpr (T == DType::kBF16) {
    return as_float(widen16(p) << 16);
  } else if constexpr (T == DType::kF16) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(p));
#else
    return minifloat_to_float_v<5, 10, false>(widen16(p));
#endif
  } else if constexpr (T == DType::kI8) {
    return __builtin_convertvector(widen_i8(p), FloatV);
  } else {
    static_assert(T == DType::kE4M3 || T == DType::kE5M2);
    return load_float8<T>(p);
  }
}

/// The upper halves of floats, rounded to nearest even; NaN stays NaN.
FLASHBSR_FN U16V to_bf16(FloatV x) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh(x);
  U16V out;
  std::memcpy(&out, &h, sizeof(out));
  return out;
#else
  const UintV u = bits(x);
  const UintV rounded = u + 0x7fffu + ((u >> 16) & 1u);
  const IntV nan = x != x;
  const UintV kept = reinterpret_cast<UintV>(nan ? reinterpret_cast<IntV>(u | 0x400000u)
                                                 : reinterpret_cast<IntV>(rounded));
  return __builtin_convertvector(kept >> 16, U16V);
#endif
}

template <DType T>
FLASHBSR_FN void store_as(void* p, FloatV x) {
  if constexpr (T == DType::kF32) {
    store(p, x);
  } else if constexpr (T == DType::kBF16) {
    store(p, to_bf16(x));
  } else {
    static_assert(T == DType::kF16);
#if defined(__AVX512F__)
    store(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    store(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < kLanes; ++i) static_cast<uint16_t*>(p)[i] = float_to_f16(x[i]);
#endif
  }
}

/// n elements of a row to floats.
template <DType T>
FLASHBSR_FN void row_to_float(const char* src, float* dst, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(dst + i, load_as<T>(src + static_cast<int64_t>(i) * dtype_size(T)));
  }
  for (; i < n; ++i) dst[i] = load_as_float(src, i, T);
}

/// n floats to a row of any output type.
template <DType T>
FLASHBSR_FN void row_from_float(const float* src, char* dst, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store_as<T>(dst + static_cast<int64_t>(i) * dtype_size(T), load<FloatV>(src + i));
  }
  for (; i < n; ++i) store_from_float(dst, i, T, src[i]);
}

/// Run-time type to compile-time type: calls f.template operator()<T>(). Not of packed codes, which
/// mean nothing without their scales (codes.h).
template <class F>
FLASHBSR_FN void with_dtype(DType t, F&& f) {
  switch (t) {
    case DType::kF32: f.template operator()<DType::kF32>(); break;
    case DType::kF16: f.template operator()<DType::kF16>(); break;
    case DType::kBF16: f.template operator()<DType::kBF16>(); break;
    case DType::kE4M3: f.template operator()<DType::kE4M3>(); break;
    case DType::kE5M2: f.template operator()<DType::kE5M2>(); break;
    case DType::kI8: f.template operator()<DType::kI8>(); break;
    case DType::kI4:
    case DType::kE2M1: break;
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
