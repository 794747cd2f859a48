// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The tensor memory accelerator (sm_90): boxes of an array to shared memory, one thread asks for
// each. PTX ISA, "cp.async.bulk.tensor". What lies outside of the array arrives as zeros and counts
// as bytes; coordinates may be negative.
#pragma once

#include <flashbsr/core/launch.h>

namespace flashbsr::ptx {

/// Makes barriers that were just initialised known to the copy engine.
FLASHBSR_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Orders this thread's accesses to shared memory before those of copies and products that are
/// ordered behind it: they go another way, the async proxy.
FLASHBSR_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Arrives at a barrier and lets its phase wait for so many bytes.
FLASHBSR_DEVICE void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// True in one lane of a warp that is all here. The compiler knows that it is one, and issues
/// copies under it without a loop over lanes.
FLASHBSR_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

FLASHBSR_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// `bytes`, a multiple of 16, from global memory; both addresses are multiples of 16, too.
FLASHBSR_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

/// A box of a four-dimensional array, from (x, y, z, w), innermost first.
FLASHBSR_DEVICE void tma_load(uint32_t dst, const TensorMap& map, uint32_t barrier, int32_t x,
                              int32_t y, int32_t z, int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// The same of what is read once: it is the first to leave L2.
FLASHBSR_DEVICE void tma_load_once(uint32_t dst, const TensorMap& map, uint32_t barrier, int32_t x,
                                   int32_t y, int32_t z, int32_t w) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}

/// Asks L2 for a box: a hint that needs no ordering.
FLASHBSR_DEVICE void tma_prefetch(const TensorMap& map, int32_t x, int32_t y, int32_t z,
                                  int32_t w) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x),
      "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// The other way: a box from shared memory to the array; what lies outside of it is not written.
FLASHBSR_DEVICE void tma_store(const TensorMap& map, uint32_t src, int32_t x, int32_t y, int32_t z,
                               int32_t w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(src), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/// Closes the group of stores that this thread asked for since the last one.
FLASHBSR_DEVICE void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until this thread's stores have read their shared memory.
FLASHBSR_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Registers per thread of the calling warpgroup. Every warp of it calls it.
template <int kRegisters>
FLASHBSR_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FLASHBSR_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flashbsr::ptx
