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

#include <utility>

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

  /// Twice what codes of e2m1 mean, those in the low bits of words.
  FLASHBSR_FN static FloatV twice_e2m1(UintV codes) {
    const FloatV twice = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes), twice);
  }

  /// Two codes of four bits, the low ones of a word's halves, as a pair of bf16. `lifts` are 16
  /// less their zero points, so that their sums find the integers from -16 to 15 in a table.
  FLASHBSR_FN static FloatV code_pairs(UintV codes, UintV lifts) {
    struct alignas(64) Table {
      uint16_t at[2 * kLanes];
    };
    static constexpr Table kIntegers = [] {
      Table table{};
      for (int i = 0; i < 2 * kLanes; ++i) {
        const auto number = static_cast<float>(i - kLanes);
        table.at[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
      }
      return table;
    }();
    const UintV index = (codes & 0x000f000fu) + lifts;
    return reinterpret_cast<FloatV>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(index),
                                                             _mm512_load_si512(kIntegers.at)));
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

/// Blocks for one kind of B, by rows - 1 and vectors - 1. Null where B takes no odd vectors.
template <class B>
struct GemmBlocks {
  void (*at[kBlockRows][kBlockVecs])(const GemmArgs<B>&) = {};

  /// rows <= kBlockRows; vecs: columns / kLanes (even for a RowsB of pairs).
  FLASHBSR_FN void run(GemmArgs<B> g, int rows, int vecs) const {
    const auto& by_vecs = at[rows - 1];
    for (; vecs >= kBlockVecs; vecs -= kBlockVecs) {
      by_vecs[kBlockVecs - 1](g);
      g.b.skip(kBlockVecs);
      g.c += kBlockVecs * kLanes;
    }
    if (vecs > 0) by_vecs[vecs - 1](g);
  }
};

template <class Op, bool kAccumulate, class B>
constexpr GemmBlocks<B> gemm_blocks() {
  GemmBlocks<B> blocks;
  const auto add = [&]<int kRows, int kVecs>() {
    if constexpr (B::kOddVecs || kVecs % 2 == 0) {
      blocks.at[kRows - 1][kVecs - 1] = &gemm_block<Op, kRows, kVecs, kAccumulate, B>;
    }
  };
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (add.template operator()<I / kBlockVecs + 1, I % kBlockVecs + 1>(), ...);
  }(std::make_integer_sequence<int, kBlockRows * kBlockVecs>{});
  return blocks;
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
