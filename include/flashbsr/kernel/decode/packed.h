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
//
// Four bits are read faster than they are multiplied, so instructions count, and that none waits
// for the one before it: there is no branch between two of a stage's products, and every scale of a
// token is read at once.
#pragma once

#include <flashbsr/kernel/decode/loader.h>
#include <flashbsr/kernel/decode/query.h>
#include <flashbsr/ptx/codes.h>
#include <flashbsr/ptx/mma.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr {

/// Words of scales of a row of K or V, one for every `kRun` chunks. Two are read at once, four when
/// they are asked for: there are no registers for those.
template <class Traits, int kRun>
class PackedScales {
 public:
  static constexpr int kWords = Traits::kHeadDim / 32 / kRun;
  /// From those of a token to the next one's.
  static constexpr int kStride = Traits::kScaleWords * (Traits::kBoxes ? Traits::kHeads : 1);

  FLASHBSR_DEVICE explicit PackedScales(const float* at) : at_(at) {
    if constexpr (Traits::kBoxes) {
      // Not both heads' at once, which the compiler would read together: there are no registers.
      const float2 pair = ptx::load_shared_pair(ptx::shared_address(at));
      pair_ = {float_bits(pair.x), float_bits(pair.y)};
    } else if constexpr (kWords == 2) {
      pair_ = *reinterpret_cast<const uint2*>(at);
    }
  }
  FLASHBSR_DEVICE uint32_t word(int i) const {
    if constexpr (kWords == 2) return i == 0 ? pair_.x : pair_.y;
    return float_bits(at_[i]);
  }

 private:
  const float* at_;
  uint2 pair_;
};

/// Calls f.operator()<kRun>(): chunks of a word of scales. A single scale of int4 is there as often
/// as scales of two chunks would be (loader.h).
template <class Traits, class F>
FLASHBSR_DEVICE void with_packed_run(int groups, const F& f) {
  constexpr int kChunks = Traits::kHeadDim / 32;
  if constexpr (Traits::kKv == DType::kI4 && !Traits::kBoxes) {
    if (groups == kChunks) return f.template operator()<1>();
  }
  f.template operator()<2>();
}

/// What a lane needs of the scales of a token's keys.
/// @tparam Traits  of int4; the units of ptx/codes.h are theirs
template <class Traits, int kRun, DType = Traits::kKv>
class PackedKeys {
  static_assert(Traits::kKeyUnit == ptx::kF16CodeUnit);

 public:
  static constexpr bool kByCodes = false;  ///< products of a run take the scale

  /// `scales`: the token's.
  FLASHBSR_DEVICE PackedKeys(const float* scales, int) : scales_(scales) {}

  /// Goes on to the run of a chunk.
  FLASHBSR_DEVICE void begin(int chunk) {
    const uint32_t packed = scales_.word(chunk / kRun);
    scale_ = int4_scale(bits_float(packed));
    minus_ = ptx::int4_minus_f16(packed);
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int, uint32_t (&pairs)[4]) const {
    ptx::int4_to_f16(word, minus_, pairs);
  }
  FLASHBSR_DEVICE float scale() const { return scale_; }

 private:
  PackedScales<Traits, kRun> scales_;
  float scale_ = 0;
  uint32_t minus_ = 0;
};

/// A word has the scales of two chunks, two of each.
template <class Traits, int kRun>
class PackedKeys<Traits, kRun, DType::kE2M1> {
  static_assert(Traits::kKeyUnit == ptx::kE2M1Unit<DType::kF16> && kRun == 2);

 public:
  static constexpr bool kByCodes = true;

  FLASHBSR_DEVICE PackedKeys(const float* scales, int lane)
      : scales_(scales), picks_(lane & 2 ? 0x31 : 0x20) {}

