// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The pass behind attention that makes NVFP4 of float32 outputs: codes, and a scale of each 16
// elements. A thread takes 16: 64 bytes in, 9 out.
#pragma once

#include <flashbsr/core/quantize.h>
#include <flashbsr/kernel/ops/indices.h>

namespace flashbsr::ops {

/// 16 elements, the same bits as the CPU's epilogue has.
FLASHBSR_DEVICE void quantize_output(const float* in, char* codes, char* scale) {
  float x[kNvfp4Group];
#pragma unroll
  for (int i = 0; i < kNvfp4Group; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(in + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
  const GroupScale s = scale_of(x, kNvfp4Group, DType::kE2M1, DType::kE4M3);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kNvfp4Group; ++i) words[i / 8] |= float_to_e2m1(s.code_of(x[i])) << i % 8 * 4;
  *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
  store_from_float(scale, 0, DType::kE4M3, s.stored);
}

FLASHBSR_DEVICE void quantize_outputs(const QuantizeOutputsArgs& a) {
  const int64_t groups = a.scales.dim, rows = int64_t{a.header->num_q_tokens} * a.in.heads;
  for (int64_t i = first_index(); i < rows * groups; i += index_stride()) {
    const int64_t row = i / groups, group = i - row * groups;
    const int64_t token = row / a.in.heads, head = row - token * a.in.heads;
    quantize_output(static_cast<const float*>(a.in.data) + i * kNvfp4Group,
                    a.codes.row(token, head) + group * (kNvfp4Group / 2),
                    a.scales.row(token, head) + group);
  }
}

}  // namespace flashbsr::ops
