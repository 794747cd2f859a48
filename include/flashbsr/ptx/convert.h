// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Conversions between register formats, two or four elements at a time.
// PTX ISA, "cvt", "prmt". float8 to fp16 is exact.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr::ptx {

/// Two floats to a pair of 16-bit elements, `low` in the low half. Before sm_80 only fp16 has an
/// instruction, for one element.
template <DType kType, int kArch = 80>
FLASHBSR_DEVICE uint32_t pack2(float low, float high) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  uint32_t r;
  if constexpr (kArch < 80 && kType == DType::kBF16) {
    r = static_cast<uint32_t>(float_to_bf16(high)) << 16 | float_to_bf16(low);
  } else if constexpr (kArch < 80) {
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(r)
        : "f"(low), "f"(high));
  } else if constexpr (kType == DType::kBF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

/// Two floats to e4m3 bytes, `low` first; beyond 448 they saturate, NaN stays NaN.
template <int kArch>
FLASHBSR_DEVICE uint32_t pack2_e4m3(float low, float high) {
  if constexpr (kArch >= 89) {
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(r) : "f"(low), "f"(high));
    return r;
  } else {
    // The adder rounds to eighths of the power of two below, of 2^-6 where subnormals begin. Half
    // the instructions of float_to_e4m3, which branches.
    const auto code = [](float x) {
      constexpr uint32_t kLargest = 0x43e00000u, kLeastPower = 121u << 23, kTwenty = 20u << 23;
      const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
      const uint32_t size = min_of(magnitude, kLargest);
      const uint32_t power = max_of(size & 0x7f800000u, kLeastPower);
      const uint32_t eighths =
          float_bits(bits_float(size) + bits_float(power + kTwenty)) - (power + kTwenty);
      const uint32_t rounded = ((power - kLeastPower) >> 20) + eighths;
      return (magnitude > 0x7f800000u ? 0x7fu : rounded) | bits >> 31 << 7;
    };
    return code(low) | code(high) << 8;
  }
}

/// Four, lowest first.
template <int kArch = 90>
FLASHBSR_DEVICE uint32_t pack4_e4m3(float a, float b, float c, float d) {
  if constexpr (kArch < 89) return pack2_e4m3<kArch>(a, b) | pack2_e4m3<kArch>(c, d) << 16;
  uint32_t r;
  asm("{.reg .b16 l, h;\n"
      " cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\n"
      " mov.b32 %0, {l, h};}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

/// The low and the high half as floats.
template <DType kType>
FLASHBSR_DEVICE float unpack_low(uint32_t pair) {
  if constexpr (kType == DType::kBF16) return bits_float(pair << 16);
  float r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
  return r;
}
template <DType kType>
FLASHBSR_DEVICE float unpack_high(uint32_t pair) {
  if constexpr (kType == DType::kBF16) return bits_float(pair & 0xffff0000u);
  float r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(pair));
  return r;
}

/// Bytes of a and b picked by four nibbles, lowest first: 0-3 from a, 4-7 from b.
FLASHBSR_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t picks) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(picks));
  return r;
}

/// Four float8 bytes to two pairs of fp16: `low` = bytes 0, 1 and `high` = bytes 2, 3.
///
/// e5m2 is the upper byte of an fp16. e4m3 has an instruction from sm_89 on; before that its bits
/// are shifted into place, which gives x / 256 (subnormals included).
template <int kArch, DType kType>
FLASHBSR_DEVICE void float8_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  static_assert(kType == DType::kE4M3 || kType == DType::kE5M2);
  if constexpr (kType == DType::kE5M2) {
    low = permute_bytes(bytes, 0, 0x1404);
    high = permute_bytes(bytes, 0, 0x3424);
  } else if constexpr (kArch >= 89) {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        " cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
  } else {
    // Bytes in the upper halves of both elements: times 256 and, for 1.875 / 256 alone, which is
    // what NaN looks like, plus infinity (from 36864 times that on) times zero.
    const auto widen = [](uint32_t pair) {
      uint32_t r = (pair & 0x80008000u) | ((pair & 0x7f007f00u) >> 1);
      asm("{.reg .b32 t, z; mov.b32 z, 0; mul.f16x2 t, %0, %1; mul.f16x2 t, t, z;\n"
          " fma.rn.f16x2 %0, %0, %2, t;}"
          : "+r"(r)
          : "r"(0x78807880u), "r"(0x5c005c00u));
      return r;
    };
    low = widen(permute_bytes(bytes, 0, 0x1404));
    high = widen(permute_bytes(bytes, 0, 0x3424));
  }
}

}  // namespace flashbsr::ptx
