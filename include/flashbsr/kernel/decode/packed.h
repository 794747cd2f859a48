// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// K and V of two codes in a byte: from a tile in shared memory, through matrix operands, to
// products. A chunk is 32 dims, 16 bytes of a row.
//
// Halves of four codes are to ldmatrix what elements are:
//
//   K: a register has dims 8 t to 8 t + 7 of a token. Pairs (8 t + i, 8 t + i + 4) come out of it
//   by
//      masks; queries have the same order (query.h).
//   V: transposed, dims 4 g to 4 g + 3 of tokens 2 t and 2 t + 1, whose pairs are the operands.
//
// Scales of int4 are of groups of one chunk, of two or of all, which is known at run time: logits
// of a group and its weights take them. NVFP4's are of half a chunk, and the codes take them.
#pragma once

#include <flashbsr/kernel/decode/loader.h>
#include <flashbsr/kernel/decode/query.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>

namespace flashbsr {

/// What a lane needs of the scales of a token's keys.
/// @tparam Traits  of int4; the units of ptx/codes.h are theirs
template <class Traits, DType = Traits::kKv>
class PackedKeys {
  static_assert(Traits::kKeyUnit == ptx::kF16CodeUnit);

 public:
  static constexpr bool kByCodes = false;  ///< products of a chunk take the scale

  /// `scales`: the token's.
  FLASHBSR_DEVICE PackedKeys(const float* scales, int) : scales_(scales) {}

  /// Goes on to a chunk; `first`: of a group.
  FLASHBSR_DEVICE void begin(bool first, int) {
    if (!first) return;
    const float packed = *scales_++;
    scale_ = int4_scale(packed);
    minus_ = ptx::int4_minus_f16(float_bits(packed));
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int, uint32_t (&pairs)[4]) const {
    ptx::int4_to_f16(word, minus_, pairs);
  }
  FLASHBSR_DEVICE float scale() const { return scale_; }

 private:
  const float* scales_;
  float scale_ = 0;
  uint32_t minus_ = 0;
};

/// A word has the scales of two chunks, two of each.
template <class Traits>
class PackedKeys<Traits, DType::kE2M1> {
  static_assert(Traits::kKeyUnit == ptx::kE2M1Unit<DType::kF16>);

 public:
  static constexpr bool kByCodes = true;

  FLASHBSR_DEVICE PackedKeys(const float* scales, int lane)
      : of_chunks_(scales), picks_(lane & 2 ? 0x3311 : 0x2200) {}

  FLASHBSR_DEVICE void begin(bool, int chunk) {
    if (chunk % 2) return;
    const uint32_t word = float_bits(of_chunks_[chunk / 2]);
    ptx::float8_to_f16<Traits::kArch, DType::kE4M3>(ptx::permute_bytes(word, 0, picks_), scales_[0],
                                                    scales_[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) scales_[i] = ptx::e2m1_scales<DType::kF16>(scales_[i]);
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int chunk, uint32_t (&pairs)[4]) const {
    ptx::e2m1_by_scales<DType::kF16>(word, scales_[chunk % 2], pairs);
  }

 private:
  const float* of_chunks_;
  uint32_t picks_;      // dims 8 t of a chunk are of its first scale or of its second
  uint32_t scales_[2];  // of the current two chunks
};

/// What a lane needs of the scales of 16 tokens' values; its weights are those of tokens g and
/// g + 8, and the codes it has are of 2 t, 2 t + 1 and both of these plus 8.
template <class Traits, DType = Traits::kKv>
class PackedValues {
  static_assert(Traits::kValueUnit == ptx::kBf16CodeUnit);
  static constexpr int kStride = Traits::kScaleWords;

 public:
  FLASHBSR_DEVICE PackedValues(const float* scales, int lane)
      : of_weights_(scales + (lane >> 2) * kStride), of_codes_(scales + 2 * (lane & 3) * kStride) {}

  /// Goes on to a chunk, and gives weights for the products where they are others than before.
  template <int kTiles>
  FLASHBSR_DEVICE void begin(bool first, int, const float (&p)[kTiles][4],
                             uint32_t (&b)[kTiles][2]) {
    if (!first) return;
    const float low = int4_scale(of_weights_[0]), high = int4_scale(of_weights_[8 * kStride]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      b[n][0] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][0] * low, p[n][1] * low));
      b[n][1] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][2] * high, p[n][3] * high));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      minus_[k] = ptx::int4_minus_bf16(float_bits(of_codes_[8 * k * kStride]),
                                       float_bits(of_codes_[(8 * k + 1) * kStride]));
    }
    ++of_weights_;
    ++of_codes_;
  }
  /// Of tokens 2 t + 8 k and the next.
  FLASHBSR_DEVICE void widen(uint32_t word, int k, int, uint32_t (&pairs)[4]) const {
    ptx::int4_to_bf16(word, minus_[k], pairs);
  }

 private:
  const float* of_weights_;
  const float* of_codes_;
  uint32_t minus_[2];
};

template <class Traits>
class PackedValues<Traits, DType::kE2M1> {
  static_assert(Traits::kValueUnit == ptx::kE2M1Unit<DType::kBF16>);

 public:
  FLASHBSR_DEVICE PackedValues(const float* scales, int lane)
      : of_codes_(scales + 2 * (lane & 3) * Traits::kScaleWords),
        picks_(lane & 16 ? 0x7351 : 0x6240) {}

