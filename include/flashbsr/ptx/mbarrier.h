// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Barriers in shared memory that one side arrives at and the other waits for (sm_80 and later).
// PTX ISA, "mbarrier".
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

/// One thread makes the barrier; a block barrier must follow before it is used.
FLASHBSR_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Its memory may be used for something else afterwards.
FLASHBSR_DEVICE void mbarrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Releases what this thread (and those it has synchronised with) wrote.
FLASHBSR_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier)
               : "memory");
}

/// Waits for the end of the phase of the given parity (0 for the first), and acquires.
template <int kArch>
FLASHBSR_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  if constexpr (kArch >= 90) {  // suspends the thread for a while, where test_wait only looks
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
}

}  // namespace flashbsr::ptx
