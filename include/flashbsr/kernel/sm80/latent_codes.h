// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Latents of e4m3 in products of fp16 (latent.h), of 16 rows. Codes lie in shared memory as they
// are and are widened on their way to the tensor cores, which takes half of the bandwidth that a
// widened tile would. Of rows of 656 bytes a warp's dims of S share the scales of tokens, and so do
// its dims of O: its part of S is multiplied by them, and weights lie there by all four.
#pragma once

#include <flashbsr/core/latent_row.h>
#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/kernel/sm80/loader.h>
#include <flashbsr/kernel/sm80/query.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/tile/fragments.h>

namespace flashbsr::sm80 {

/// The tile at KV position `first`, noted in `slot`, is under way to shared address `tile`. Eight
/// threads have a row.
template <class Traits>
FLASHBSR_DEVICE void copy_codes(const BlockState& state, const Task& task, int32_t first,
                                uint32_t slot, uint32_t tile) {
  static_assert(Traits::kKvTile * 8 == Traits::kThreads);
  const int32_t thread = ptx::thread_index();
  const int32_t row = thread / 8, chunk = thread % 8;
  const bool inside = row < task.item.kv_end - first;
  const char* const* const rows = state.kv_rows + slot * (2 * Traits::kKvTile) + row;
  const char* const codes = rows[0];
  const uint32_t to = tile + Swizzle<Traits::kRowBytes>::offset(row, chunk);
#pragma unroll
  for (int j = 0; j < Traits::kRowBytes / 128; ++j) {
    ptx::cp_async_16_if(to + j * 128, codes + j * 128 + chunk * 16, inside);
  }
  constexpr int kTailChunks = Traits::kTailRowBytes / 16;
  if (kTailChunks == 8 || chunk < kTailChunks) {
    const char* const tail =
        Traits::kRowScales ? codes + PackedLatent::kTailOffset : rows[Traits::kKvTile];
    ptx::cp_async_16_if(
        tile + Traits::kTileTailOffset + Swizzle<Traits::kTailRowBytes>::offset(row, chunk),
        tail + chunk * 16, inside);
  }
  if (Traits::kRowScales && chunk == 0) {
    ptx::cp_async_16_if(tile + Traits::kTileScaleOffset + row * 16,
                        codes + PackedLatent::kScaleOffset, inside);
  }
}

/// Q for products with codes, in place, between barriers: rows of bf16 are multiplied by powers of
/// two, which `scales` take back (detail::fp16_exponent), and columns go where codes find them. The
/// tails of rows with scales keep their type and order.
template <class Traits>
FLASHBSR_DEVICE void fit_queries(const Params& p, char* tile, float* scales) {
  constexpr int kRowBytes = Traits::kHeadDim * 2, kGroups = Traits::kHeadDim / 16;
  static_assert(Traits::kRows * 16 == Traits::kThreads);  // 16 threads have a row
  const int32_t thread = ptx::thread_index(), row = thread / 16;
  const bool convert = p.q.dtype == DType::kBF16;
  float factor = 1.0f;
  if (convert) {
    float magnitude = 0.0f;
    for (int group = thread % 16; group < kGroups; group += 16) {
      uint32_t pair[8];
      detail::read_group<kRowBytes>(tile, row, group, pair);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        magnitude = ptx::max(magnitude, fabsf(ptx::unpack_low<DType::kBF16>(pair[e])));
        magnitude = ptx::max(magnitude, fabsf(ptx::unpack_high<DType::kBF16>(pair[e])));
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) {
      magnitude = ptx::max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, lanes));
    }
    const int32_t exponent = detail::fp16_exponent(magnitude);
    factor = bits_float(static_cast<uint32_t>(exponent) << 23);
    if (thread % 16 == 0) scales[row] *= bits_float(static_cast<uint32_t>(254 - exponent) << 23);
  }
  for (int group = thread % 16; group < kGroups; group += 16) {
    uint32_t pair[8];
    detail::read_group<kRowBytes>(tile, row, group, pair);
    const bool tail = Traits::kRowScales && group >= Traits::kValueDim / 16;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (!convert) continue;
      const float x = ptx::unpack_low<DType::kBF16>(pair[e]) * factor;
      const float y = ptx::unpack_high<DType::kBF16>(pair[e]) * factor;
      pair[e] = tail ? ptx::pack2<DType::kBF16, Traits::kArch>(x, y)
                     : ptx::pack2<DType::kF16, Traits::kArch>(x, y);
    }
    if (tail) {
      detail::write_group<kRowBytes, false>(tile, row, group, pair);
    } else {
      detail::write_group<kRowBytes, true>(tile, row, group, pair);
    }
  }
}

