// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Products with int8 and int4 codes on Intel's tile registers (AMX), for few query rows. Codes stay
// integers, and what they are multiplied with becomes integers of several digits to base 256:
// queries of three (23 bits of a row's largest element), weights of four (31 bits of the largest of
// a row in a KV tile: less than 2^-32 of that counts as zero). Products of digits are exact in
// int32 and put together in float. On a Sapphire
// Rapids core that takes a fifth of the time of widening codes for bf16 products (docs/cpu.md).
#pragma once

#include <flashbsr/cpu/digits.h>
#include <flashbsr/cpu/tile_permission.h>
#include <flashbsr/cpu/transpose.h>

#if defined(__AMX_INT8__)

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline constexpr bool kHasIntegers = true;
inline constexpr int kTileRows = 16, kTileDims = kChunkDims, kTileBytes = kTileRows * kTileDims;

/// Whether products with these rows are made in tiles.
FLASHBSR_FN bool in_integers(const PagedView& x, const PagedView& scales) {
  return whole_chunks(x, scales) && may_use_tiles();
}

/// Memory for the products of one item of few rows.
struct IntegerMemory {
  static constexpr int kKeyTiles = 4;  ///< that are multiplied side by side
  static constexpr int kQueryDigits = 3, kWeightDigits = 4;
  static constexpr int kQueryRows = kTileRows / kQueryDigits;    ///< of a tile
  static constexpr int kWeightRows = kTileRows / kWeightDigits;  ///< likewise

  int8_t* q;       ///< [dims / 64][row tiles][tile]
  float* q_scale;  ///< [rows]
  int8_t* keys;    ///< [64][dims], where rows are not as far apart as each other, or packed
  int32_t* sums;   ///< [4][tile of int32]
  int8_t* p;       ///< [row tiles][2][tile]
  int64_t bytes = 0;

  IntegerMemory(char* base, int rows, int dk) {
    const auto take = [&](int64_t size) {
      char* at = base + bytes;
      bytes += round_up<int64_t>(size, 64);
      return at;
    };
    const int64_t row_tiles = ceil_div(rows, kQueryRows);
    q = reinterpret_cast<int8_t*>(take(ceil_div(dk, kTileDims) * row_tiles * kTileBytes));
    q_scale = reinterpret_cast<float*>(take(rows * 4));
    keys = reinterpret_cast<int8_t*>(take(kKeyTiles * kTileRows * round_up(dk, kTileDims)));
    sums = reinterpret_cast<int32_t*>(take(4 * kTileBytes));
    p = reinterpret_cast<int8_t*>(take(ceil_div(rows, kWeightRows) * 2 * kTileBytes));
  }
};

/// All eight tiles: 16 rows of 64 bytes.
inline void begin_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
}
/// Without their contents a thread is switched faster.
inline void end_tiles() { _tile_release(); }

/// The digits of a query row, in the column of each that products take.
inline void split_query(const float* q, int dim, int row, int rows, const IntegerMemory& m) {
  const int tiles = ceil_div(rows, IntegerMemory::kQueryRows);
  const int column = row % IntegerMemory::kQueryRows * IntegerMemory::kQueryDigits;
  int8_t* at = m.q + row / IntegerMemory::kQueryRows * kTileBytes + column * 4;
  m.q_scale[row] =
      split_row<IntegerMemory::kQueryDigits>(q, dim, [&](int d, int digit, int8_t value) {
        at[d / kTileDims * tiles * kTileBytes + d % kTileDims / 4 * 64 + d % 4 + digit * 4] = value;
      });
}

/// Rows [first, first + 16) of K as a tile's rows: where they lie, or copied side by side.
struct TileKeys {
  const char* base;
  int64_t step;
};
template <DType T>
FLASHBSR_FN TileKeys tile_keys(const Operand& keys, int first, int count, int8_t* copy) {
  const int dim = keys.x.dim, live = min_of(kTileRows, count - first);
  if (T == DType::kI8 && live == kTileRows) {
    const char* const* rows = keys.rows + first;
    const int64_t step = rows[1] - rows[0];
    bool even = true;
    for (int i = 2; i < kTileRows; ++i) even = even && rows[i] - rows[i - 1] == step;
    if (even) return {rows[0], step};
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int c = 0; c < dim / kTileDims; ++c) {
      const int g = c * kTileDims / keys.group_size();
      const __m512i codes =
          i < live ? load_codes<T>(keys.rows[first + i], c, zero_of<T>(keys, first + i, g))
                   : _mm512_setzero_si512();
      _mm512_storeu_si512(copy + i * dim + c * 64, codes);
    }
  }
  return {reinterpret_cast<const char*>(copy), dim};
}

