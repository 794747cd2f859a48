// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The one micro-kernel of the CPU engine: C[rows, cols] (+)= A[rows, k] B[k, cols], used for Q K^T
// and for P V alike. The unit of k is a 32-bit word: one float, or a pair of bf16.
//
//   A  row-major words, broadcast one word at a time
//   B  packed, row k holds one word per column
//   C  float
//
// Register budget on 32 registers: 6 rows x 4 vectors of accumulators (24), 4 of B, 1 broadcast. Ten
// loads feed 24 multiply-adds, under the two loads a cycle that cores with two FMA pipes have. With
// 16 registers (AVX2, SSE2) it is 6 x 2 (12 + 2 + 1).
#pragma once

#include <flashbsr/cpu/simd.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kBlockVecs = 4;
#else
inline constexpr int kBlockVecs = 2;
#endif
inline constexpr int kBlockRows = 6;

/// Words are floats.
struct F32Op {
  static constexpr int kPerWord = 1;
  FLASHBSR_FN static FloatV mac(FloatV acc, FloatV a, FloatV b) { return a * b + acc; }
};

#if defined(__AVX512BF16__)
/// Words are pairs of bf16: vdpbf16ps multiplies both and adds to the float accumulator.
struct Bf16Op {
  static constexpr int kPerWord = 2;
  FLASHBSR_FN static FloatV mac(FloatV acc, FloatV a, FloatV b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

/// A[rows, k] B[k, cols] operands and leading dimensions, in words (floats for C).
struct GemmArgs {
  const float* a;
  int64_t lda;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  int k;
};

template <class Op, int kRows, int kVecs, bool kAccumulate>
__attribute__((noinline)) void gemm_block(const GemmArgs& g) {
  FloatV acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = kAccumulate ? load(g.c + r * g.ldc + v * kLanes) : FloatV{};
    }
  }
  const float* a = g.a;
  const float* b = g.b;
  for (int k = 0; k < g.k; ++k, ++a, b += g.ldb) {
    FloatV bv[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) bv[v] = load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FloatV av = broadcast_word(a + r * g.lda);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Op::mac(acc[r][v], av, bv[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) store(g.c + r * g.ldc + v * kLanes, acc[r][v]);
  }
}

template <class Op, int kVecs, bool kAccumulate>
FLASHBSR_FN void gemm_rows(const GemmArgs& g, int rows) {
  switch (rows) {
    case 1: return gemm_block<Op, 1, kVecs, kAccumulate>(g);
    case 2: return gemm_block<Op, 2, kVecs, kAccumulate>(g);
    case 3: return gemm_block<Op, 3, kVecs, kAccumulate>(g);
    case 4: return gemm_block<Op, 4, kVecs, kAccumulate>(g);
    case 5: return gemm_block<Op, 5, kVecs, kAccumulate>(g);
    default: return gemm_block<Op, kBlockRows, kVecs, kAccumulate>(g);
  }
}

/// rows <= kBlockRows; vecs: columns / kLanes.
template <class Op, bool kAccumulate>
FLASHBSR_FN void gemm(GemmArgs g, int rows, int vecs) {
  for (; vecs >= kBlockVecs; vecs -= kBlockVecs) {
    gemm_rows<Op, kBlockVecs, kAccumulate>(g, rows);
    g.b += kBlockVecs * kLanes;
    g.c += kBlockVecs * kLanes;
  }
  if constexpr (kBlockVecs == 4) {
    if (vecs == 3) return gemm_rows<Op, 3, kAccumulate>(g, rows);
    if (vecs == 2) return gemm_rows<Op, 2, kAccumulate>(g, rows);
  }
  if (vecs == 1) gemm_rows<Op, 1, kAccumulate>(g, rows);
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
