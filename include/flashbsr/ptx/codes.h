// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Codes of KV caches to pairs of 16-bit floats, exactly. PTX ISA, "prmt", "lop3", "fma".
#pragma once

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

/// Four int8 to two pairs of bf16: `low` = bytes 0, 1 and `high` = bytes 2, 3.
///
/// Below 0x43 the seven lower bits of a byte are a mantissa: 128 + those. Its sign is the last bit
/// of the exponent: 256 instead of 128. Their difference is the number.
FLASHBSR_DEVICE void int8_to_bf16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const auto widen = [](uint32_t pair) {
    const uint32_t magnitude = pair & 0xff7fff7fu;
    const uint32_t minus_base = (pair & 0xff80ff80u) ^ 0x80008000u;
    return fma2<DType::kBF16>(magnitude, 0x3f803f80u, minus_base);
  };
  low = widen(permute_bytes(bytes, 0x43434343u, 0x4140));
  high = widen(permute_bytes(bytes, 0x43434343u, 0x4342));
}

/// The same to fp16, in fewer instructions: a byte below 0x64 is 1024 + itself, and with its first
/// bit turned 128 more than the number.
FLASHBSR_DEVICE void int8_to_f16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const uint32_t moved = bytes ^ 0x80808080u;
  const auto widen = [](uint32_t pair) {  // - 1152
    return fma2<DType::kF16>(pair, 0x3c003c00u, 0xe480e480u);
  };
  low = widen(permute_bytes(moved, 0x64646464u, 0x4140));
  high = widen(permute_bytes(moved, 0x64646464u, 0x4342));
}

/// Four codes of a byte each to two pairs of what they are multiplied in.
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

/// What is added to int4 codes in fp16: less their zero point, twice. Codes in the last four bits
/// of a half below 0x6400 are 1024 + themselves, those in the four before 16 times as far above.
struct Int4Minus {
  uint32_t last;    ///< -(1024 + zero)
  uint32_t before;  ///< -(64 + zero)

  FLASHBSR_DEVICE explicit Int4Minus(uint32_t zero)
      : last((zero * 0x10001u) | 0xe400e400u), before((zero * 0x100010u) | 0xd400d400u) {}
};

/// Eight int4 codes of one zero point to four pairs of fp16: pair i is codes i and i + 4.
FLASHBSR_DEVICE void int4_to_f16(uint32_t word, Int4Minus minus, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t bits = word >> (4 * i);
    const uint32_t last = (bits & 0x000f000fu) | 0x64006400u;
    const uint32_t before = (bits & 0x00f000f0u) | 0x64006400u;
    pairs[i] = fma2<DType::kF16>(last, 0x3c003c00u, minus.last);
    pairs[i + 1] = fma2<DType::kF16>(before, 0x2c002c00u, minus.before);
  }
}

/// The same of two rows' words to bf16, four codes of each: pair i is code i of both. `minus` is
/// int4_minus_bf16 of them.
FLASHBSR_DEVICE void int4_to_bf16(uint32_t rows, uint32_t minus, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] =
        fma2<DType::kBF16>(((rows >> (4 * i)) & 0x000f000fu) | 0x43004300u, 0x3f803f80u, minus);
  }
}

/// -(128 + zero) of two rows, whose zero points are the last four bits of words.
FLASHBSR_DEVICE uint32_t int4_minus_bf16(uint32_t first, uint32_t second) {
  return (permute_bytes(first, second, 0x5410) & 0x000f000fu) | 0xc300c300u;
}

}  // namespace flashbsr::ptx