/// S = Q K^T with K's scales, of `rows` rows: s[r * lds + token].
template <DType T>
__attribute__((noinline)) void score_integers(const Operand& keys, int count, const float* scale,
                                              int scale_stride, int rows, const IntegerMemory& m,
                                              float* s, int lds) {
  const int chunks = keys.x.dim / kTileDims, per_group = keys.group_size() / kTileDims;
  const int tiles = ceil_div(rows, IntegerMemory::kQueryRows);
  alignas(64) float turned[kTileRows * kTileRows];
  // Four tiles of K at a time: their loads come from L2, and nothing waits for one of them alone.
  constexpr int kBlocks = IntegerMemory::kKeyTiles;
  for (int start = 0; start < count; start += kBlocks * kTileRows) {
    const int blocks = min_of(kBlocks, ceil_div(count - start, kTileRows));
    TileKeys from[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      from[b] = b < blocks ? tile_keys<T>(keys, start + b * kTileRows, count,
                                          m.keys + b * kTileRows * keys.x.dim)
                           : from[0];
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const int begin = tile * IntegerMemory::kQueryRows;
      for (int g = 0; g < chunks / per_group; ++g) {
        asm volatile("" ::: "memory");
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = g * per_group; c < (g + 1) * per_group; ++c) {
          _tile_loadd(6, m.q + (c * tiles + tile) * kTileBytes, 64);
          _tile_loadd(4, from[0].base + c * 64, from[0].step);
          _tile_dpbssd(0, 4, 6);
          _tile_loadd(5, from[1].base + c * 64, from[1].step);
          _tile_dpbssd(1, 5, 6);
          _tile_loadd(4, from[2].base + c * 64, from[2].step);
          _tile_dpbssd(2, 4, 6);
          _tile_loadd(5, from[3].base + c * 64, from[3].step);
          _tile_dpbssd(3, 5, 6);
        }
        _tile_stored(0, m.sums, 64);
        _tile_stored(1, m.sums + 256, 64);
        _tile_stored(2, m.sums + 512, 64);
        _tile_stored(3, m.sums + 768, 64);
        asm volatile("" ::: "memory");
        for (int b = 0; b < blocks; ++b) {
          const int first = start + b * kTileRows;
          const char* lines[kTileRows];
          for (int i = 0; i < kTileRows; ++i) {
            lines[i] = reinterpret_cast<const char*>(m.sums + b * 256 + i * kTileRows);
          }
          transpose_words(lines, 0, turned, kTileRows);
          const FloatV k_scale = load(scale + g * scale_stride + first);
          for (int r = begin; r < min_of(rows, begin + IntegerMemory::kQueryRows); ++r) {
            const float* digits = turned + (r - begin) * IntegerMemory::kQueryDigits * kTileRows;
            const IntV low =
                (load<IntV>(digits + kTileRows) << 8) + load<IntV>(digits + 2 * kTileRows);
            FloatV x = __builtin_convertvector(load<IntV>(digits), FloatV) * 65536.0f +
                       __builtin_convertvector(low, FloatV);
            x = x * m.q_scale[r] * k_scale;
            float* to = s + r * lds + first;
            store(to, g == 0 ? x : load(to) + x);
          }
        }
      }
    }
  }
}