  FLASHBSR_DEVICE void begin(int chunk) {
    const uint32_t bytes = ptx::permute_bytes(scales_.word(chunk / 2), 0, picks_);
    uint32_t unused;
    ptx::float8_to_f16<Traits::kArch, DType::kE4M3>(bytes, of_chunks_, unused);
    of_chunks_ = ptx::e2m1_scales<DType::kF16>(of_chunks_);
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int chunk, uint32_t (&pairs)[4]) const {
    const uint32_t scale = chunk % 2 ? ptx::twice_high(of_chunks_) : ptx::twice_low(of_chunks_);
    ptx::e2m1_by_scales<DType::kF16>(word, scale, pairs);
  }

 private:
  PackedScales<Traits, 2> scales_;
  uint32_t picks_;          // dims 8 t of a chunk are of its first scale or of its second
  uint32_t of_chunks_ = 0;  // of the current two
};

/// What a lane needs of the scales of 16 tokens' values; its weights are those of tokens g and
/// g + 8, and the codes it has are of 2 t, 2 t + 1 and both of these plus 8.
template <class Traits, int kRun, DType = Traits::kKv>
class PackedValues {
  static_assert(Traits::kValueUnit == ptx::kBf16CodeUnit);
  using Scales = PackedScales<Traits, kRun>;
  static constexpr int kStride = Scales::kStride;

 public:
  static constexpr int kOperands = Scales::kWords;  ///< that weights make, one for each run

  FLASHBSR_DEVICE PackedValues(const float* scales, int lane)
      : of_codes_(scales + 2 * (lane & 3) * kStride) {}

  /// Weights by the scales of their values, as the products' B operands.
  template <int kTiles>
  FLASHBSR_DEVICE static void weights(const float* scales, int lane, const float (&p)[kTiles][4],
                                      uint32_t (&b)[kOperands][kTiles][2]) {
    const float* of_token = scales + (lane >> 2) * kStride;
    const Scales low(of_token), high(of_token + 8 * kStride);
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      const float x = int4_scale(bits_float(low.word(i)));
      const float y = int4_scale(bits_float(high.word(i)));
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        b[i][n][0] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][0] * x, p[n][1] * x));
        b[i][n][1] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][2] * y, p[n][3] * y));
      }
    }
  }

  /// Goes on to the run of a chunk.
  FLASHBSR_DEVICE void begin(int chunk) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      minus_[k] = ptx::int4_minus_bf16(first_[k].word(chunk / kRun), second_[k].word(chunk / kRun));
    }
  }
  /// Of tokens 2 t + 8 k and the next.
  FLASHBSR_DEVICE void widen(uint32_t word, int k, int, uint32_t (&pairs)[4]) const {
    ptx::int4_to_bf16(word, minus_[k], pairs);
  }

 private:
  const float* of_codes_;
  Scales first_[2] = {Scales(of_codes_), Scales(of_codes_ + 8 * kStride)};
  Scales second_[2] = {Scales(of_codes_ + kStride), Scales(of_codes_ + 9 * kStride)};
  uint32_t minus_[2];
};

template <class Traits, int kRun>
class PackedValues<Traits, kRun, DType::kE2M1> {
  static_assert(Traits::kValueUnit == ptx::kE2M1Unit<DType::kF16> && kRun == 2);
  using Scales = PackedScales<Traits, 2>;
  static constexpr int kStride = Scales::kStride;

 public:
  static constexpr int kOperands = 1;

  FLASHBSR_DEVICE PackedValues(const float* scales, int lane)
      : of_codes_(scales + 2 * (lane & 3) * kStride), picks_(lane & 16 ? 0x7351 : 0x6240) {}

