// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Matrix instructions of one warp, and the loads that feed them.
// PTX ISA, "Warp Level Matrix Instructions"; g = lane / 4, t = lane % 4:
//   A 16x16: a0 (g, 2t..2t+1)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
//   B 16x8:  b0 (2t..2t+1, g)  b1 (2t+8.., g)
//   C 16x8:  c0 c1 (g, 2t..2t+1)  c2 c3 (g+8, 2t..)
#pragma once

#include <flashbsr/core/dtype.h>

namespace flashbsr::ptx {

/// Four 8x8 tiles of 16-bit elements; lane i gives the address of row i % 8 of tile i / 8.
FLASHBSR_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// The same, each tile transposed.
FLASHBSR_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// `x`, but not before `positive` is known, a pair of 16-bit floats without signs: for the order of
/// instructions.
FLASHBSR_DEVICE uint32_t after_positive(uint32_t x, uint32_t positive) {
  return x | (positive & 0x80008000u);
}

/// An 8x8 tile of 16-bit elements, one register per lane, transposed.
FLASHBSR_DEVICE uint32_t movmatrix_trans(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

/// c += a b, fp32 accumulation. sm_80 and later.
template <DType kType>
FLASHBSR_DEVICE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == DType::kBF16 || kType == DType::kF16);
  if constexpr (kType == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Stores four 8 x 8 matrices of 16-bit elements (sm_90); lane l has the address of row l % 8 of
/// matrix l / 8. A thread's registers are laid out as ldmatrix_x4 gives them.
FLASHBSR_DEVICE void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// The same of their transposes: lane l has the address of column l % 8 of matrix l / 8.
FLASHBSR_DEVICE void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

/// Half the depth, fp16: what sm_75 has. a: (g, 2t..2t+1), (g+8, 2t..); b: (2t..2t+1, g).
FLASHBSR_DEVICE void mma_m16n8k8_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace flashbsr::ptx
