// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Global memory to registers, of what this SM reads once: L1 keeps none of it. PTX ISA, "ld". Not
// "ld.global.nc": ptxas gathers those in one place, and needs all their addresses there.
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

FLASHBSR_DEVICE float load_once(const void* p) {
  float x;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
FLASHBSR_DEVICE uint2 load_once_8(const void* p) {
  uint2 x;
  asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "l"(p)
               : "memory");
  return x;
}
FLASHBSR_DEVICE uint4 load_once_16(const void* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}

/// Asks L1 for the line of 128 bytes around `p`: a hint that needs no register and no wait.
FLASHBSR_DEVICE void prefetch_l1(const void* p) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

}  // namespace flashbsr::ptx