  template <int kTiles>
  FLASHBSR_DEVICE static void weights(const float*, int, const float (&p)[kTiles][4],
                                      uint32_t (&b)[1][kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      b[0][n][0] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][0], p[n][1]));
      b[0][n][1] = ptx::movmatrix_trans(ptx::pack2<Traits::kCompute>(p[n][2], p[n][3]));
    }
  }

  FLASHBSR_DEVICE void begin(int chunk) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t bytes =
          ptx::permute_bytes(first_[k].word(chunk / 2), second_[k].word(chunk / 2), picks_);
      ptx::float8_to_f16<Traits::kArch, DType::kE4M3>(bytes, of_chunks_[k][0], of_chunks_[k][1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_chunks_[k][i] = ptx::e2m1_scales<DType::kF16>(of_chunks_[k][i]);
      }
    }
  }
  FLASHBSR_DEVICE void widen(uint32_t word, int k, int chunk, uint32_t (&pairs)[4]) const {
    ptx::e2m1_by_scales<DType::kF16>(word, of_chunks_[k][chunk % 2], pairs);
  }

 private:
  const float* of_codes_;
  uint32_t picks_;  // dims 4 g of a chunk are of its first scale or of its second
  Scales first_[2] = {Scales(of_codes_), Scales(of_codes_ + 8 * kStride)};
  Scales second_[2] = {Scales(of_codes_ + kStride), Scales(of_codes_ + 9 * kStride)};
  uint32_t of_chunks_[2][2];  // of the current two, each of two tokens
};

/// Tile `u` of a stage, 16 tokens of a head: those of the first head, then those of the second.
template <class Traits>
struct PackedTile {
  static constexpr int kOfHead = Traits::kBoxes ? Traits::kKvTile / 16 : Traits::kStageRows / 16;
  int u;

  /// A lane's address for ldmatrix, of chunks 2 i and 2 i + 1.
  /// @param at  the stage; of boxes the lane's place in it (pair_boxes.h), of which chunks, that
  ///            change places by their bits, make all addresses
  FLASHBSR_DEVICE uint32_t row(uint32_t at, int lane, int i) const {
    if constexpr (Traits::kBoxes) {
      return (at + u % kOfHead * 16 * Traits::kTokenBytes) ^
             (u / kOfHead * Traits::kRowBytes + 32 * i);
    }
    return at + decode_tile_offset<Traits>(16 * u + (lane & 15), 2 * i + (lane >> 4));
  }
  /// The scales of its first token.
  template <int kRun>
  FLASHBSR_DEVICE const float* scales(const float* stage) const {
    constexpr int kStride = PackedScales<Traits, kRun>::kStride;
    return stage + u % kOfHead * 16 * kStride + u / kOfHead * Traits::kScaleWords;
  }
};

/// Logits of a stage, over Traits::kKeyUnit: s[u] of tile u.
/// @param scales  of the stage
template <class Traits, int kRun, int kSubTiles, int kTiles>
FLASHBSR_DEVICE void packed_scores(const DecodeQuery<Traits>& query, uint32_t keys,
                                   const float* scales, int lane,
                                   float (&s)[kSubTiles][kTiles][4]) {
  using Keys = PackedKeys<Traits, kRun>;
  constexpr int kStride = PackedScales<Traits, kRun>::kStride, kChunks = Traits::kHeadDim / 32;
  using Tile = PackedTile<Traits>;
  // Two tiles of tokens by turns: their chains of products do not wait for each other.
#pragma unroll
  for (int u = 0; u < kSubTiles; u += 2) {
    const float* of_token = Tile{u}.template scales<kRun>(scales) + (lane >> 2) * kStride;
    const float* of_other = Tile{u + 1}.template scales<kRun>(scales) + (lane >> 2) * kStride;
    Keys low[2] = {Keys(of_token, lane), Keys(of_other, lane)};
    Keys high[2] = {Keys(of_token + 8 * kStride, lane), Keys(of_other + 8 * kStride, lane)};
    float sum[2][kTiles][4];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[u + w][n][e] = 0;
      }
    }
    const auto multiply = [&](int w, int chunk, uint32_t codes, uint32_t codes_below) {
      if (chunk % kRun == 0) {
        low[w].begin(chunk);
        high[w].begin(chunk);
      }
      uint32_t a[4], b[4];
      low[w].widen(codes, chunk, a);
      high[w].widen(codes_below, chunk, b);
      const uint32_t first[4] = {a[0], b[0], a[1], b[1]}, second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 q = query.operands(n, chunk);
        float (&x)[4] = Keys::kByCodes ? s[u + w][n] : sum[w][n];
        if (!Keys::kByCodes && chunk % kRun == 0) x[0] = x[1] = x[2] = x[3] = 0;
        ptx::mma_m16n8k16<Traits::kKeyCompute>(x, first, q.x, q.y);
        ptx::mma_m16n8k16<Traits::kKeyCompute>(x, second, q.z, q.w);
        if constexpr (!Keys::kByCodes) {
          if ((chunk + 1) % kRun != 0) continue;
          s[u + w][n][0] += low[w].scale() * x[0];
          s[u + w][n][1] += low[w].scale() * x[1];
          s[u + w][n][2] += high[w].scale() * x[2];
          s[u + w][n][3] += high[w].scale() * x[3];
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      uint32_t raw[2][4];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        ptx::ldmatrix_x4(raw[w], Tile{u + w}.row(keys, lane, i));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        multiply(0, 2 * i + h, raw[0][2 * h], raw[0][2 * h + 1]);
        multiply(1, 2 * i + h, raw[1][2 * h], raw[1][2 * h + 1]);
      }
    }
  }
}

