// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Named barriers, programmatic dependent launch, and what blocks meet at in global memory.
// PTX ISA, "Parallel Synchronization and Communication Instructions".
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

/// threadIdx.x, read anew at every call: loops that are short of registers keep none for it.
FLASHBSR_DEVICE int32_t thread_index() {
  int32_t r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}

/// x. What is made of it is worked out here, and not ahead of a loop, in registers that something
/// else needs.
FLASHBSR_DEVICE int32_t not_ahead(int32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Waits until `threads` threads of the block have come to barrier `id` (1 to 15), arrivals of
/// named_barrier_arrive included. Orders shared memory accesses among them.
FLASHBSR_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Waits like named_barrier_sync. True in all of the threads if `x` is not 0 in any.
FLASHBSR_DEVICE bool named_barrier_any(int id, int threads, uint32_t x) {
  uint32_t r;
  asm volatile(
      "{.reg .pred any, mine; setp.ne.u32 mine, %3, 0;\n"
      " barrier.cta.red.or.aligned.pred any, %1, %2, mine; selp.u32 %0, 1, 0, any;}"
      : "=r"(r)
      : "r"(id), "r"(threads), "r"(x)
      : "memory");
  return r != 0;
}

/// Comes to the barrier without waiting.
FLASHBSR_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Lets the next kernel of the stream start its prologue. sm_90 and later; nothing before.
template <int kArch>
FLASHBSR_DEVICE void launch_dependents() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits until the kernels before this one have finished and their writes are visible.
template <int kArch>
FLASHBSR_DEVICE void wait_for_prerequisites() {
  if constexpr (kArch >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Adds to a counter in global memory; releases this thread's writes and acquires the others'.
FLASHBSR_DEVICE int32_t atomic_add_acq_rel(int32_t* counter, int32_t value) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
}

/// What another block's store_release wrote, with all that came before it.
FLASHBSR_DEVICE int32_t load_acquire(const int32_t* p) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
/// Past L1, in no order.
FLASHBSR_DEVICE int32_t load_relaxed(const int32_t* p) {
  int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
FLASHBSR_DEVICE void store_release(int32_t* p, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

}  // namespace flashbsr::ptx
