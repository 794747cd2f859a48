// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The orthonormal Hadamard transform of every head, the sums of cpu::Hadamard in the same order, so
// that both give the same bits. A warp takes a row: it lies in shared memory as floats, and in
// every round of Sylvester's part lanes take pairs, 32 in a row at once.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::ops {

/// Whether Paley's matrix of order 12 or 20 has a 1 at (i, j) rather than a -1: in the first row and
/// column, and where the indices of the rest add up to a square modulo 11 or 19 that is not 0.
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

/// Element d of Paley's matrix times a row whose columns of `power` elements are done.
FLASHBSR_DEVICE float paley_product(const float* x, int32_t order, int32_t power, int32_t d) {
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
  for (int32_t d = lane; d < dim; d += 32) {
    const float y = a.order == 1 ? x[d] : paley_product(x, a.order, power, d);
    store_from_float(out, d, a.out.dtype, y * a.scale);
  }
  __syncwarp();  // the next row comes where this one was read
}

FLASHBSR_DEVICE void hadamard(const HadamardArgs& a) {
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