/// O += V^T P^T of a stage, over Traits::kValueUnit, with weights p[u] of tile u of either head, as
/// DecodeMath has them. Values of one of two heads meet the weights of that head's rows, and
/// zeros in place of the others': O has all rows at once.
/// @param second  whether this lane's column of operands, g, is a row of the second head
template <class Traits, int kRun, int kSubTiles, int kTiles>
FLASHBSR_DEVICE void packed_values(uint32_t values, const float* scales, int lane, bool second,
                                   const float (&p)[kSubTiles][kTiles][4],
                                   float (&o)[Traits::kHeadDim / 16][kTiles][4]) {
  using Values = PackedValues<Traits, kRun>;
  constexpr int kChunks = Traits::kHeadDim / 32;
#pragma unroll
  for (int u = 0; u < Traits::kHeads * kSubTiles; ++u) {
    uint32_t b[Values::kOperands][kTiles][2];
    const PackedTile<Traits> from{u};
    const float* of_tile = from.template scales<kRun>(scales);
    Values::weights(of_tile, lane, p[u % kSubTiles], b);
    if constexpr (Traits::kHeads == 2) {
      const uint32_t mine = second == (u >= kSubTiles) ? ~0u : 0u;
#pragma unroll
      for (int i = 0; i < Values::kOperands; ++i) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          b[i][n][0] &= mine;
          b[i][n][1] &= mine;
        }
      }
    }
    Values codes(of_tile, lane);
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i) {
      uint32_t raw[4];
      ptx::ldmatrix_x4_trans(raw, from.row(values, lane, i));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int chunk = 2 * i + h;
        if (chunk % kRun == 0) codes.begin(chunk);
        uint32_t a[4], c[4];
        codes.widen(raw[2 * h], 0, chunk, a);
        codes.widen(raw[2 * h + 1], 1, chunk, c);
        const uint32_t first[4] = {a[0], a[1], c[0], c[1]}, second[4] = {a[2], a[3], c[2], c[3]};
        const int run = Values::kOperands == 1 ? 0 : chunk / kRun;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint32_t (&w)[2] = b[run][n];
          ptx::mma_m16n8k16<Traits::kCompute>(o[2 * chunk][n], first, w[0], w[1]);
          ptx::mma_m16n8k16<Traits::kCompute>(o[2 * chunk + 1][n], second, w[0], w[1]);
        }
      }
    }
  }
}

}  // namespace flashbsr
