// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Element types: one list, their sizes and names, and exact scalar conversions to and from float.
// Vectorised conversions live with the backends and are tested against these.
#pragma once

#include <flashbsr/config.h>

namespace flashbsr {

enum class DType : int32_t {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kE4M3 = 3,  ///< float8_e4m3fn: no infinities, NaN = 0x7f, largest 448
  kE5M2 = 4,  ///< float8_e5m2: IEEE-like, largest 57344
  // Codes of a KV cache with scales of every token and head (docs/kv-quantization.md).
  kI8 = 5,
  kI4 = 6,    ///< 0 to 15 around a zero point; two in a byte, the first in its lower half
  kE2M1 = 7,  ///< NVFP4's: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; packed likewise
};
inline constexpr int kNumDTypes = 8;

/// Whether two elements share a byte.
FLASHBSR_FN constexpr bool is_packed(DType t) { return t == DType::kI4 || t == DType::kE2M1; }

/// Bytes of what strides count: an element, or a byte of two packed ones.
FLASHBSR_FN constexpr int dtype_size(DType t) {
  return t == DType::kF32 ? 4 : (t == DType::kF16 || t == DType::kBF16) ? 2 : 1;
}

/// Bytes of a row of `dim` elements, an even number of packed ones.
FLASHBSR_FN constexpr int64_t row_bytes(DType t, int64_t dim) {
  return is_packed(t) ? dim / 2 : dim * dtype_size(t);
}

FLASHBSR_FN constexpr const char* dtype_name(DType t) {
  constexpr const char* kNames[kNumDTypes] = {"float32",     "float16", "bfloat16", "float8_e4m3fn",
                                              "float8_e5m2", "int8",    "int4",     "nvfp4"};
  return kNames[static_cast<int>(t)];
}

FLASHBSR_FN uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
FLASHBSR_FN float bits_float(uint32_t u) { return __builtin_bit_cast(float, u); }

FLASHBSR_FN float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

/// Round to nearest even; NaN stays a (quiet) NaN.
FLASHBSR_FN uint16_t float_to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(u >> 16 | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/// A small IEEE-like format with kExp exponent and kMan mantissa bits, widened to float.
/// kFinite: the all-ones exponent carries numbers, and only the all-ones pattern is NaN (e4m3fn).
template <int kExp, int kMan, bool kFinite>
FLASHBSR_FN float minifloat_to_float(uint32_t h) {
  constexpr int kBias = (1 << (kExp - 1)) - 1;
  const uint32_t sign = (h >> (kExp + kMan) & 1) << 31;
  const uint32_t exponent = h >> kMan & ((1u << kExp) - 1);
  const uint32_t mantissa = h & ((1u << kMan) - 1);
  constexpr uint32_t kTop = (1u << kExp) - 1;
  if (kFinite ? (exponent == kTop && mantissa == (1u << kMan) - 1) : exponent == kTop) {
    if (!kFinite && mantissa == 0) return bits_float(sign | 0x7f800000u);
    return bits_float(sign | 0x7fc00000u);
  }
  // Subnormals: mantissa x 2^(1 - bias - kMan), exact in float.
  if (exponent == 0) {
    const float scale = bits_float(static_cast<uint32_t>(127 + 1 - kBias - kMan) << 23);
    const float value = static_cast<float>(mantissa) * scale;
    return sign ? -value : value;
  }
  return bits_float(sign | (exponent + 127 - kBias) << 23 | mantissa << (23 - kMan));
}

/// Round to nearest even into a small format. Overflow saturates where kFinite or kSaturate,
/// otherwise gives infinity.
template <int kExp, int kMan, bool kFinite, bool kSaturate>
FLASHBSR_FN uint32_t float_to_minifloat(float x) {
  constexpr int kBias = (1 << (kExp - 1)) - 1;
  constexpr uint32_t kTop = (1u << kExp) - 1;
  constexpr uint32_t kNan = kTop << kMan | (kFinite ? (1u << kMan) - 1 : 1u << (kMan - 1));
  constexpr uint32_t kLargest =
      kFinite ? (kTop << kMan | ((1u << kMan) - 2)) : ((kTop - 1) << kMan | ((1u << kMan) - 1));
  const uint32_t u = float_bits(x);
  const uint32_t sign = u >> 31 << (kExp + kMan);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kNan;
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  uint32_t result;
  if (exponent < 1 - kBias) {
    // Subnormal: in units of 2^(1 - bias - kMan), rounded by the float adder's own round-to-even.
    constexpr uint32_t kMagicBits = static_cast<uint32_t>(127 + 1 - kBias - kMan + 23) << 23;
    const float shifted = bits_float(magnitude) + bits_float(kMagicBits);
    result = float_bits(shifted) - kMagicBits;
  } else {
    const uint32_t rebased = magnitude - (static_cast<uint32_t>(127 - kBias) << 23);
    constexpr int kDrop = 23 - kMan;
    result = (rebased + ((1u << (kDrop - 1)) - 1) + (rebased >> kDrop & 1)) >> kDrop;
  }
  if (result > kLargest) {
    const bool infinite_ok = !kFinite && !kSaturate;
    result = infinite_ok ? kTop << kMan : kLargest;
  }
  return sign | result;
}

FLASHBSR_FN float f16_to_float(uint16_t h) { return minifloat_to_float<5, 10, false>(h); }
FLASHBSR_FN float e4m3_to_float(uint8_t h) { return minifloat_to_float<4, 3, true>(h); }
FLASHBSR_FN float e5m2_to_float(uint8_t h) { return minifloat_to_float<5, 2, false>(h); }
FLASHBSR_FN uint16_t float_to_f16(float x) {
  return static_cast<uint16_t>(float_to_minifloat<5, 10, false, false>(x));
}
/// fp8 stores saturate, as quantisers of KV caches expect.
FLASHBSR_FN uint8_t float_to_e4m3(float x) {
  return static_cast<uint8_t>(float_to_minifloat<4, 3, true, true>(x));
}
FLASHBSR_FN uint8_t float_to_e5m2(float x) {
  return static_cast<uint8_t>(float_to_minifloat<5, 2, false, true>(x));
}

/// To the nearest integer, ties to even, within `low` and `high`. NaN gives 0.
FLASHBSR_FN int32_t round_within(float x, int32_t low, int32_t high) {
  if (!(x > static_cast<float>(low))) return x == x ? low : 0;
  if (x >= static_cast<float>(high)) return high;
  // Adding 1.5 x 2^23 leaves the integer in the last bits, rounded by the adder.
  return static_cast<int32_t>(float_bits(x + 12582912.0f) - 0x4b400000u);
}

FLASHBSR_FN float e2m1_to_float(uint32_t code) {
  const uint32_t magnitude = code & 7;
  // Of exponent e > 0 and mantissa m: (2 + m) x 2^(e - 2); otherwise m / 2.
  const uint32_t halves =
      magnitude < 2 ? magnitude : (2 + (magnitude & 1)) << (magnitude >> 1) >> 1;
  const float value = 0.5f * static_cast<float>(halves);
  return code & 8 ? -value : value;
}
/// Saturates, as every quantiser to e2m1 does; it has no NaN, which becomes 0.
FLASHBSR_FN uint32_t float_to_e2m1(float x) {
  const uint32_t sign = float_bits(x) >> 31 << 3;
  const float size = sign ? -x : x;
  // Halfway points, to even codes: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.
  const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                        (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return sign | code;
}

/// Code `index` of a row of packed ones.
FLASHBSR_FN uint32_t packed_code(const void* row, int64_t index) {
  return static_cast<const uint8_t*>(row)[index / 2] >> (index % 2 * 4) & 15u;
}
FLASHBSR_FN void store_packed_code(void* row, int64_t index, uint32_t code) {
  uint8_t& byte = static_cast<uint8_t*>(row)[index / 2];
  byte = static_cast<uint8_t>(index % 2 ? (byte & 15u) | code << 4 : (byte & 240u) | code);
}

/// A scale of int4 has its zero point in the last four bits.
FLASHBSR_FN float int4_scale(float packed) { return bits_float(float_bits(packed) & ~15u); }
FLASHBSR_FN int32_t int4_zero(float packed) { return float_bits(packed) & 15u; }

/// One element of any type, for cold paths and tests. Codes without their scales.
FLASHBSR_FN float load_as_float(const void* p, int64_t index, DType t) {
  switch (t) {
    case DType::kF32: return static_cast<const float*>(p)[index];
    case DType::kF16: return f16_to_float(static_cast<const uint16_t*>(p)[index]);
    case DType::kBF16: return bf16_to_float(static_cast<const uint16_t*>(p)[index]);
    case DType::kE4M3: return e4m3_to_float(static_cast<const uint8_t*>(p)[index]);
    case DType::kE5M2: return e5m2_to_float(static_cast<const uint8_t*>(p)[index]);
    case DType::kI8: return static_cast<float>(static_cast<const signed char*>(p)[index]);
    case DType::kI4: return static_cast<float>(packed_code(p, index));
    case DType::kE2M1: return e2m1_to_float(packed_code(p, index));
  }
  return 0;
}

FLASHBSR_FN void store_from_float(void* p, int64_t index, DType t, float x) {
  switch (t) {
    case DType::kF32: static_cast<float*>(p)[index] = x; break;
    case DType::kF16: static_cast<uint16_t*>(p)[index] = float_to_f16(x); break;
    case DType::kBF16: static_cast<uint16_t*>(p)[index] = float_to_bf16(x); break;
    case DType::kE4M3: static_cast<uint8_t*>(p)[index] = float_to_e4m3(x); break;
    case DType::kE5M2: static_cast<uint8_t*>(p)[index] = float_to_e5m2(x); break;
    case DType::kI8:
      static_cast<signed char*>(p)[index] = static_cast<signed char>(round_within(x, -127, 127));
      break;
    case DType::kI4:
      store_packed_code(p, index, static_cast<uint32_t>(round_within(x, 0, 15)));
      break;
    case DType::kE2M1: store_packed_code(p, index, float_to_e2m1(x)); break;
  }
}

}  // namespace flashbsr
