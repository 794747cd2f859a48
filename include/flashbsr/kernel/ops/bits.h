// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Booleans to bits, whole or segment by segment. A thread makes a byte.
#pragma once

#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::ops {

/// Eight bytes of 0 or 1 to bits: byte j to bit j, or to bit 7 - j. The partial products of the
/// multiplication never meet (8 j - 7 k, and 8 j - 9 k, are different for different j, k in 0..7).
FLASHBSR_DEVICE uint8_t gather_bits(uint64_t flags, bool little) {
  return static_cast<uint8_t>((flags * (little ? 0x0102040810204080ull : 0x8040201008040201ull)) >>
                              56);
}

/// Up to eight booleans at x, `stride` apart.
FLASHBSR_DEVICE uint8_t pack_byte(const uint8_t* x, int64_t stride, int64_t live, bool little) {
  if (stride == 1 && live >= 8 && reinterpret_cast<uint64_t>(x) % 8 == 0) {
    const uint2 words = *reinterpret_cast<const uint2*>(x);
    const uint64_t low = __vcmpne4(words.x, 0) & 0x01010101u;
    const uint64_t high = __vcmpne4(words.y, 0) & 0x01010101u;
    return gather_bits(low | high << 32, little);
  }
  uint32_t byte = 0;
  for (int j = 0; j < 8 && j < live; ++j) {
    byte |= static_cast<uint32_t>(x[j * stride] != 0) << (little ? j : 7 - j);
  }
  return static_cast<uint8_t>(byte);
}

FLASHBSR_DEVICE void packbits(const PackArgs& a) {
  const int64_t bytes = ceil_div<int64_t>(a.size, 8);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < bytes;
       i += stride) {
    a.out[i] = pack_byte(a.x + 8 * i * a.stride, a.stride, a.size - 8 * i, a.little);
  }
}

/// A block takes segments in turn.
FLASHBSR_DEVICE void segment_packbits(const PackArgs& a) {
  const int64_t segments = a.indptr.size - 1;
  for (int64_t s = blockIdx.x; s < segments; s += gridDim.x) {
    const int64_t begin = a.indptr[s], size = a.indptr[s + 1] - begin;
    uint8_t* out = a.out + a.out_indptr[s];
    for (int64_t i = threadIdx.x; 8 * i < size; i += kThreads) {
      out[i] = pack_byte(a.x + (begin + 8 * i) * a.stride, a.stride, size - 8 * i, a.little);
    }
  }
}

/// A running sum over the segments, a block's width at a time.
FLASHBSR_DEVICE void segment_indptr(const SegmentIndptrArgs& a) {
  __shared__ int32_t warp_sum[kScanThreads / 32];
  const int64_t segments = a.indptr.size - 1;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t done = 0;
  if (threadIdx.x == 0) a.out_indptr[0] = 0;
  for (int64_t base = 0; base < segments; base += kScanThreads) {
    const int64_t s = base + threadIdx.x;
    int32_t sum = 0;
    if (s < segments) {
      sum = static_cast<int32_t>(ceil_div<int64_t>(a.indptr[s + 1] - a.indptr[s], 8));
    }
    for (int step = 1; step < 32; step *= 2) {
      const int32_t before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int32_t before = done, total = 0;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) before += warp_sum[w];
      total += warp_sum[w];
    }
    if (s < segments) a.out_indptr[s + 1] = before + sum;
    done += total;
    __syncthreads();
  }
}

}  // namespace flashbsr::ops
