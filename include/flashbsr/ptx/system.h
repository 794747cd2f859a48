// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory that other devices and the host read and write meanwhile, and time.
// PTX ISA, "Memory Consistency Model": every 32-bit element of a vector is an access of its own.
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

FLASHBSR_DEVICE uint4 load_system(const uint4* p) {
  uint4 x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
FLASHBSR_DEVICE uint32_t load_system(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

FLASHBSR_DEVICE void store_system(uint4* p, const uint4& x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
FLASHBSR_DEVICE void store_system(uint32_t* p, uint32_t x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

/// Adds to a counter of this device, and orders nothing.
FLASHBSR_DEVICE uint32_t atomic_add_relaxed(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

/// Lets the thread rest for up to twice so many nanoseconds.
FLASHBSR_DEVICE void rest(uint32_t nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

/// Nanoseconds of a clock that all SMs have; it steps by up to a microsecond.
FLASHBSR_DEVICE uint64_t global_time() {
  uint64_t x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  return x;
}

}  // namespace flashbsr::ptx
