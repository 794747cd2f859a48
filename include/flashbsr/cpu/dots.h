// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Q K^T with int8 and int4 codes by AVX-512's dot products of four bytes (VNNI), for few query
// rows. Codes stay bytes, which the instruction wants unsigned: a bias is added to them, and what
// it adds to a sum is taken off where the sum begins. Queries become integers of three digits to
// base 256 (23 bits of a row's largest element). Products are exact in int32 and put together in
// float. Codes take no time to become bf16 (docs/cpu.md). Values do: weights of few digits lose
// what is small.
#pragma once

#include <flashbsr/cpu/digits.h>
#include <flashbsr/cpu/loader.h>
#include <flashbsr/cpu/transpose.h>

#if defined(__AVX512VNNI__)

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline constexpr bool kHasIntegers = true, kHasIntegerValues = false;

/// Whether products with these rows are made of integers.
FLASHBSR_FN bool in_integers(const PagedView& x, const PagedView& scales) {
  return whole_chunks(x, scales);
}

inline void begin_tiles() {}
inline void end_tiles() {}

/// Memory for the products of one item of few rows.
struct IntegerMemory {
  static constexpr int kDigits = 3;
  static constexpr int kRows = 4;    ///< side by side: their sums take 24 of 32 registers
  static constexpr int kBlocks = 2;  ///< of 16 tokens of K, side by side
  static constexpr int kTurned = kChunkDims * kLanes;  ///< bytes of a block's chunk

  int8_t* q;       ///< [rows][digits][dims]
  int32_t* q_sum;  ///< [rows][digits][dims / 64]: what digits add up to
  float* q_scale;  ///< [rows]
  char* keys;      ///< [dims / 64][blocks][four dims][tokens]: four bytes each
  int64_t bytes = 0;

  IntegerMemory(char* base, int rows, int dk) {
    const auto take = [&](int64_t size) {
      char* at = base + bytes;
      bytes += round_up<int64_t>(rows ? size : 0, 64);
      return at;
    };
    const int64_t chunks = ceil_div(dk, kChunkDims);
    q = reinterpret_cast<int8_t*>(take(rows * kDigits * chunks * kChunkDims));
    q_sum = reinterpret_cast<int32_t*>(take(rows * kDigits * chunks * 4));
    q_scale = reinterpret_cast<float*>(take(rows * 4));
    keys = take(chunks * kBlocks * kTurned);
  }
};

/// What makes a code a byte without a sign.
template <DType T>
inline constexpr int kBias = T == DType::kI8 ? 128 : 16;
/// int8 takes it by its sign bit, int4 with its zero point.
template <DType T>
FLASHBSR_FN __m512i biased(__m512i codes) {
  return T == DType::kI8 ? _mm512_xor_si512(codes, _mm512_set1_epi8(-128)) : codes;
}

FLASHBSR_FN __m512i four_of_each(const int8_t* digits) {
  return _mm512_set1_epi32(load<int32_t>(reinterpret_cast<const char*>(digits)));
}

/// Sums of digits, the highest first, as one number.
template <int kDigits>
FLASHBSR_FN FloatV put_together(const __m512i (&sums)[kDigits]) {
  FloatV x{};
#pragma GCC unroll 4
  for (int d = 0; d < kDigits; ++d) {
    x = x * 256.0f + __builtin_convertvector(reinterpret_cast<IntV>(sums[d]), FloatV);
  }
  return x;
}

/// Sums of rows [r, r + rows) in two columns, which begin as what the codes' bias adds to them.
template <int kRows, int kDigits>
struct Sums {
  __m512i at[kRows][2][kDigits];

  FLASHBSR_FN void take_off(int bias, const int32_t (&digits)[kRows][kDigits]) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int d = 0; d < kDigits; ++d) {
        at[i][0][d] = at[i][1][d] = _mm512_set1_epi32(-bias * digits[i][d]);
      }
    }
  }

  /// Codes of both columns, by four digits of each row, which lie `step` apart.
  FLASHBSR_FN void add(__m512i first, __m512i second, const int8_t* digits, int64_t step) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int d = 0; d < kDigits; ++d) {
        const __m512i four = four_of_each(digits + (i * kDigits + d) * step);
        at[i][0][d] = _mm512_dpbusd_epi32(at[i][0][d], first, four);
        at[i][1][d] = _mm512_dpbusd_epi32(at[i][1][d], second, four);
      }
    }
  }
};

