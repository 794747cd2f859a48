// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Products of few query rows with rows of K and V where they lie: elements become words on their
// way into registers. On AVX2 that is twice as fast as to convert a tile first, of bf16 and of int8
// (docs/cpu.md).
#pragma once

#include <flashbsr/core/view.h>
#include <flashbsr/cpu/convert.h>
#include <flashbsr/cpu/gemm.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

template <class Op>
inline constexpr DType kWordType = Op::kPerWord == 2 ? DType::kBF16 : DType::kF32;

/// Types that become words in a register, by a few instructions: of float8, which takes ten, rows
/// are converted once for all that multiply them.
template <class Op>
FLASHBSR_FN bool is_read_in_place(DType t) {
  if (t == kWordType<Op>) return true;
#if defined(__AVX512F__) || defined(__F16C__)
  const bool half = t == DType::kF16;
#else
  const bool half = false;
#endif
  if (t == DType::kI8) return true;
  return Op::kPerWord == 1 ? half || t == DType::kBF16 : is_packed(t);
}

/// Whether rows of `x` are whole vectors of such a type.
template <class Op>
FLASHBSR_FN bool in_place(const PagedView& x) {
  return is_read_in_place<Op>(x.dtype) && x.dim % (kLanes * Op::kPerWord) == 0;
}

/// Calls f.template operator()<T>() for one of these types.
template <class Op, class F>
FLASHBSR_FN void with_row_type(DType t, const F& f) {
  if (t == DType::kI8) return f.template operator()<DType::kI8>();
  if constexpr (Op::kPerWord == 1) {
    if (t == DType::kBF16) return f.template operator()<DType::kBF16>();
    if (t == DType::kF16) return f.template operator()<DType::kF16>();
  } else {
    if (t == DType::kI4) return f.template operator()<DType::kI4>();
    if (t == DType::kE2M1) return f.template operator()<DType::kE2M1>();
  }
  f.template operator()<kWordType<Op>>();
}

/// Words of pairs of bf16, from floats that are bf16 exactly.
FLASHBSR_FN FloatV bf16_pairs(FloatV low, FloatV high) {
  return as_float(bits(low) >> 16 | bits(high));
}

/// Half of what a scale of e4m3 means.
FLASHBSR_FN float half_e4m3(uint8_t scale) {
  struct Table {
    float at[256];
  };
  static constexpr Table kHalves = [] {
    Table table{};
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t exponent = i >> 3 & 15, mantissa = i & 7;
      // 2^(e - 7) (1 + m / 8), below that m 2^-9; here half of it.
      float x = exponent ? __builtin_bit_cast(float, (exponent + 119) << 23 | mantissa << 20)
                         : static_cast<float>(mantissa) / 1024.0f;
      if ((i & 127) == 127) x = __builtin_nanf("");
      table.at[i] = i & 128 ? -x : x;
    }
    return table;
  }();
  return kHalves.at[scale];
}

/// Rows of K or V, one for each token.
struct TokenRows {
  const char* const* at;
  const uint16_t* lift = nullptr;       ///< of int4: 16 less the zero point, in one group of dims
  const char* const* scales = nullptr;  ///< of NVFP4: e4m3 of each 16 dims

  FLASHBSR_FN const char* operator[](int i) const { return at[i]; }
  /// Of row `i`: halves of the scales of 32 dims from `dim` on, as 16 words have them.
  FLASHBSR_FN FloatV halves(int i, int64_t dim) const {
    const char* const of = scales[i] + dim / 16;
    const float low = half_e4m3(static_cast<uint8_t>(of[0]));
    const float high = half_e4m3(static_cast<uint8_t>(of[1]));
    return select(iota() < kLanes / 2, splat(low), splat(high));
  }
};

/// Words [at, at + kLanes) of a row. Of int8 each has two elements that lie 16 apart, as
/// swap_queries() has those of Q.
template <class Op, DType T>
FLASHBSR_FN FloatV row_words(const TokenRows& rows, int i, int64_t at) {
  if constexpr (Op::kPerWord == 1) {
    return load_as<T>(rows[i] + at * dtype_size(T));
  } else if constexpr (T == DType::kI8) {
    return bf16_pairs(load_as<T>(rows[i] + at * 2), load_as<T>(rows[i] + at * 2 + kLanes));
  } else if constexpr (T == DType::kI4) {
    const UintV codes = widen8(rows[i] + at);
    return Op::code_pairs(codes | codes << 12, UintV{} + rows.lift[i] * 0x10001u);
  } else if constexpr (T == DType::kE2M1) {
    const UintV codes = widen8(rows[i] + at);
    const FloatV scale = rows.halves(i, at * 2);
    return bf16_pairs(Op::twice_e2m1(codes) * scale, Op::twice_e2m1(codes >> 4) * scale);
  } else {
    return load(rows[i] + at * 4);
  }
}

