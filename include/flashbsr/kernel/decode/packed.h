// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// K and V of two int4 codes in a byte: from a tile in shared memory, through matrix operands, to
// products. Scales are of groups of 32, 64 or all dims, which is known at run time; a chunk is 32
// dims, 16 bytes of a row, so none has two groups.
//
// Halves of four codes are to ldmatrix what elements are:
//
//   K: a register has dims 8 t to 8 t + 7 of a token. Pairs (8 t + i, 8 t + i + 4) come out of it
//   by
//      masks; queries have the same order (query.h).
//   V: transposed, dims 4 g to 4 g + 3 of tokens 2 t and 2 t + 1, whose pairs are the operands.
#pragma once

#include <flashbsr/kernel/decode/loader.h>
#include <flashbsr/kernel/decode/query.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>

namespace flashbsr {

// Traits are read by the host too, where there are no instructions to know of.
template <class Traits>
inline constexpr bool kUnitsAgree =
    Traits::kKeyUnit == ptx::kF16CodeUnit && Traits::kValueUnit == ptx::kBf16CodeUnit;

/// Chunks of a group, less one: 0, 1 or 3.
template <class Traits>
FLASHBSR_DEVICE int packed_run_mask(int groups) {
  return (Traits::kHeadDim / 32 >> (groups >> 1)) - 1;
}

/// A token's scale, and what its zero point adds to codes.
struct PackedKeyScale {
  float scale;
  uint32_t minus;

  FLASHBSR_DEVICE explicit PackedKeyScale(float packed)
      : scale(int4_scale(packed)), minus(ptx::int4_minus_f16(float_bits(packed))) {}
};

/// Logits of a stage, by K's scales: s[u] of tokens 16 u to 16 u + 15.
/// @param scales  [tokens][Traits::kScaleGroups]
template <class Traits, int kSubTiles, int kTiles>
FLASHBSR_DEVICE void packed_scores(const DecodeQuery<Traits>& query, uint32_t tile,
                                   const float* scales, int groups, int lane,
                                   float (&s)[kSubTiles][kTiles][4]) {
  static_assert(kUnitsAgree<Traits>);
  constexpr int kGroups = Traits::kScaleGroups, kChunks = Traits::kHeadDim / 32;
  const int run = packed_run_mask<Traits>(groups);
#pragma unroll
  for (int u = 0; u < kSubTiles; ++u) {
    const float* of_token = scales + (16 * u + (lane >> 2)) * kGroups;
    PackedKeyScale low(of_token[0]), high(of_token[8 * kGroups]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) s[u][n][0] = s[u][n][1] = s[u][n][2] = s[u][n][3] = 0;
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      uint32_t raw[4];
      const int row = 16 * u + (lane & 15);
      ptx::ldmatrix_x4(raw, tile + decode_tile_offset<Traits>(row, 2 * i + (lane >> 4)));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int chunk = 2 * i + h;
        if (chunk > 0 && (chunk & run) == 0) {
          ++of_token;
          low = PackedKeyScale(of_token[0]);
          high = PackedKeyScale(of_token[8 * kGroups]);
        }
        uint32_t a[4], b[4];
        ptx::int4_to_f16(raw[2 * h], low.minus, a);
        ptx::int4_to_f16(raw[2 * h + 1], high.minus, b);
        const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 q = query.operands(n, chunk);
          float sum[4] = {};
          ptx::mma_m16n8k16<Traits::kKeyCompute>(sum, first, q.x, q.y);
          ptx::mma_m16n8k16<Traits::kKeyCompute>(sum, second, q.z, q.w);
          s[u][n][0] += low.scale * sum[0];
          s[u][n][1] += low.scale * sum[1];
          s[u][n][2] += high.scale * sum[2];
          s[u][n][3] += high.scale * sum[3];
        }
      }
    }
  }
}

/// O += V^T P^T of tokens 16 u to 16 u + 15, with weights `p` as DecodeMath has them: each group
/// has its own, by V's scales.
template <class Traits, int kTiles>
FLASHBSR_DEVICE void packed_values(uint32_t tile, int u, const float* scales, int groups, int lane,
                                   const float (&p)[kTiles][4],
                                   float (&o)[Traits::kHeadDim / 16][kTiles][4]) {
  constexpr int kGroups = Traits::kScaleGroups, kChunks = Traits::kHeadDim / 32;
  constexpr DType kType = Traits::kCompute;
  const int run = packed_run_mask<Traits>(groups);
  const float* of_token = scales + (16 * u + (lane >> 2)) * kGroups;
  const float* of_pair = scales + (16 * u + 2 * (lane & 3)) * kGroups;
  uint32_t b[kTiles][2], minus[2];
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    uint32_t raw[4];
    const int row = 16 * u + (lane & 15);
    ptx::ldmatrix_x4_trans(raw, tile + decode_tile_offset<Traits>(row, 2 * i + (lane >> 4)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = 2 * i + h;
      if ((chunk & run) == 0) {
        const float low = int4_scale(of_token[0]), high = int4_scale(of_token[8 * kGroups]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          b[n][0] = ptx::movmatrix_trans(ptx::pack2<kType>(p[n][0] * low, p[n][1] * low));
          b[n][1] = ptx::movmatrix_trans(ptx::pack2<kType>(p[n][2] * high, p[n][3] * high));
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          minus[k] = ptx::int4_minus_bf16(float_bits(of_pair[8 * k * kGroups]),
                                          float_bits(of_pair[(8 * k + 1) * kGroups]));
        }
        ++of_token;
        ++of_pair;
      }
      uint32_t a[4], c[4];
      ptx::int4_to_bf16(raw[2 * h], minus[0], a);
      ptx::int4_to_bf16(raw[2 * h + 1], minus[1], c);
      const uint32_t first[4] = {a[0], a[1], c[0], c[1]}, second[4] = {a[2], a[3], c[2], c[3]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::mma_m16n8k16<kType>(o[2 * chunk][n], first, b[n][0], b[n][1]);
        ptx::mma_m16n8k16<kType>(o[2 * chunk + 1][n], second, b[n][0], b[n][1]);
      }
    }
  }
}

}  // namespace flashbsr
