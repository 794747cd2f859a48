// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous products of a warpgroup (sm_90a): 64 rows of A against tiles of B in shared memory.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
//   wgmma_fence();                      // registers are ready
//   wgmma_shared<kType>(c, a, b, ...);  // one or more
//   wgmma_commit();
//   wgmma_wait<0>(); pin(c);            // c may be read
#pragma once

#include <flashbsr/ptx/wgmma_shapes.h>

namespace flashbsr::ptx {

/// Where a tile of rows of 128 bytes in 128-byte swizzle lies: its address, which is a multiple of
/// 1024 but for steps along a row, and two distances in bytes.
/// @param group_bytes  from 8 rows to the next 8
/// @param line_bytes   transposed operands: from 64 columns to the next 64
FLASHBSR_DEVICE uint64_t matrix_descriptor(uint32_t address, uint32_t group_bytes,
                                           uint32_t line_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         static_cast<uint64_t>(line_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/// What is added to a descriptor to move it by `bytes`.
FLASHBSR_DEVICE constexpr uint32_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

/// Before products whose registers (accumulators, A) the thread has touched since the last ones.
FLASHBSR_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Closes the group of products issued since the last one.
FLASHBSR_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most `kPending` groups are under way.
template <int kPending>
FLASHBSR_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving accesses to registers of a product across this point: neither
/// the wait nor the product names them.
template <int kCount>
FLASHBSR_DEVICE void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount>
FLASHBSR_DEVICE void pin(uint32_t (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

/// c = A B or c += A B, both operands in shared memory along their rows. The depth is 32 bytes.
template <DType kType, int kCount>
FLASHBSR_DEVICE void wgmma_shared(float (&c)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  detail::Wgmma<kType>::shared(c, a, b, accumulate);
}

/// The same of 16-bit B that lies transposed: its rows are the depth.
template <DType kType, int kCount>
FLASHBSR_DEVICE void wgmma_shared_rows(float (&c)[kCount], uint64_t a, uint64_t b,
                                       bool accumulate) {
  detail::Wgmma<kType>::shared_rows(c, a, b, accumulate);
}

/// The same with A in registers, in the order of mma_m16n8k16's. 16-bit B lies transposed: its rows
/// are the depth.
template <DType kType, int kCount>
FLASHBSR_DEVICE void wgmma_registers(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b,
                                     bool accumulate) {
  detail::Wgmma<kType>::registers(c, a, b, accumulate);
}

/// The same of 16-bit B that lies as wgmma_shared() has it: along its rows.
template <DType kType, int kCount>
FLASHBSR_DEVICE void wgmma_registers_columns(float (&c)[kCount], const uint32_t (&a)[4], uint64_t b,
                                             bool accumulate) {
  detail::Wgmma<kType>::registers_columns(c, a, b, accumulate);
}

}  // namespace flashbsr::ptx
