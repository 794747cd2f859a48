// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Codes of KV caches to pairs of 16-bit floats, exactly. PTX ISA, "prmt", "lop3", "fma".
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr::ptx {

/// a x b + c in pairs.
template <DType kType>
FLASHBSR_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  if constexpr (kType == DType::kBF16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  }
  return r;
}

/// a x b in pairs.
template <DType kType>
FLASHBSR_DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t r;
  if constexpr (kType == DType::kBF16) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
}

/// The larger in pairs of unsigned integers. sm_90.
FLASHBSR_DEVICE uint32_t max2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/// (bits & mask) | more, in one instruction.
FLASHBSR_DEVICE uint32_t and_or(uint32_t bits, uint32_t mask, uint32_t more) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(bits), "r"(mask), "r"(more));
  return r;
}

// An integer below 2^8 in the bits of a bf16, or below 2^11 in those of an fp16, is that many times
// the least subnormal, whether it is one or not. Multiplied by a large power of two it is itself,
// but for a factor that the largest exponent leaves: users of these functions take it along.

/// What int8_to_bf16 and int4_to_bf16 are to be multiplied by.
inline constexpr float kBf16CodeUnit = 64.0f;
/// What int4_to_f16 is to be multiplied by.
inline constexpr float kF16CodeUnit = 512.0f;

/// Four int8 to two pairs of bf16 over kBf16CodeUnit: `low` = bytes 0, 1 and `high` = bytes 2, 3.
/// With its first bit turned a byte is 128 more than the number.
FLASHBSR_DEVICE void int8_to_bf16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const uint32_t moved = bytes ^ 0x80808080u;
  const auto widen = [](uint32_t pair) {  // x 2^127 - 2
    return fma2<DType::kBF16>(pair, 0x7f007f00u, 0xc000c000u);
  };
  low = widen(permute_bytes(moved, 0, 0x4140));
  high = widen(permute_bytes(moved, 0, 0x4342));
}

/// The same to fp16, as they are: a byte below 0x64 is 1024 + itself.
FLASHBSR_DEVICE void int8_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const uint32_t moved = bytes ^ 0x80808080u;
  const auto widen = [](uint32_t pair) {  // - 1152
    return fma2<DType::kF16>(pair, 0x3c003c00u, 0xe480e480u);
  };
  low = widen(permute_bytes(moved, 0x64646464u, 0x4140));
  high = widen(permute_bytes(moved, 0x64646464u, 0x4342));
}

/// Four codes of a byte each to two pairs of what they are multiplied in; int8 to bf16 over
/// kBf16CodeUnit.
template <int kArch, DType kType, DType kTo>
FLASHBSR_DEVICE void widen_bytes(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if constexpr (kType == DType::kI8) {
    if constexpr (kTo == DType::kBF16) {
      int8_to_bf16(bytes, low, high);
    } else {
      int8_to_f16(bytes, low, high);
    }
    return;
  } else {
    float8_to_f16<kArch, kType>(bytes, low, high);
    if constexpr (kTo == DType::kBF16) {  // of at most four bits; by floats a NaN stays one
      low = pack2<kTo>(unpack_low<DType::kF16>(low), unpack_high<DType::kF16>(low));
      high = pack2<kTo>(unpack_low<DType::kF16>(high), unpack_high<DType::kF16>(high));
    }
  }
}

/// The lower or the upper half of a pair twice; the instruction that takes it does that too.
FLASHBSR_DEVICE uint32_t twice_low(uint32_t pair) {
  uint32_t r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(pair));
  return r;
}
FLASHBSR_DEVICE uint32_t twice_high(uint32_t pair) {
  uint32_t r;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(pair));
  return r;
}

/// What int4_to_f16 adds to codes: less their zero point, the last four bits of `scale`.
FLASHBSR_DEVICE uint32_t int4_minus_f16(uint32_t scale) {
  return fma2<DType::kF16>(twice_low(scale & 15u), 0xf800f800u, 0x80008000u);  // x -2^15
}

