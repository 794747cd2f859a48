// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// K and V of two codes in a byte as B operands, read from swizzled tiles. A chunk is 32 dims, 16
// bytes of a row.
//
// Halves of four codes are to ldmatrix what elements are, so the contraction over a chunk of K, and
// the columns of a chunk of O, come in another order:
//
//   K: a register has dims 8 t to 8 t + 7 of a token; (8 t + i, 8 t + i + 4) come out of it by
//      masks. Column of Q's position 16 s + 8 h + 2 t + e:  8 t + 2 s + h + 4 e
//   V: transposed, dims 4 g to 4 g + 3 of tokens 2 t and 2 t + 1, whose pairs are the operands.
//      Column of O's position g of operand i:               4 g + i
#pragma once

#include <flashbsr/core/quantize.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>
#include <flashbsr/tile/fragments.h>

namespace flashbsr {

/// What scales do to codes. Words of scales are floats, of which a token has kWords at most.
template <int kArch, int kHeadDim, DType kKv>
struct PackedCodes;

/// int4: a word is the scale of a group of one chunk, of several or of all, known at run time, with
/// its zero point in it. Products take the scale.
template <int kArch, int kHeadDim>
struct PackedCodes<kArch, kHeadDim, DType::kI4> {
  static constexpr bool kByProducts = true;
  static constexpr int kWords = kHeadDim / 32;
  static constexpr float kKeyUnit = ptx::kF16CodeUnit;
  static constexpr float kValueUnit = kArch < 80 ? ptx::kF16CodeUnit : ptx::kBf16CodeUnit;

  FLASHBSR_DEVICE static int word_of(int chunk, int groups) {
    return chunk * groups / (kHeadDim / 32);
  }
  FLASHBSR_DEVICE static void widen_key(uint32_t codes, float scale, int, int32_t,
                                        uint32_t (&pairs)[4]) {
    ptx::int4_to_f16(codes, ptx::int4_minus_f16(float_bits(scale)), pairs);
  }
  /// Of two tokens.
  FLASHBSR_DEVICE static void widen_values(uint32_t codes, float first, float second, int, int32_t,
                                           uint32_t (&pairs)[4]) {
    const uint32_t x = float_bits(first), y = float_bits(second);
    if constexpr (kArch < 80) {
      ptx::int4_to_f16(codes, ptx::int4_minus_f16(x, y), pairs);
    } else {
      ptx::int4_to_bf16(codes, ptx::int4_minus_bf16(x, y), pairs);
    }
  }
};

/// NVFP4: a word is four e4m3 scales, of half a chunk each. Codes take them, exactly, and nothing
/// else does: all products are in fp16.
template <int kArch, int kHeadDim>
struct PackedCodes<kArch, kHeadDim, DType::kE2M1> {
  static constexpr bool kByProducts = false;
  static constexpr int kWords = kHeadDim / 64;
  static constexpr float kKeyUnit = ptx::kE2M1Unit<DType::kF16>, kValueUnit = kKeyUnit;

  FLASHBSR_DEVICE static int word_of(int chunk, int) { return chunk / 2; }
  FLASHBSR_DEVICE static void widen_key(uint32_t codes, float scale, int chunk, int32_t lane,
                                        uint32_t (&pairs)[4]) {
    const uint32_t byte = chunk % 2 * 2 + (lane >> 1 & 1);  // dims 8 t are of one or the other
    by_scales(codes, ptx::permute_bytes(float_bits(scale), 0, byte * 0x1111u), pairs);
  }
  FLASHBSR_DEVICE static void widen_values(uint32_t codes, float first, float second, int chunk,
                                           int32_t lane, uint32_t (&pairs)[4]) {
    const uint32_t byte = chunk % 2 * 2 + (lane >> 4 & 1);  // and dims 4 g
    by_scales(codes,
              ptx::permute_bytes(float_bits(first), float_bits(second), byte * 0x0011u + 0x40u),
              pairs);
  }

 private:
  /// The first two bytes are the scales of codes 0 to 3, and of 4 to 7.
  FLASHBSR_DEVICE static void by_scales(uint32_t codes, uint32_t bytes, uint32_t (&pairs)[4]) {
    uint32_t scales, other;
    ptx::float8_to_f16<kArch, DType::kE4M3>(bytes, scales, other);
    ptx::e2m1_by_scales<DType::kF16>(codes, ptx::e2m1_scales<DType::kF16>(scales), pairs);
  }
};

/// K as B operands of Q K^T: of 32 tokens a chunk.
template <int kHeadDim>
struct PackedKeyFragments {
  static constexpr int kRowBytes = kHeadDim / 2;
  uint32_t base;

  FLASHBSR_DEVICE PackedKeyFragments(uint32_t tile, uint32_t lane)
      : base(tile + Swizzle<kRowBytes>::offset(lane, 0)) {}

  /// words[i]: of token + 8 i + lane / 4.
  FLASHBSR_DEVICE void load(uint32_t (&words)[4], int token, int chunk) const {
    ptx::ldmatrix_x4(words, swizzled(base, chunk * 16) + token * kRowBytes);
  }
};

/// V as B operands of P V: of 16 tokens two chunks.
template <int kHeadDim>
struct PackedValueFragments {
  static constexpr int kRowBytes = kHeadDim / 2;
  static constexpr int kDims = 64;
  uint32_t base, lane;

  FLASHBSR_DEVICE PackedValueFragments(uint32_t tile, uint32_t lane)
      : base(tile + Swizzle<kRowBytes>::offset(lane % 16, lane / 16)), lane(lane) {}

  /// words[i][k]: of chunk d / 32 + i and tokens token + 8 k + lane % 4 * 2 and the next.
  FLASHBSR_DEVICE void load(uint32_t (&words)[2][2], int token, int d) const {
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, swizzled(base, d / 2) + token * kRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = r[i];
  }
};

}  // namespace flashbsr
