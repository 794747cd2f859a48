// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The orthonormal Hadamard transform of every head, the sums of cpu::Hadamard in the same order, so
// that both give the same bits.
//
// Rows of 16 bits whose length is a power of two stay in registers: a lane has eight elements in a
// row, or two times eight, and meets those of other lanes by shuffles. Any other row lies in shared
// memory, where a warp takes pairs of it: 4.7 times the time of a copy of 128 elements (H100).
#pragma once

#include <flashbsr/kernel/ops/unit.h>

namespace flashbsr::ops {

/// Whether Paley's matrix of order 12 or 20 has a 1 at (i, j) rather than a -1: in the first row
/// and column, and where the indices of the rest add up to a square modulo 11 or 19 that is not 0.
FLASHBSR_DEVICE bool paley_is_one(int32_t order, int32_t i, int32_t j) {
  if (i == 0 || j == 0) return true;
  constexpr uint32_t kSquares11 = 1u << 1 | 1u << 3 | 1u << 4 | 1u << 5 | 1u << 9;
  constexpr uint32_t kSquares19 =
      1u << 1 | 1u << 4 | 1u << 5 | 1u << 6 | 1u << 7 | 1u << 9 | 1u << 11 | 1u << 16 | 1u << 17;
  const int32_t prime = order - 1;
  int32_t sum = i + j - 2;
  sum -= sum >= prime ? prime : 0;
  return (order == 12 ? kSquares11 : kSquares19) >> sum & 1;
}

/// Sylvester's part of the transform, of a row in shared memory, in columns of `power` elements. A
/// warp, whose lanes see what each has written.
FLASHBSR_DEVICE void add_pairs(float* x, int32_t dim, int32_t power) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  __syncwarp();
  for (int32_t half = 1; half < power; half *= 2) {
    for (int32_t pair = lane; pair < dim / 2; pair += 32) {
      const int32_t i = 2 * pair - (pair & (half - 1));
      const float p = x[i], q = x[i + half];
      x[i] = p + q;
      x[i + half] = p - q;
    }
    __syncwarp();
  }
}

/// Element d of the product: Paley's matrix times a row whose columns of `power` elements are done.
FLASHBSR_DEVICE float paley_product(const float* x, int32_t order, int32_t power, int32_t d) {
  if (order == 1) return x[d];
  const int32_t i = d / power, c = d - i * power;
  float sum = 0.0f;
  for (int32_t j = 0; j < order; ++j) {
    const float term = x[j * power + c];
    sum += paley_is_one(order, i, j) ? term : -term;
  }
  return sum;
}

/// `x`: room for a row, of this warp.
FLASHBSR_DEVICE void transform_row(const HadamardArgs& a, const char* in, char* out, float* x) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t dim = a.in.dim, power = dim / a.order;
  for (int32_t d = lane; d < dim; d += 32) x[d] = load_as_float(in, d, a.in.dtype);
  add_pairs(x, dim, power);
  for (int32_t d = lane; d < dim; d += 32) {
    store_from_float(out, d, a.out.dtype, paley_product(x, a.order, power, d) * a.scale);
  }
  __syncwarp();  // the next row comes where this one was read
}

/// One round of pairs `kHalf` elements apart, of a lane's own.
template <int kHalf, int kCount>
FLASHBSR_DEVICE void pair_up(float (&x)[kCount]) {
#pragma unroll
  for (int first = 0; first < kCount; first += 2 * kHalf) {
#pragma unroll
    for (int i = first; i < first + kHalf; ++i) {
      const float p = x[i], q = x[i + kHalf];
      x[i] = p + q;
      x[i + kHalf] = p - q;
    }
  }
}

/// The rounds with what other `lanes` have, of which this is number `lane`.
template <int kCount>
FLASHBSR_DEVICE void pair_up_lanes(float (&x)[kCount], int32_t lane, int32_t lanes) {
  for (int32_t apart = 1; apart < lanes; apart *= 2) {
    const float sign = lane & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] * sign + __shfl_xor_sync(~0u, x[i], apart);
  }
}

/// Some rows of a warp, of 8 x kUnits x `lanes` elements each. A lane's second unit is half a row
/// behind its first.
template <int kArch, int kUnits>
FLASHBSR_DEVICE void transform_units(const HadamardArgs& a, const char* in, char* out,
                                     int32_t lanes) {
  constexpr int kCount = kUnits * kUnit;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & (lanes - 1);
  const DType type = a.in.dtype;
  const int32_t size = dtype_size(type);
  float x[kCount] = {};
  const auto offset = [&](int u) { return (lane + u * lanes) * kUnit * size; };
  if (in) {
    Unit loaded[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) loaded[u] = load_unit(in + offset(u), type);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      float unit[kUnit];
      to_floats<kArch>(loaded[u], type, unit);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[u * kUnit + i] = unit[i];
    }
  }
  pair_up<1>(x);
  pair_up<2>(x);
  pair_up<4>(x);
  pair_up_lanes(x, lane, lanes);
  if constexpr (kUnits == 2) pair_up<kUnit>(x);
  if (!in) return;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    float unit[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) unit[i] = x[u * kUnit + i] * a.scale;
    store_unit(out + offset(u), type, from_floats<kArch>(unit, type));
  }
}

/// Rows in registers.
template <int kArch, int kUnits>
FLASHBSR_DEVICE void transform_rows(const HadamardArgs& a) {
  const int32_t lanes = 1 << a.lanes_log2, at_once = 32 >> a.lanes_log2;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps * at_once;
  const int32_t warp = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  for (int32_t base = warp * at_once; base < a.rows; base += stride) {
    const int32_t row = base + (static_cast<int32_t>(threadIdx.x) % 32 >> a.lanes_log2);
    const int32_t t = a.heads.quotient(row);
    const int32_t head = a.heads.remainder(row, t);
    const bool live = row < a.rows;
    transform_units<kArch, kUnits>(a, live ? a.in.row(a.first_token + t, head) : nullptr,
                                   live ? a.out.row(a.first_token + t, head) : nullptr, lanes);
  }
}

template <int kArch>
FLASHBSR_DEVICE void hadamard(const HadamardArgs& a) {
  if (a.lanes_log2 >= 0) {
    a.in.dim > 32 * kUnit ? transform_rows<kArch, 2>(a) : transform_rows<kArch, 1>(a);
    return;
  }
  __shared__ float rows[kWarps][kMaxHadamardDim];
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t stride = static_cast<int32_t>(gridDim.x) * kWarps;
  for (int32_t row = static_cast<int32_t>(blockIdx.x) * kWarps + warp; row < a.rows;
       row += stride) {
    const int32_t t = a.heads.quotient(row);
    const int64_t token = a.first_token + t;
    const int32_t head = a.heads.remainder(row, t);
    transform_row(a, a.in.row(token, head), a.out.row(token, head), rows[warp]);
  }
}

}  // namespace flashbsr::ops
