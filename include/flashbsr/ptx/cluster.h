// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Blocks of a cluster (sm_90): their barrier, and each other's shared memory.
// PTX ISA, "barrier.cluster", "mapa", "ld", state space .shared::cluster.
#pragma once

#include <flashbsr/config.h>

namespace flashbsr::ptx {

/// The block's number within its cluster.
FLASHBSR_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Waits for all threads of the cluster that have not ended; what they wrote may be read.
FLASHBSR_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// Where another block has what this one has at `address`.
FLASHBSR_DEVICE uint32_t cluster_address(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

FLASHBSR_DEVICE float load_cluster(uint32_t address) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
FLASHBSR_DEVICE void load_cluster(uint32_t address, float (&x)[2]) {
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x[0]), "=f"(x[1])
               : "r"(address)
               : "memory");
}
FLASHBSR_DEVICE void load_cluster(uint32_t address, float (&x)[4]) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
}

}  // namespace flashbsr::ptx
