// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Asynchronous copies from global to shared memory, 16 bytes each (sm_80 and later).
// PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy".
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

/// The 32-bit address of a pointer into shared memory.
FLASHBSR_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// An L2 policy for data that is read once, such as K and V in decode.
FLASHBSR_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Copies the first `bytes` (0, 8 or 16) and fills the rest with zeros. `src` is not read where
/// bytes is 0, but must be an address of the array all the same.
FLASHBSR_DEVICE void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}

FLASHBSR_DEVICE void cp_async_16(uint32_t dst, const void* src, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
}

/// Closes the group of copies issued since the last one; empty groups count.
FLASHBSR_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
FLASHBSR_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Asks L2 for the line at `src`: a hint that needs no ordering.
FLASHBSR_DEVICE void prefetch_l2(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src));
}

}  // namespace flashbsr::ptx
