// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What happens to Q between its load and its use: RoPE; and for K of codes, the conversion to fp16
// and the order of columns that tile/fragments.h or tile/packed.h asks for. In place, in shared
// memory.
#pragma once

#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/tile/rope.h>
#include <flashbsr/tile/swizzle.h>

namespace flashbsr::sm80 {

namespace detail {

/// The 16 columns of group `group` of a row, as 16-bit pairs.
template <int kRowBytes>
FLASHBSR_DEVICE void read_group(const char* tile, int32_t row, int group, uint32_t (&pair)[8]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const uint4 x =
        *reinterpret_cast<const uint4*>(tile + Swizzle<kRowBytes>::offset(row, 2 * group + c));
    pair[4 * c] = x.x, pair[4 * c + 1] = x.y, pair[4 * c + 2] = x.z, pair[4 * c + 3] = x.w;
  }
}

/// Writes them back in the order of the fragments.
template <int kRowBytes, bool kPermuted>
FLASHBSR_DEVICE void write_group(char* tile, int32_t row, int group, const uint32_t (&pair)[8]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    // Bytes: pairs 0, 2, 4, 6 go first (columns 0 1, 4 5, 8 9, 12 13), then 1, 3, 5, 7.
    const uint4 x = kPermuted
                        ? uint4{pair[c], pair[c + 2], pair[c + 4], pair[c + 6]}
                        : uint4{pair[4 * c], pair[4 * c + 1], pair[4 * c + 2], pair[4 * c + 3]};
    *reinterpret_cast<uint4*>(tile + Swizzle<kRowBytes>::offset(row, 2 * group + c)) = x;
  }
}

/// 2^n with n chosen so that max |q| lands in [2^14, 2^15): as high as fp16 goes, and exact.
/// Given as the float's exponent field; its inverse is 254 minus that.
FLASHBSR_DEVICE int32_t fp16_exponent(float magnitude) {
  const int32_t exponent = static_cast<int32_t>(float_bits(magnitude) >> 23);
  return exponent == 0 ? 127 : min_of(127 + 14 + 127 - exponent, 253);
}

}  // namespace detail

/// Four threads to a row. Scales (natural logits per dot product)
/// take back what the conversion to fp16 multiplied by.
template <class Traits>
FLASHBSR_DEVICE void prepare_queries(const Params& p, const Task& task, const PrefillRow* rows,
                                     char* tile, float* scales, int32_t thread) {
  constexpr int kRowBytes = Traits::kHeadDim * 2;
  constexpr int kGroups = Traits::kHeadDim / 16;
  constexpr int kHalfEach = (kGroups / 2 + 3) / 4;  // groups of the lower half that a thread has
  constexpr bool kCodes = dtype_size(Traits::kKv) == 1;
  const bool convert = kCodes && p.q.dtype == DType::kBF16;
  const bool rotate = p.rope.fine != nullptr;
  const int32_t lane = thread % 4;
  const int32_t position = task.request.kv_len - task.request.q_len;  // of query token 0

  const auto groups_of = [&](int group) {
    PairedGroups groups(p.rope, group, kGroups);
    if constexpr (Traits::kPacked) groups.first = 2 * group, groups.second = 2 * group + 1;
    return groups;
  };

  for (int32_t r = thread / 4; r < Traits::kRows; r += Traits::kThreads / 4) {
    if (r >= task.item.row_count) break;  // whole quads: the shuffles below stay complete
    float x[kHalfEach][2][16];
    float magnitude = 0.0f;
#pragma unroll
    for (int i = 0; i < kHalfEach; ++i) {
      const int group = lane + 4 * i;
      const PairedGroups groups = groups_of(group);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pair[8] = {};
        if (group < kGroups / 2) {
          detail::read_group<kRowBytes>(tile, r, h ? groups.second : groups.first, pair);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const bool bf16 = kCodes ? convert : Traits::kKeyCompute == DType::kBF16;
          x[i][h][2 * e] =
              bf16 ? ptx::unpack_low<DType::kBF16>(pair[e]) : ptx::unpack_low<DType::kF16>(pair[e]);
          x[i][h][2 * e + 1] = bf16 ? ptx::unpack_high<DType::kBF16>(pair[e])
                                    : ptx::unpack_high<DType::kF16>(pair[e]);
        }
      }
      if (rotate && groups.turn) {
        const RopeRow angles(p.rope, position + rows[r].token, Traits::kHeadDim);
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          // As Zip has it.
          if (p.rope.interleave && e % 2 == 0) {
            const float other = x[i][0][e + 1];
            x[i][0][e + 1] = x[i][1][e];
            x[i][1][e] = other;
          }
          angles.at(16 * group + e).turn(x[i][0][e], x[i][1][e]);
        }
      }
#pragma unroll
      for (int e = 0; e < 32; ++e) magnitude = ptx::max(magnitude, fabsf(x[i][e / 16][e % 16]));
    }
    float factor = 1.0f;
    if (convert) {
      magnitude = ptx::max(magnitude, __shfl_xor_sync(0xfu << (thread & 28), magnitude, 1));
      magnitude = ptx::max(magnitude, __shfl_xor_sync(0xfu << (thread & 28), magnitude, 2));
      const int32_t exponent = detail::fp16_exponent(magnitude);
      factor = bits_float(static_cast<uint32_t>(exponent) << 23);
      if (lane == 0) scales[r] *= bits_float(static_cast<uint32_t>(254 - exponent) << 23);
    }
#pragma unroll
    for (int i = 0; i < kHalfEach; ++i) {
      const int group = lane + 4 * i;
      if (group >= kGroups / 2) continue;
      const PairedGroups groups = groups_of(group);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t pair[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          // Of packed codes the two groups are a chunk, whose columns change places.
          const int at = Traits::kPacked ? 8 * (e % 4) + 2 * h + e / 4 : 16 * h + 2 * e;
          const float a = x[i][at / 16][at % 16];
          const float b = x[i][at / 16][at % 16 + (Traits::kPacked ? 4 : 1)];
          pair[e] = ptx::pack2<Traits::kKeyCompute, Traits::kArch>(a * factor, b * factor);
        }
        detail::write_group<kRowBytes, Traits::kBytes>(tile, r, h ? groups.second : groups.first,
                                                       pair);
      }
    }
  }
}

}  // namespace flashbsr::sm80
