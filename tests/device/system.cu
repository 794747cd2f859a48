// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of ptx/system.h, by many threads.
#include <flashbsr/ptx/system.h>

using namespace flashbsr;

/// A copy in 16 bytes; in words, one thread after another; and a count of all threads.
extern "C" __global__ void copies(const uint4* in, uint4* out, uint32_t* words, uint32_t* counts,
                                  uint32_t* times) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  const uint64_t begin = ptx::global_time();
  ptx::store_system(out + i, ptx::load_system(in + i));
  ptx::store_system(words + i, ptx::load_system(&in[i].y));
  counts[i] = ptx::atomic_add_relaxed(counts + gridDim.x * blockDim.x, 1);
  uint64_t end = begin;
  while (end < begin + 5000) {
    ptx::rest(100);
    end = ptx::global_time();
  }
  times[i] = static_cast<uint32_t>(end - begin);
}
