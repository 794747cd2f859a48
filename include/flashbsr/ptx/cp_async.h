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

/// Copies 16 bytes, or writes zeros where not `inside`; then `src` is not read. (The form with a
/// number of bytes costs eight instructions more on sm_90.)
FLASHBSR_DEVICE void cp_async_16_if(uint32_t dst, const void* src, bool inside) {
  asm volatile(
      "{.reg .pred outside; setp.eq.u32 outside, %2, 0;\n"
      " cp.async.cg.shared.global [%0], [%1], 16, outside;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(inside))
      : "memory");
}

/// The same with an L2 policy.
FLASHBSR_DEVICE void cp_async_16_if(uint32_t dst, const void* src, bool inside, uint64_t policy) {
  asm volatile(
      "{.reg .pred outside; setp.eq.u32 outside, %2, 0;\n"
      " cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, outside, %3;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(inside)), "l"(policy)
      : "memory");
}

/// Without a condition.
FLASHBSR_DEVICE void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
FLASHBSR_DEVICE void cp_async_16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}

/// If `wanted`; otherwise nothing happens.
FLASHBSR_DEVICE void cp_async_16_when(uint32_t dst, const void* src, bool wanted) {
  asm volatile(
      "{.reg .pred wanted; setp.ne.u32 wanted, %2, 0;\n"
      " @wanted cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

/// Copies 4 bytes, if `wanted`.
FLASHBSR_DEVICE void cp_async_4_when(uint32_t dst, const void* src, bool wanted) {
  asm volatile(
      "{.reg .pred wanted; setp.ne.u32 wanted, %2, 0;\n"
      " @wanted cp.async.ca.shared.global [%0], [%1], 4;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

/// Copies 4 bytes, or writes zeros where not `inside`; then `src` is not read.
FLASHBSR_DEVICE void cp_async_4_if(uint32_t dst, const void* src, bool inside) {
  asm volatile(
      "{.reg .pred outside; setp.eq.u32 outside, %2, 0;\n"
      " cp.async.ca.shared.global [%0], [%1], 4, outside;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(inside))
      : "memory");
}

/// Copies 8 bytes, or writes zeros where not `inside`; then `src` is not read.
FLASHBSR_DEVICE void cp_async_8_if(uint32_t dst, const void* src, bool inside) {
  asm volatile(
      "{.reg .pred outside; setp.eq.u32 outside, %2, 0;\n"
      " cp.async.ca.shared.global [%0], [%1], 8, outside;}" ::"r"(dst),
      "l"(src), "r"(static_cast<uint32_t>(inside))
      : "memory");
}

/// Copies 4 bytes.
FLASHBSR_DEVICE void cp_async_4(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

/// Closes the group of copies issued since the last one; empty groups count.
FLASHBSR_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
FLASHBSR_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Waits until all of this thread's copies have arrived, of open groups too.
FLASHBSR_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Arrives at a barrier when all of this thread's copies so far have arrived, without waiting for
/// them. The barrier counts it as it counts any arrival.
FLASHBSR_DEVICE void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Asks L2 for the line at `src`: a hint that needs no ordering.
FLASHBSR_DEVICE void prefetch_l2(const void* src) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src));
}

}  // namespace flashbsr::ptx
