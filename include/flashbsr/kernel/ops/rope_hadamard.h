// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// RoPE, and a Hadamard transform of q and k behind it: turned and transformed in float32, rounded
// once. The order of sums is that of the transform by itself (hadamard.h).
//
// Where a head is turned as two halves of whole units, a power of two of them, it stays in
// registers: a lane has eight elements of either half, which are its pairs. Any other one lies in
// shared memory, a warp's.
#pragma once

#include <flashbsr/kernel/ops/hadamard.h>
#include <flashbsr/kernel/ops/rope_quantize.h>

namespace flashbsr::ops {

/// A head, turned, and the columns of its transform, in shared memory. A warp.
FLASHBSR_DEVICE void turn_row(const char* in, DType type, int32_t dim, const Rotation& r,
                              int64_t position, int32_t order, float* x) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, half = r.rotary_dim / 2;
  for (int32_t i = lane; i < half; i += 32) {
    float cosine, sine;
    angle_of<false>(r, position, i, cosine, sine);
    const int32_t a = r.interleave ? 2 * i : i, b = r.interleave ? 2 * i + 1 : i + half;
    const float p = load_as_float(in, a, type), q = load_as_float(in, b, type);
    x[a] = p * cosine - q * sine;
    x[b] = q * cosine + p * sine;
  }
  for (int32_t d = r.rotary_dim + lane; d < dim; d += 32) x[d] = load_as_float(in, d, type);
  add_pairs(x, dim, dim / order);
}

/// Heads [head, end) of a token, one after another. `x`: room for a head.
FLASHBSR_DEVICE void transform_heads(const TokenRows& rows, const Rotation& r,
                                     const HadamardMatrix& matrix, int64_t position, int32_t head,
                                     int32_t end, float* x) {
  const int32_t power = rows.dim / matrix.order;
  for (int32_t h = head; h < end; ++h) {
    turn_row(rows.in + h * rows.in_stride, rows.from, rows.dim, r, position, matrix.order, x);
    char* out = rows.out + h * rows.out_stride;
    for (int32_t d = static_cast<int32_t>(threadIdx.x) % 32; d < rows.dim; d += 32) {
      const float y = paley_product(x, matrix.order, power, d) * matrix.scale;
      store_from_float(out, d, rows.to, y * rows.scale);
    }
    __syncwarp();  // the next head comes where this one was read
  }
}

/// The same in registers, some heads of a warp at once.
template <int kArch>
FLASHBSR_DEVICE void transform_halves(const TokenRows& rows, const Rotation& r, float scale,
                                      int64_t position, int32_t head, int32_t end) {
  const int32_t half = rows.dim / 2, units = half / kUnit, heads = 32 / units;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, u = lane & (units - 1);
  float cosine[kUnit], sine[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    angle_of<true>(r, position, u * kUnit + i, cosine[i], sine[i]);
  }
#pragma unroll 1
  for (int32_t base = head; base < end; base += heads) {  // all lanes: they meet
    const int32_t h = base + lane / units;
    const char* in = rows.in + h * rows.in_stride + u * kUnit * dtype_size(rows.from);
    Unit first{}, second{};
    if (h < end) {
      first = load_unit(in, rows.from);
      second = load_unit(in + half * dtype_size(rows.from), rows.from);
    }
    float x[kUnit], y[kUnit];
    to_floats<kArch>(first, rows.from, x);
    to_floats<kArch>(second, rows.from, y);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float x0 = x[i], y0 = y[i];
      x[i] = x0 * cosine[i] - y0 * sine[i];
      y[i] = y0 * cosine[i] + x0 * sine[i];
    }
    pair_up_lanes(x, u, units);
    pair_up_lanes(y, u, units);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const float x0 = x[i], y0 = y[i];
      x[i] = (x0 + y0) * scale * rows.scale;
      y[i] = (x0 - y0) * scale * rows.scale;
    }
    if (h >= end) continue;
    char* out = rows.out + h * rows.out_stride + u * kUnit * dtype_size(rows.to);
    store_unit(out, rows.to, from_floats<kArch>(x, rows.to));
    store_unit(out + half * dtype_size(rows.to), rows.to, from_floats<kArch>(y, rows.to));
  }
}

template <int kArch>
FLASHBSR_DEVICE void rope_hadamard(const RopeArgs& a) {
  __shared__ float memory[kWarps][kMaxHadamardDim];
  float* const x = memory[threadIdx.x / 32];
  rope<kArch>(a, [&](const TokenRows& rows, int64_t position, int32_t head, int32_t end) {
    const int32_t units = rows.dim / (2 * kUnit);
    const bool halves = a.unit == kUnit && !a.rotation.interleave && a.matrix.order == 1 &&
                        a.rotation.rotary_dim == rows.dim && (units & (units - 1)) == 0;
    if (halves) {
      transform_halves<kArch>(rows, a.rotation, a.matrix.scale, position, head, end);
    } else {
      transform_heads(rows, a.rotation, a.matrix, position, head, end, x);
    }
  });
}

/// K is quantised from shared memory, where it lies as float32.
template <int kArch>
FLASHBSR_DEVICE void rope_hadamard_quantize(const RopeQuantizeArgs& a) {
  __shared__ float memory[kWarps][2][kMaxHadamardDim];
  float *const x = memory[threadIdx.x / 32][0], *const y = memory[threadIdx.x / 32][1];
  for_each_head(a.append, [&](const QuantizeRows& rows, bool is_v, const Slot& slot, int64_t token,
                              int32_t head, int lane) {
    const int64_t position = is_v ? 0 : a.positions[token];
    // Positions outside of the table keep their values.
    const bool known = !a.rotation.cos_sin || (position >= 0 && position < a.rotation.max_position);
    if (is_v || !known) {
      return quantize_head(rows, is_v, slot, token, head, lane, AsTheyCome{});
    }
    const int32_t dim = rows.in.dim, power = dim / a.matrix.order;
    turn_row(rows.in.row(token, head), rows.in.dtype, dim, a.rotation, position, a.matrix.order, x);
    for (int32_t d = lane; d < dim; d += 32) {
      y[d] = paley_product(x, a.matrix.order, power, d) * a.matrix.scale;
    }
    __syncwarp();
    QuantizeRows turned = rows;
    turned.in = {.data = y, .dtype = DType::kF32, .tokens = 1, .heads = 1, .dim = dim};
    turned.aligned = false;
    quantize_head(turned, is_v, slot, token, head, lane, AsTheyCome{});
    __syncwarp();  // the next head comes where this one was read
  });
}

}  // namespace flashbsr::ops
