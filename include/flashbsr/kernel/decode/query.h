// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The queries of an item as the B operand of m16n8k16, in registers: lane (g, t) holds dims of
// packed row 8 n + g. With 16-bit KV these are the instruction's own columns. float8 fragments come
// as four neighbouring bytes, so there a lane holds dims 4 t to 4 t + 3 of every 16.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/traits.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr {

template <class Traits>
struct DecodeQuery {
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kTiles = Traits::kRows / 8;

  uint32_t b[kTiles][kSteps][2];
  float scale[kTiles];  ///< to multiply the logits of row 8 n + g with: undoes what fit() did

  /// Dims of the first element of register `half` of k-step `step`.
  FLASHBSR_DEVICE static int dim_of(int step, int half, int t) {
    return 16 * step + (Traits::kFloat8 ? 4 * t + 2 * half : 2 * t + 8 * half);
  }

  FLASHBSR_DEVICE void load(const KernelArgs& args, const DecodeItem& item, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const RaggedView& q = args.params.q;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int r = 8 * n + g;
      const bool inside = r < item.row_count;
      const int packed = item.row_begin + (inside ? r : 0);
      const int token = args.group.quotient(packed);
      const int head =
          item.kv_head * static_cast<int>(args.group.divisor) + args.group.remainder(packed, token);
      const char* row = q.row(item.q_begin + token, head);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = dim_of(step, half, t);
          b[n][step][half] =
              inside && dim < q.dim ? __ldg(reinterpret_cast<const uint32_t*>(row + 2 * dim)) : 0;
        }
      }
      scale[n] = 1.0f;
    }
    if constexpr (Traits::kFloat8) {
      if (q.dtype == DType::kBF16) fit();
    }
  }

 private:
  /// bf16 queries against float8 keys, which are multiplied in fp16: each row is scaled by the
  /// power of two that brings its largest element to [2^14, 2^15), so nothing overflows and what is
  /// lost lies 2^38 below it. Exact otherwise: bf16 has fewer bits than fp16.
  FLASHBSR_DEVICE void fit() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t largest = 0;  // of the magnitudes' bits, which order as the numbers do
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair = b[n][step][half] & 0x7fff7fffu;
          largest = max_of(largest, max_of(pair & 0xffffu, pair >> 16));
        }
      }
      largest = max_of(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = max_of(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = static_cast<int>(largest >> 7);  // biased by 127; 255: inf or NaN
      // 2^(14 - e), as far as both it and its inverse are normal numbers.
      const int shift = exponent == 255 ? 0 : max_of(-126, min_of(126, 14 + 127 - exponent));
      const float factor = bits_float(static_cast<uint32_t>(127 + shift) << 23);
      scale[n] = bits_float(static_cast<uint32_t>(127 - shift) << 23);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t& pair = b[n][step][half];
          pair = ptx::pack2<DType::kF16>(ptx::unpack_low<DType::kBF16>(pair) * factor,
                                         ptx::unpack_high<DType::kBF16>(pair) * factor);
        }
      }
    }
  }
};

}  // namespace flashbsr
