// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One vector width per SIMD level, on the GCC/Clang vector extension: the arithmetic below is plain
// operators, and compiles to SSE2, AVX2, AVX-512 or NEON alike. Intrinsics only where the compiler
// does not find the instruction by itself (max, fp16, bf16 dot product).
#pragma once

#include <cstring>

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about its own _mm512_undefined_ps() (gcc.gnu.org/PR105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using FloatV = float __attribute__((vector_size(4 * kLanes)));
using IntV = int32_t __attribute__((vector_size(4 * kLanes)));
using UintV = uint32_t __attribute__((vector_size(4 * kLanes)));

FLASHBSR_FN FloatV splat(float x) { return x - FloatV{}; }
FLASHBSR_FN IntV splat_int(int32_t x) { return x - IntV{}; }
FLASHBSR_FN UintV bits(FloatV x) { return reinterpret_cast<UintV>(x); }
FLASHBSR_FN FloatV as_float(UintV x) { return reinterpret_cast<FloatV>(x); }

template <class V = FloatV>
FLASHBSR_FN V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
FLASHBSR_FN void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

FLASHBSR_FN FloatV broadcast_word(const float* p) { return splat(*p); }

FLASHBSR_FN FloatV select(IntV mask, FloatV yes, FloatV no) { return mask ? yes : no; }

/// Lane-wise maximum; a NaN in `b` wins, so pass the value that must carry its NaN second.
FLASHBSR_FN FloatV max(FloatV a, FloatV b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

FLASHBSR_FN FloatV min(FloatV a, FloatV b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

/// 0, 1, 2, ...
FLASHBSR_FN IntV iota() {
  IntV v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

FLASHBSR_FN float reduce_max(FloatV v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

/// Pairwise, so the order of additions is one fixed tree on every level of this width.
FLASHBSR_FN float reduce_add(FloatV v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

/// The lane numbers as a parameter pack, for shuffles written once for every width.
template <int... I>
struct Lanes {};
#if defined(__AVX512F__)
using LaneSequence = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using LaneSequence = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using LaneSequence = Lanes<0, 1, 2, 3>;
#endif

// Halves of the width, for 16-bit and 8-bit elements.
using U16V = uint16_t __attribute__((vector_size(2 * kLanes)));
using U8V = uint8_t __attribute__((vector_size(kLanes)));

FLASHBSR_FN UintV widen16(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<UintV>(_mm512_cvtepu16_epi32(load<__m256i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<UintV>(_mm256_cvtepu16_epi32(load<__m128i>(p)));
#else
  return __builtin_convertvector(load<U16V>(p), UintV);
#endif
}

/// 2 * kLanes elements of 16 bits from each of two rows: word i = a[i] | b[i] << 16.
FLASHBSR_FN void interleave16(const char* a, const char* b, FloatV& first, FloatV& second) {
  using Wide = uint16_t __attribute__((vector_size(4 * kLanes)));
  const Wide x = load<Wide>(a), y = load<Wide>(b);
  Wide low, high;
  [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    low = __builtin_shufflevector(x, y, (I / 2 + I % 2 * 2 * kLanes)...,
                                  ((I + kLanes) / 2 + I % 2 * 2 * kLanes)...);
    high = __builtin_shufflevector(x, y, (kLanes + I / 2 + I % 2 * 2 * kLanes)...,
                                   (kLanes + (I + kLanes) / 2 + I % 2 * 2 * kLanes)...);
  }(LaneSequence{});
  first = reinterpret_cast<FloatV>(low);
  second = reinterpret_cast<FloatV>(high);
}

/// Lanes of two vectors by turns.
FLASHBSR_FN void store_zipped(float* dst, FloatV even, FloatV odd) {
  [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    store(dst, __builtin_shufflevector(even, odd, (I / 2 + I % 2 * kLanes)...));
    store(dst + kLanes,
          __builtin_shufflevector(even, odd, (kLanes / 2 + I / 2 + I % 2 * kLanes)...));
  }(LaneSequence{});
}

using FloatV4 = float __attribute__((vector_size(16)));

/// The sums of four vectors. Adjacent lanes are added by zipping within 128 bits, twice; then the
/// 128-bit parts are.
FLASHBSR_FN FloatV4 reduce_add4(FloatV a, FloatV b, FloatV c, FloatV d) {
  return [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    // Lane 4 p + 2 j + s of the zips: lane 4 p + j (low) or 4 p + 2 + j (high) of source s.
    const auto zip_sum = [](FloatV x, FloatV y) __attribute__((always_inline)) {
      return __builtin_shufflevector(x, y, (I / 4 * 4 + I % 4 / 2 + I % 2 * kLanes)...) +
             __builtin_shufflevector(x, y, (I / 4 * 4 + 2 + I % 4 / 2 + I % 2 * kLanes)...);
    };
    // x0+x2, y0+y2, x1+x3, y1+y3 per part; then the pairs of both.
    const FloatV ab = zip_sum(a, b), cd = zip_sum(c, d);
    const FloatV low = __builtin_shufflevector(ab, cd, (I / 4 * 4 + I % 2 + I % 4 / 2 * kLanes)...);
    const FloatV high =
        __builtin_shufflevector(ab, cd, (I / 4 * 4 + 2 + I % 2 + I % 4 / 2 * kLanes)...);
    FloatV4 parts[kLanes / 4];
    const FloatV sum = low + high;
    std::memcpy(parts, &sum, sizeof(sum));
    FloatV4 total = parts[0];
    for (int p = 1; p < kLanes / 4; ++p) total += parts[p];
    return total;
  }(LaneSequence{});
}

FLASHBSR_FN UintV widen8(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<UintV>(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<UintV>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(load<U8V>(p), UintV);
#endif
}

FLASHBSR_FN IntV widen_i8(const void* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntV>(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntV>(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
#else
  return reinterpret_cast<IntV>(widen8(p) << 24) >> 24;
#endif
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
