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
// Register budget on 32 registers: 6 rows x 4 vectors of accumulators (24), 4 of B, 1 broadcast.
// Ten loads feed 24 multiply-adds, under the two loads a cycle that cores with two FMA pipes have.
// With 16 registers (AVX2, SSE2) it is 6 x 2 (12 + 2 + 1).
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

/// B packed: word k of column c at b[k * ld + c].
template <class Op>
struct PackedB {
  static constexpr bool kOddVecs = true;
  const float* b;
  int64_t ld;

  template <int kVecs>
  FLASHBSR_FN void load_row(int k, FloatV (&out)[kVecs]) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) out[v] = load(b + k * ld + v * kLanes);
  }
  FLASHBSR_FN void skip(int vecs) { b += vecs * kLanes; }
};

/// C[rows, cols] (+)= A[rows, k] B[k, cols]. A in words, C in floats.
template <class B>
struct GemmArgs {
  const float* a;
  int64_t lda;
  B b;
  float* c;
  int64_t ldc;
  int k;
};

template <class Op, int kRows, int kVecs, bool kAccumulate, class B>
__attribute__((noinline)) void gemm_block(const GemmArgs<B>& args) {
  const GemmArgs<B> g = args;
  FloatV acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = kAccumulate ? load(g.c + r * g.ldc + v * kLanes) : FloatV{};
    }
  }
  for (int k = 0; k < g.k; ++k) {
    FloatV bv[kVecs];
    g.b.load_row(k, bv);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const FloatV av = broadcast_word(g.a + r * g.lda + k);
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

/// Calls f.template operator()<rows>() for 1 <= rows <= kBlockRows.
template <class F>
FLASHBSR_FN void with_rows(int rows, F&& f) {
  switch (rows) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
    case 5: return f.template operator()<5>();
    default: return f.template operator()<kBlockRows>();
  }
}

/// rows <= kBlockRows; vecs: columns / kLanes (even for a RowsB of pairs).
template <class Op, bool kAccumulate, class B>
FLASHBSR_FN void gemm(GemmArgs<B> g, int rows, int vecs) {
  const auto block = [&]<int kVecs>() {
    with_rows(rows, [&]<int kRows>() { gemm_block<Op, kRows, kVecs, kAccumulate>(g); });
  };
  for (; vecs >= kBlockVecs; vecs -= kBlockVecs) {
    block.template operator()<kBlockVecs>();
    g.b.skip(kBlockVecs);
    g.c += kBlockVecs * kLanes;
  }
  if constexpr (kBlockVecs == 4) {
    if constexpr (B::kOddVecs) {
      if (vecs == 3) return block.template operator()<3>();
    }
    if (vecs == 2) return block.template operator()<2>();
  }
  if constexpr (B::kOddVecs) {
    if (vecs == 1) block.template operator()<1>();
  }
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
