// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The queries of an item as the B operand of m16n8k16, in registers: lane (g, t) holds dims of
// packed row 8 n + g. With 16-bit KV these are the instruction's own columns. float8 fragments come
// as four neighbouring bytes, so there a lane holds dims 4 t to 4 t + 3 of every 16.
//
// One epilogue warp prepares them for all streaming warps, an item ahead, with what else the item
// says about its logits: 600 to 800 instructions that would otherwise stand in every warp's way.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/rotate.h>
#include <flashbsr/kernel/decode/traits.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr {

/// An item ready to multiply, in shared memory.
template <class Traits>
struct alignas(16) DecodeReady {
  static constexpr int kWords = Traits::kHeadDim / 8 * (Traits::kRows / 8);  ///< of a lane
  uint4 b[kWords / 4][32];
  float scale[Traits::kRows];   ///< of the logits, every scale and the queries' own folded in
  Span visible[Traits::kRows];  ///< positions of the item that a row sees
  alignas(16) Span whole;       ///< those that every row sees
};

template <class Traits>
struct DecodeQuery {
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kTiles = Traits::kRows / 8;

  /// Up to 64 registers of a lane. Twice as many do not go with O, which is as large again: then
  /// they are read from shared memory where they are multiplied.
  static constexpr bool kResident = Traits::kHeadDim <= 256;

  uint32_t b[kTiles][kSteps][2];
  const uint4* place = nullptr;  ///< this lane's in shared memory

  /// Operands of k-steps 2 i and 2 i + 1.
  FLASHBSR_DEVICE uint4 operands(int n, int i) const {
    if constexpr (kResident) {
      return {b[n][2 * i][0], b[n][2 * i][1], b[n][2 * i + 1][0], b[n][2 * i + 1][1]};
    } else {
      return place[(n * (kSteps / 2) + i) * 32];
    }
  }

  /// Dims of the first element of register `half` of k-step `step`; the second is the next one, or
  /// of packed codes four dims on.
  FLASHBSR_DEVICE static int dim_of(int step, int half, int t) {
    if constexpr (Traits::kPacked) return 32 * (step / 2) + 8 * t + 2 * (step % 2) + half;
    return 16 * step + (Traits::kBytes ? 4 * t + 2 * half : 2 * t + 8 * half);
  }

  FLASHBSR_DEVICE void read(const DecodeReady<Traits>& ready, int lane) {
    if constexpr (!kResident) {
      place = &ready.b[0][lane];
      return;
    }
    uint32_t* words = &b[0][0][0];
#pragma unroll
    for (int i = 0; i < DecodeReady<Traits>::kWords / 4; ++i) {
      const uint4 x = ready.b[i][lane];
      words[4 * i] = x.x;
      words[4 * i + 1] = x.y;
      words[4 * i + 2] = x.z;
      words[4 * i + 3] = x.w;
    }
  }

  /// Loads an item's queries, by RoPE if `kRotates` and it is asked for, and the scales of their
  /// logits. One warp.
  template <bool kRotates>
  FLASHBSR_DEVICE void load(const KernelArgs& args, const DecodeItem& item, int lane,
                            float (&scale)[kTiles]) {
    const Params& p = args.params;
    const float k_scale = p.k_head_scale ? p.k_head_scale[item.kv_head] : 1.0f;
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
      const int row_of_q =
          item.shared() ? args.q_rows[~item.q_begin + token] : item.q_begin + token;
      const char* row = q.row(row_of_q, head);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = dim_of(step, half, t);
          b[n][step][half] = inside && dim < q.dim ? load_pair(row, dim) : 0;
          if constexpr (kRotates) {
            if (p.rope.fine && inside) {
              b[n][step][half] = rotated_word<Traits::kKv>(
                  p.rope, Traits::kHeadDim, item.kv_len - item.q_len + token, row, dim);
            }
          }
        }
      }
      scale[n] = p.sm_scale * (p.q_head_scale ? p.q_head_scale[head] : 1.0f) * k_scale;
    }
  }

  /// Leaves everything about an item in `ready`, of which this has what `load` made. One warp.
  FLASHBSR_DEVICE void leave(const KernelArgs& args, const PlanHeader& header,
                             const DecodeItem& item, int lane, float (&scale)[kTiles],
                             DecodeReady<Traits>& ready) {
    if constexpr (dtype_size(Traits::kKv) == 1) {
      if (args.params.q.dtype == DType::kBF16) fit(scale);
    }
    const uint32_t* words = &b[0][0][0];
#pragma unroll
    for (int i = 0; i < DecodeReady<Traits>::kWords / 4; ++i) {
      ready.b[i][lane] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) ready.scale[8 * n + lane / 4] = scale[n] * Traits::kKeyUnit;
    }
    see(args, header, item, lane, ready);
  }

 private:
  /// What each row sees. Once for all streaming warps: where keys are a share it takes a division.
  FLASHBSR_DEVICE static void see(const KernelArgs& args, const PlanHeader& header,
                                  const DecodeItem& item, int lane, DecodeReady<Traits>& ready) {
    const int last = max_of(item.row_count, 1) - 1;
    const int token = args.group.quotient(item.row_begin + min_of(lane, last));
    Span seen{0, item.kv_len};
    if (!item.shared()) {
      seen = visible_keys(header, item.kv_len - item.q_len + token, item.kv_len);
    }
    seen = {max_of(seen.begin, item.kv_begin), min_of(seen.end, item.kv_end)};
    if (lane < Traits::kRows) ready.visible[lane] = seen;
    // Spans only move right from row to row.
    const int32_t begin = __shfl_sync(0xffffffffu, seen.begin, last);
    if (lane == 0) ready.whole = {begin, seen.end};
  }

  FLASHBSR_DEVICE static uint32_t load_pair(const char* row, int dim) {
    const auto word = [row](int d) {
      return __ldg(reinterpret_cast<const uint32_t*>(row + 2 * d));
    };
    if constexpr (!Traits::kPacked) return word(dim);
    const int even = dim & ~1;
    return ptx::permute_bytes(word(even), word(even + 4), dim & 1 ? 0x7632 : 0x5410);
  }

  /// bf16 queries against codes as keys, which are multiplied in fp16: each row is scaled by the
  /// power of two that brings its largest element to [2^14, 2^15), so nothing overflows and what is
  /// lost lies 2^38 below it. Exact otherwise: bf16 has fewer bits than fp16.
  FLASHBSR_DEVICE void fit(float (&scale)[kTiles]) {
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
      scale[n] *= bits_float(static_cast<uint32_t>(127 - shift) << 23);
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