/// Calls f.operator()<rows>(first) for rows side by side.
template <int kRows, class F>
FLASHBSR_FN void for_row_blocks(int rows, const F& f) {
  int r = 0;
  for (; r + kRows <= rows; r += kRows) f.template operator()<kRows>(r);
  for (; r < rows; ++r) f.template operator()<1>(r);
}

/// The digits of a query row.
inline void split_query(const float* q, int dim, int row, int, const IntegerMemory& m) {
  constexpr int kDigits = IntegerMemory::kDigits;
  const int chunks = dim / kChunkDims;
  int8_t* at = m.q + int64_t{row} * kDigits * dim;
  int32_t* sum = m.q_sum + row * kDigits * chunks;
  for (int i = 0; i < kDigits * chunks; ++i) sum[i] = 0;
  m.q_scale[row] = split_row<kDigits>(q, dim, [&](int d, int digit, int8_t value) {
    at[digit * dim + d] = value;
    sum[digit * chunks + d / kChunkDims] += value;
  });
}

/// 64 dims of 16 rows of K from `first` on: four dims of all rows side by side.
template <DType T>
FLASHBSR_FN void turn_keys(const Operand& keys, int first, int count, int c, char* out) {
  alignas(64) char unpacked[kLanes * kChunkDims];
  const char* lines[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    // Rows behind the last are copies of it: their logits are not looked at.
    const int row = min_of(first + i, count - 1);
    if constexpr (T == DType::kI8) {
      lines[i] = keys.rows[row] + c * kChunkDims;
    } else {
      const int zero = zero_of<T>(keys, row, c * kChunkDims / keys.group_size());
      lines[i] = unpacked + i * kChunkDims;
      _mm512_store_si512(unpacked + i * kChunkDims,
                         load_codes<T>(keys.rows[row], c, zero - kBias<T>));
    }
  }
  transpose_words(lines, 0, reinterpret_cast<float*>(out), kLanes);
}

/// S = Q K^T with K's scales, of `rows` rows: s[r * lds + token].
template <DType T>
__attribute__((noinline)) void score_integers(const Operand& keys, int count, const float* scale,
                                              int scale_stride, int rows, const IntegerMemory& m,
                                              float* s, int lds) {
  constexpr int kDigits = IntegerMemory::kDigits, kBlocks = IntegerMemory::kBlocks;
  constexpr int kTurned = IntegerMemory::kTurned;
  const int dim = keys.x.dim, chunks = dim / kChunkDims;
  const int per_group = keys.group_size() / kChunkDims;
  for (int start = 0; start < count; start += kBlocks * kLanes) {
    for (int i = 0; i < chunks * kBlocks; ++i) {
      turn_keys<T>(keys, start + i % kBlocks * kLanes, count, i / kBlocks, m.keys + i * kTurned);
    }
    for (int g = 0; g < chunks / per_group; ++g) {
      for_row_blocks<IntegerMemory::kRows>(rows, [&]<int kRows>(int r) {
        int32_t of_group[kRows][kDigits] = {};
        for (int i = 0; i < kRows * kDigits; ++i) {
          const int32_t* digits = m.q_sum + (r * kDigits + i) * chunks + g * per_group;
          for (int c = 0; c < per_group; ++c) of_group[i / kDigits][i % kDigits] += digits[c];
        }
        Sums<kRows, kDigits> sums;
        sums.take_off(kBias<T>, of_group);
        const int8_t* q = m.q + int64_t{r} * kDigits * dim + g * per_group * kChunkDims;
        const char* k = m.keys + g * per_group * kBlocks * kTurned;
        for (int c = 0; c < per_group; ++c, k += kBlocks * kTurned) {
          for (int at = 0; at < kTurned; at += 64, q += 4) {
            sums.add(biased<T>(_mm512_load_si512(k + at)),
                     biased<T>(_mm512_load_si512(k + kTurned + at)), q, dim);
          }
        }
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) {
          const int first = start + b * kLanes;
          if (first >= count) break;
          const FloatV k_scale = load(scale + g * scale_stride + first);
#pragma GCC unroll 4
          for (int i = 0; i < kRows; ++i) {
            const FloatV x = put_together(sums.at[i][b]) * m.q_scale[r + i] * k_scale;
            float* to = s + (r + i) * lds + first;
            store(to, g == 0 ? x : load(to) + x);
          }
        }
      });
    }
  }
}

// Names for code that this level leaves out.
template <DType T>
void interleave_values(const Operand&, int, int8_t*);
template <DType T>
void accumulate_integers(const Operand&, int, const float*, int, const float*, int, int,
                         const int8_t*, const IntegerMemory&, float*, int64_t);

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu

#endif  // __AVX512VNNI__
