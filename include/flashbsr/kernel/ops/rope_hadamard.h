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
    const auto rounds = [&](float (&part)[kUnit]) {
      pair_up<1>(part);
      pair_up<2>(part);
      pair_up<4>(part);
      pair_up_lanes(part, u, units);
    };
    rounds(x);
    rounds(y);
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

/// Keys to codes. A lane's run of a head meets those of its other lanes; or a head is quantised
/// from shared memory, where it lies as float32.
template <int kArch>
FLASHBSR_DEVICE void rope_hadamard_quantize(const RopeQuantizeArgs& a) {
  if (a.append.k.runs > 0 && a.append.v.runs > 0) {
    return quantize_runs<kArch>(a.append, [&](const QuantizeRows& rows, bool is_v, int64_t token,
                                              const char* row, int32_t d, Run& x) {
      if (is_v) return;
      const int64_t position = a.positions[token];
      if (!is_known(a.rotation, position)) return;
      rotate_some(rows, row, d, a.rotation, position, x);
      pair_up<1>(x);
      pair_up<2>(x);
      pair_up<4>(x);
      pair_up<8>(x);
      pair_up_lanes(x, d / kRun, rows.in.dim / kRun);
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i] *= a.matrix.scale;
    });
  }
  __shared__ float memory[kWarps][kMaxHadamardDim];
  float* const x = memory[threadIdx.x / 32];
  for_each_head(a.append, [&](const QuantizeRows& rows, bool is_v, const Slot& slot, int64_t token,
                              int32_t head, int lane) {
    const int64_t position = is_v ? 0 : a.positions[token];
    if (is_v || !is_known(a.rotation, position)) {
      return quantize_head(rows, is_v, slot, token, head, lane, AsTheyCome{});
    }
    const int32_t dim = rows.in.dim, power = dim / a.matrix.order;
    turn_row(rows.in.row(token, head), rows.in.dtype, dim, a.rotation, position, a.matrix.order, x);
    float y[kMaxHadamardDim / 32];
#pragma unroll
    for (int i = 0; i < kMaxHadamardDim / 32; ++i) {
      const int32_t d = lane + 32 * i;
      if (d < dim) y[i] = paley_product(x, a.matrix.order, power, d) * a.matrix.scale;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMaxHadamardDim / 32; ++i) {
      if (lane + 32 * i < dim) x[lane + 32 * i] = y[i];
    }
    __syncwarp();
    QuantizeRows turned = rows;
    turned.in = {.data = x, .dtype = DType::kF32, .tokens = 1, .heads = 1, .dim = dim};
    turned.aligned = false;
    quantize_head(turned, is_v, slot, token, head, lane, AsTheyCome{});
    __syncwarp();  // the next head comes where this one was read
  });
}

}  // namespace flashbsr::ops