/// Of 16 tokens of a tile, a warp's dims: 128 of the latent and 16 of the tail.
template <class Traits>
struct CodedKeys {
  static constexpr int kSteps = 8;                  ///< of the latent
  using Codes = QueryFragments<Traits::kRowBytes>;  // two neighbouring chunks of 16 rows
  const Codes codes;
  uint32_t tail, scales;

  /// @param first  of the tokens
  /// @param warp   whose dims
  FLASHBSR_DEVICE CodedKeys(uint32_t tile, int32_t first, int32_t warp, int32_t lane)
      : codes(tile + warp * (kSteps * 16), first, lane) {
    static_assert(PackedLatent::kGroupDims == kSteps * 16);
    const uint32_t tails = tile + Traits::kTileTailOffset;
    using Place = Swizzle<Traits::kTailRowBytes>;
    tail = Traits::kRowScales
               ? tails + Place::offset(first + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2)
               : tails + Place::offset(first + lane % 16, warp);
    scales = tile + Traits::kTileScaleOffset + (first + lane % 4 * 2) * 16 + warp * 4;
  }

  /// S += Q K^T; queries(a, n) loads Q of step n, of which that of the tail is the last.
  /// @param q  type of Q as it came: tails of bf16 are multiplied by their own type, or by fp16
  template <class Queries>
  FLASHBSR_DEVICE void multiply(float (&s)[2][4], DType q, const Queries& queries) const {
#pragma unroll
    for (int n = 0; n < kSteps; n += 2) {
      uint32_t r[4];
      codes.load(r, 0, n / 2);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t a[4];
        queries(a, n + step);
        add_codes(s, a, r[2 * step], r[2 * step + 1]);
      }
    }
    if constexpr (Traits::kRowScales) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = __uint_as_float(ptx::load_shared(scales + (i / 2 * 8 + i % 2) * 16));
        s[i / 2][i % 2] *= scale;
        s[i / 2][i % 2 + 2] *= scale;
      }
    }
    uint32_t a[4], r[4];
    queries(a, kSteps);
    ptx::ldmatrix_x4(r, tail);
    if constexpr (!Traits::kRowScales) {
      add_codes(s, a, r[0], r[1]);
    } else if (q == DType::kBF16) {
      mma_16x8x16<Traits::kArch, DType::kBF16>(s[0], a, r[0], r[1]);
      mma_16x8x16<Traits::kArch, DType::kBF16>(s[1], a, r[2], r[3]);
    } else {
#pragma unroll
      for (uint32_t& pair : r) {
        pair = ptx::pack2<DType::kF16, Traits::kArch>(ptx::unpack_low<DType::kBF16>(pair),
                                                      ptx::unpack_high<DType::kBF16>(pair));
      }
      mma_16x8x16<Traits::kArch, DType::kF16>(s[0], a, r[0], r[1]);
      mma_16x8x16<Traits::kArch, DType::kF16>(s[1], a, r[2], r[3]);
    }
  }

 private:
  FLASHBSR_DEVICE static void add_codes(float (&s)[2][4], const uint32_t (&a)[4], uint32_t first,
                                        uint32_t second) {
    uint32_t k[2][2];
    ptx::widen_bytes<Traits::kArch, Traits::kKv, DType::kF16>(first, k[0][0], k[0][1]);
    ptx::widen_bytes<Traits::kArch, Traits::kKv, DType::kF16>(second, k[1][0], k[1][1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma_16x8x16<Traits::kArch, DType::kF16>(s[i], a, k[i][0], k[i][1]);
    }
  }
};

/// A lane's weights of 16 tokens by the scales of each group of dims, to `to` and 512 bytes on for
/// the next group.
/// @param first  of the tokens, of the tile at shared address `tile`
template <class Traits>
FLASHBSR_DEVICE void store_scaled_weights(uint32_t to, uint32_t tile, int32_t first, int32_t lane,
                                          const float (&w)[4][2]) {
  constexpr int kGroups = PackedLatent::kDim / PackedLatent::kGroupDims;
  static_assert(kGroups * 512 <= Traits::kUnitBytes);
  float scales[4][kGroups];  // of the lane's tokens
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t token = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
    ptx::load_shared(tile + Traits::kTileScaleOffset + token * 16, scales[i]);
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = ptx::pack2<Traits::kCompute, Traits::kArch>(w[i][0] * scales[i / 2 * 2][g],
                                                         w[i][1] * scales[i / 2 * 2 + 1][g]);
    }
    ptx::store_shared_16(to + g * 512, {p[0], p[1], p[2], p[3]});
  }
}

}  // namespace flashbsr::sm80