  template <int kTiles>
  FLASHBSR_DEVICE void begin(bool, int chunk, const float (&p)[kTiles][4],
                             uint32_t (&b)[kTiles][2]) {
    if (chunk == 0) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        b[n][0] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][0], p[n][1]));
        b[n][1] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][2], p[n][3]));
      }
    }
    if (chunk % 2) return;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float* at = of_codes_ + 8 * k * Traits::kScaleWords + chunk / 2;
      const uint32_t bytes =
          ptx::permute_bytes(float_bits(at[0]), float_bits(at[Traits::kScaleWords]), picks_);
      uint32_t pairs[2];
      ptx::float8_to_f16<Traits::kArch, DType::kE4M3>(bytes, pairs[0], pairs[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) scales_[k][i] = ptx::e2m1_scales<DType::kBF16>(pairs[i]);
    }
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int k, int chunk, uint32_t (&pairs)[4]) const {
    ptx::e2m1_by_scales<DType::kBF16>(word, scales_[k][chunk % 2], pairs);
  }

 private:
  const float* of_codes_;
  uint32_t picks_;         // dims 4 g of a chunk are of its first scale or of its second
  uint32_t scales_[2][2];  // of the current two chunks, each of two tokens
};

/// Chunks of a group, less one: 0, 1 or 3.
template <class Traits>
FLASHBSR_DEVICE int packed_run_mask(int groups) {
  return (Traits::kHeadDim / 32 >> (groups >> 1)) - 1;
}

/// Logits of a stage, over Traits::kKeyUnit: s[u] of tokens 16 u to 16 u + 15.
/// @param scales  [tokens][Traits::kScaleWords]
template <class Traits, int kSubTiles, int kTiles>
FLASHBSR_DEVICE void packed_scores(const DecodeQuery<Traits>& query, uint32_t tile,
                                   const float* scales, int groups, int lane,
                                   float (&s)[kSubTiles][kTiles][4]) {
  constexpr int kWords = Traits::kScaleWords, kChunks = Traits::kHeadDim / 32;
  const int run = packed_run_mask<Traits>(groups);
#pragma unroll
  for (int u = 0; u < kSubTiles; ++u) {
    const float* of_token = scales + (16 * u + (lane >> 2)) * kWords;
    PackedKeys<Traits> low(of_token, lane), high(of_token + 8 * kWords, lane);
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
        low.begin((chunk & run) == 0, chunk);
        high.begin((chunk & run) == 0, chunk);
        uint32_t a[4], b[4];
        low.widen(raw[2 * h], chunk, a);
        high.widen(raw[2 * h + 1], chunk, b);
        const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 q = query.operands(n, chunk);
          if constexpr (PackedKeys<Traits>::kByCodes) {
            ptx::mma_m16n8k16<Traits::kKeyCompute>(s[u][n], first, q.x, q.y);
            ptx::mma_m16n8k16<Traits::kKeyCompute>(s[u][n], second, q.z, q.w);
          } else {
            float sum[4] = {};
            ptx::mma_m16n8k16<Traits::kKeyCompute>(sum, first, q.x, q.y);
            ptx::mma_m16n8k16<Traits::kKeyCompute>(sum, second, q.z, q.w);
            s[u][n][0] += low.scale() * sum[0];
            s[u][n][1] += low.scale() * sum[1];
            s[u][n][2] += high.scale() * sum[2];
            s[u][n][3] += high.scale() * sum[3];
          }
        }
      }
    }
  }
}

/// O += V^T P^T of tokens 16 u to 16 u + 15, over Traits::kValueUnit, with weights `p` as
/// DecodeMath has them.
template <class Traits, int kTiles>
FLASHBSR_DEVICE void packed_values(uint32_t tile, int u, const float* scales, int groups, int lane,
                                   const float (&p)[kTiles][4],
                                   float (&o)[Traits::kHeadDim / 16][kTiles][4]) {
  constexpr int kChunks = Traits::kHeadDim / 32;
  const int run = packed_run_mask<Traits>(groups);
  PackedValues<Traits> values(scales + 16 * u * Traits::kScaleWords, lane);
  uint32_t b[kTiles][2];
#pragma unroll
  for (int i = 0; i < kChunks / 2; ++i) {
    uint32_t raw[4];
    const int row = 16 * u + (lane & 15);
    ptx::ldmatrix_x4_trans(raw, tile + decode_tile_offset<Traits>(row, 2 * i + (lane >> 4)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int chunk = 2 * i + h;
      values.begin((chunk & run) == 0, chunk, p, b);
      uint32_t a[4], c[4];
      values.widen(raw[2 * h], 0, chunk, a);
      values.widen(raw[2 * h + 1], 1, chunk, c);
      const uint32_t first[4] = {a[0], a[1], c[0], c[1]}, second[4] = {a[2], a[3], c[2], c[3]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        ptx::mma_m16n8k16<Traits::kCompute>(o[2 * chunk][n], first, b[n][0], b[n][1]);
        ptx::mma_m16n8k16<Traits::kCompute>(o[2 * chunk + 1][n], second, b[n][0], b[n][1]);
      }
    }
  }
}

}  // namespace flashbsr