/// V of a tile as the instruction takes it, four tokens of a dim side by side:
/// [tokens / 64][dims / 64][4][tile]. Column 4 l + i of the j-th tile is dim 16 l + 4 j + i.
template <DType T>
__attribute__((noinline)) void interleave_values(const Operand& values, int count, int8_t* out) {
  const int chunks = values.x.dim / kTileDims;
  for (int t = 0; t < round_up(count, kTileDims); t += 4) {
    int8_t* to = out + static_cast<int64_t>(t / kTileDims) * chunks * 4 * kTileBytes +
                 t % kTileDims / 4 * 64;
    for (int c = 0; c < chunks; ++c) {
      const int g = c * kTileDims / values.group_size();
      __m512i x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = t + i < count ? load_codes<T>(values.rows[t + i], c, zero_of<T>(values, t + i, g))
                             : _mm512_setzero_si512();
      }
      __m512i turned[4];
      interleave_four(x, turned);
      int8_t* tile = to + c * 4 * kTileBytes;
      for (int j = 0; j < 4; ++j) _mm512_store_si512(tile + j * kTileBytes, turned[j]);
    }
  }
}

/// O[r] += P V over `count` tokens, of all groups of V's dims; `weights` are floats.
template <DType T>
__attribute__((noinline)) void accumulate_integers(const Operand& values, int count,
                                                   const float* weights, int ldw,
                                                   const float* scale, int scale_stride, int rows,
                                                   const int8_t* v, const IntegerMemory& m,
                                                   float* o, int64_t ldo) {
  const int chunks = values.x.dim / kTileDims, per_group = values.group_size() / kTileDims;
  const int halves = ceil_div(count, kTileDims),
            row_tiles = ceil_div(rows, IntegerMemory::kWeightRows);
  float unit[kFewRows];
  for (int c = 0; c < chunks; ++c) {
    if (c % per_group == 0) {
      const float* of_group = scale + c / per_group * scale_stride;
      for (int r = 0; r < rows; ++r) {
        int8_t* at = m.p + r / IntegerMemory::kWeightRows * 2 * kTileBytes +
                     r % IntegerMemory::kWeightRows * IntegerMemory::kWeightDigits * 64;
        unit[r] = split_weights<IntegerMemory::kWeightDigits>(
            weights + r * ldw, of_group, count, round_up(count, kTileDims),
            [&](int i, int digit, __m128i x) {
              int8_t* to = at + i / kTileDims * kTileBytes + i % kTileDims + digit * 64;
              _mm_store_si128(reinterpret_cast<__m128i*>(to), x);
            });
      }
    }
    for (int tile = 0; tile < row_tiles; ++tile) {
      const int8_t* p = m.p + tile * 2 * kTileBytes;
      const int8_t* from = v + c * 4 * kTileBytes;
      const int64_t half = static_cast<int64_t>(chunks) * 4 * kTileBytes;
      asm volatile("" ::: "memory");
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int h = 0; h < halves; ++h, from += half) {
        _tile_loadd(4, p + h * kTileBytes, 64);
        _tile_loadd(5, from, 64);
        _tile_dpbssd(0, 4, 5);
        _tile_loadd(6, from + kTileBytes, 64);
        _tile_dpbssd(1, 4, 6);
        _tile_loadd(5, from + 2 * kTileBytes, 64);
        _tile_dpbssd(2, 4, 5);
        _tile_loadd(6, from + 3 * kTileBytes, 64);
        _tile_dpbssd(3, 4, 6);
      }
      _tile_stored(0, m.sums, 64);
      _tile_stored(1, m.sums + 256, 64);
      _tile_stored(2, m.sums + 512, 64);
      _tile_stored(3, m.sums + 768, 64);
      asm volatile("" ::: "memory");
      const int begin = tile * IntegerMemory::kWeightRows;
      for (int r = begin; r < min_of(rows, begin + IntegerMemory::kWeightRows); ++r) {
        FloatV sums[4];
        for (int j = 0; j < 4; ++j) {
          const int32_t* sum = m.sums + j * 256 + (r - begin) * IntegerMemory::kWeightDigits * 16;
          const IntV high = (load<IntV>(sum) << 8) + load<IntV>(sum + 16);
          const IntV low = (load<IntV>(sum + 32) << 8) + load<IntV>(sum + 48);
          sums[j] = __builtin_convertvector(high, FloatV) * 65536.0f +
                    __builtin_convertvector(low, FloatV);
        }
        add_columns(sums, unit[r], o + r * ldo + c * kTileDims);
      }
    }
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu

#endif  // __AMX_INT8__