/// A row of Q for K of int8.
FLASHBSR_FN void swap_queries(const float* q, int dim, float* words) {
  for (int d = 0; d < dim; d += 2 * kLanes) {
    const UintV low = __builtin_convertvector(to_bf16(load(q + d)), UintV);
    const UintV high = __builtin_convertvector(to_bf16(load(q + d + kLanes)), UintV);
    store(words + d / 2, low | high << 16);
  }
}

/// B in place: rows of elements, kPerWord of them to a row of words; `at` is the first element.
template <class Op, DType T = kWordType<Op>>
struct RowsB {
  /// Others have two vectors of columns at a time.
  static constexpr bool kOddVecs = Op::kPerWord == 1 || T == DType::kI8;
  TokenRows rows;
  int64_t at;

  template <int kVecs>
  FLASHBSR_FN void load_row(int k, FloatV (&out)[kVecs]) const {
    if constexpr (Op::kPerWord == 1) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) out[v] = row_words<Op, T>(rows, k, at + v * kLanes);
    } else if constexpr (T == DType::kI8) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const int64_t byte = at + v * kLanes;
        out[v] = bf16_pairs(load_as<T>(rows[2 * k] + byte), load_as<T>(rows[2 * k + 1] + byte));
      }
    } else if constexpr (T == DType::kI4) {
      // Columns of even elements, then of odd ones.
      static_assert(kVecs % 2 == 0);
      const UintV lifts = UintV{} + load<uint32_t>(rows.lift + 2 * k);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v += 2) {
        const int64_t byte = (at + v * kLanes) / 2;
        const UintV codes = widen8(rows[2 * k] + byte) | widen8(rows[2 * k + 1] + byte) << 16;
        out[v] = Op::code_pairs(codes, lifts);
        out[v + 1] = Op::code_pairs(codes >> 4, lifts);
      }
    } else if constexpr (T == DType::kE2M1) {
      static_assert(kVecs % 2 == 0);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v += 2) {
        const int64_t first = at + v * kLanes;
        const UintV low = widen8(rows[2 * k] + first / 2),
                    high = widen8(rows[2 * k + 1] + first / 2);
        const FloatV x = rows.halves(2 * k, first), y = rows.halves(2 * k + 1, first);
        out[v] = bf16_pairs(Op::twice_e2m1(low) * x, Op::twice_e2m1(high) * y);
        out[v + 1] = bf16_pairs(Op::twice_e2m1(low >> 4) * x, Op::twice_e2m1(high >> 4) * y);
      }
    } else {
      static_assert(kVecs % 2 == 0);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v += 2) {
        const int64_t byte = (at + v * kLanes) * 2;
        interleave16(rows[2 * k] + byte, rows[2 * k + 1] + byte, out[v], out[v + 1]);
      }
    }
  }
  FLASHBSR_FN void skip(int vecs) { at += vecs * kLanes; }
};

/// Columns of a product with RowsB of packed codes, in the order of the elements.
FLASHBSR_FN void unzip_columns(float* columns, int64_t count) {
  for (int64_t c = 0; c < count; c += 2 * kLanes) {
    store_zipped(columns + c, load(columns + c), load(columns + c + kLanes));
  }
}

/// Tokens that dot_block takes are a multiple of this.
inline constexpr int kDotTokens = 4;

/// Tokens side by side. Their sums, of six rows at most, and what they are made of fit the
/// registers: 4 x 6 of 32, 2 x 6 of 16. One row alone has four sums, so that none waits for itself.
template <int kRows>
inline constexpr int kDotColumns = kBlockVecs == 4 || kRows == 1 ? 4 : 2;

/// S[r, t] = q_r . k_t over words [begin, end) of rows in place: for so few query rows that
/// transposing K would cost more than the horizontal sums do.
template <class Op, DType T, int kRows>
__attribute__((noinline)) void dot_block(const float* q, int64_t ldq, TokenRows keys, int tokens,
                                         int begin, int end, float* s, int64_t lds) {
  constexpr int kColumns = kDotColumns<kRows>;
  for (int t = 0; t < tokens; t += kColumns) {
    FloatV acc[kRows][kColumns] = {};
    for (int w = begin; w < end; w += kLanes) {
      FloatV kv[kColumns];
#pragma GCC unroll 4
      for (int i = 0; i < kColumns; ++i) kv[i] = row_words<Op, T>(keys, t + i, w);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const FloatV qv = load(q + r * ldq + w);
#pragma GCC unroll 4
        for (int i = 0; i < kColumns; ++i) acc[r][i] = Op::mac(acc[r][i], qv, kv[i]);
      }
    }
    if constexpr (kColumns == 4) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        store(s + r * lds + t, reduce_add4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r += 2) {
        const int next = min_of(r + 1, kRows - 1);
        const FloatV4 sums = reduce_add4(acc[r][0], acc[r][1], acc[next][0], acc[next][1]);
        std::memcpy(s + r * lds + t, &sums, 8);
        std::memcpy(s + next * lds + t, reinterpret_cast<const char*>(&sums) + 8, 8);
      }
    }
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