/// The same where the upper halves of words have the zero point of another scale.
FLASHBSR_DEVICE uint32_t int4_minus_f16(uint32_t low, uint32_t high) {
  return fma2<DType::kF16>(permute_bytes(low, high, 0x5410) & 0x000f000fu, 0xf800f800u,
                           0x80008000u);
}

/// Eight int4 codes to four pairs of fp16 over kF16CodeUnit: pair i is codes i and i + 4.
FLASHBSR_DEVICE void int4_to_f16(uint32_t word, uint32_t minus, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t bits = word >> (4 * i);
    pairs[i] = fma2<DType::kF16>(bits & 0x000f000fu, 0x78007800u, minus);      // x 2^15
    pairs[i + 1] = fma2<DType::kF16>(bits & 0x00f000f0u, 0x68006800u, minus);  // x 2^11
  }
}

/// The same for int4_to_bf16, of two rows' scales.
FLASHBSR_DEVICE uint32_t int4_minus_bf16(uint32_t first, uint32_t second) {
  return fma2<DType::kBF16>(permute_bytes(first, second, 0x5410) & 0x000f000fu, 0xff00ff00u,
                            0x80008000u);  // x -2^127
}

/// Four int4 codes each of two rows to four pairs of bf16 over kBf16CodeUnit: pair i is code i of
/// both.
FLASHBSR_DEVICE void int4_to_bf16(uint32_t rows, uint32_t minus, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t bits = rows >> (4 * i);
    pairs[i] = fma2<DType::kBF16>(bits & 0x000f000fu, 0x7f007f00u, minus);      // x 2^127
    pairs[i + 1] = fma2<DType::kBF16>(bits & 0x00f000f0u, 0x7d007d00u, minus);  // x 2^123
  }
}

/// What e2m1_by_scales gives is to be multiplied by.
template <DType kTo>
inline constexpr float kE2M1Unit = kTo == DType::kBF16 ? 256.0f : 128.0f;

/// Scales for e2m1_by_scales, of two rows or one, from fp16. Codes there are of the least
/// exponents, 2^-126 and 2^-14 of what they mean, and 2^118 and 2^7 are as much as the largest
/// scale takes.
template <DType kTo>
FLASHBSR_DEVICE uint32_t e2m1_scales(uint32_t scales) {
  if constexpr (kTo == DType::kBF16) {
    const uint32_t pair =
        pack2<kTo>(unpack_low<DType::kF16>(scales), unpack_high<DType::kF16>(scales));
    return fma2<kTo>(pair, 0x7a807a80u, 0x80008000u);
  } else {
    return fma2<kTo>(scales, 0x58005800u, 0x80008000u);
  }
}

/// Eight e2m1 codes by their scales over kE2M1Unit, exactly: pair i is codes i and i + 4. Two bits
/// of exponent and one after them are such bits of a larger format, subnormals included.
template <DType kTo>
FLASHBSR_DEVICE void e2m1_by_scales(uint32_t word, uint32_t scales, uint32_t (&pairs)[4]) {
  if constexpr (kTo == DType::kF16) {
    // All bits of a code are in the upper byte of an fp16: four codes become such bytes at once.
    const uint32_t even = and_or(word << 4, 0x80808080u, (word << 1) & 0x0e0e0e0eu);
    const uint32_t odd = and_or(word, 0x80808080u, (word >> 3) & 0x0e0e0e0eu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = permute_bytes(i % 2 ? odd : even, 0, i < 2 ? 0x2404 : 0x3414);
      pairs[i] = fma2<kTo>(code, scales, 0x80008000u);
    }
    return;
  }
  constexpr int kPlace = kTo == DType::kBF16 ? 6 : 9;  // of the last bit
  constexpr uint32_t kMask = 0x00070007u << kPlace;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = kPlace - 4 * i;
    const uint32_t size = (left >= 0 ? word << max_of(left, 0) : word >> max_of(-left, 0)) & kMask;
    const uint32_t code = and_or(word << (12 - 4 * i), 0x80008000u, size);
    pairs[i] = fma2<kTo>(code, scales, 0x80008000u);
  }
}

}  // namespace flashbsr::ptx
