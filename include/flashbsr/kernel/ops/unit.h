// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Units: what a lane loads and stores at once. Eight elements of a 16-bit or float8 type as
// registers, and their way to float and back; the type is known at run time and the same for a
// whole warp. float32 rows go an element at a time: a warp's accesses are whole sectors all the
// same.
#pragma once

#include <flashbsr/kernel/ops/args.h>
#include <flashbsr/ptx/convert.h>

namespace flashbsr::ops {

/// 16 bytes, or 8 in x and y.
using Unit = uint4;

FLASHBSR_DEVICE Unit load_unit(const char* p, DType t) {
  if (dtype_size(t) == 2) return *reinterpret_cast<const uint4*>(p);
  const uint2 x = *reinterpret_cast<const uint2*>(p);
  return make_uint4(x.x, x.y, 0, 0);
}

FLASHBSR_DEVICE void store_unit(char* p, DType t, const Unit& u) {
  if (dtype_size(t) == 2) {
    *reinterpret_cast<uint4*>(p) = u;
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(u.x, u.y);
  }
}

/// Two 16-bit elements to floats.
template <DType kType>
FLASHBSR_DEVICE void unpack(uint32_t pair, float& low, float& high) {
  low = ptx::unpack_low<kType>(pair);
  high = ptx::unpack_high<kType>(pair);
}

template <int kArch, DType kType>
FLASHBSR_DEVICE void unpack_float8(uint32_t bytes, float* x) {
  uint32_t low, high;
  ptx::float8_to_f16<kArch, kType>(bytes, low, high);
  unpack<DType::kF16>(low, x[0], x[1]);
  unpack<DType::kF16>(high, x[2], x[3]);
}

/// Two floats to 16-bit elements. sm_75 has no paired conversion.
template <int kArch, DType kType>
FLASHBSR_DEVICE uint32_t pack(float low, float high) {
  if constexpr (kArch >= 80) {
    return ptx::pack2<kType>(low, high);
  } else if constexpr (kType == DType::kBF16) {
    return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
  } else {
    uint32_t r;
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
        : "=r"(r)
        : "f"(low), "f"(high));
    return r;
  }
}

/// Two floats to float8, saturating. An instruction from sm_89 on.
template <int kArch, DType kType>
FLASHBSR_DEVICE uint32_t pack_float8(float low, float high) {
  if constexpr (kType == DType::kE4M3) {
    return ptx::pack2_e4m3<kArch>(low, high);
  } else if constexpr (kArch >= 89) {
    uint16_t r;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
  } else {
    return float_to_e5m2(low) | static_cast<uint32_t>(float_to_e5m2(high)) << 8;
  }
}

template <int kArch>
FLASHBSR_DEVICE void to_floats(const Unit& u, DType t, float (&x)[kUnit]) {
  const uint32_t words[4] = {u.x, u.y, u.z, u.w};
  if (t == DType::kF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack<DType::kF16>(words[i], x[2 * i], x[2 * i + 1]);
  } else if (t == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack<DType::kBF16>(words[i], x[2 * i], x[2 * i + 1]);
  } else if (t == DType::kE4M3) {
    unpack_float8<kArch, DType::kE4M3>(words[0], x);
    unpack_float8<kArch, DType::kE4M3>(words[1], x + 4);
  } else {
    unpack_float8<kArch, DType::kE5M2>(words[0], x);
    unpack_float8<kArch, DType::kE5M2>(words[1], x + 4);
  }
}

template <int kArch, DType kType>
FLASHBSR_DEVICE uint32_t pack4_float8(const float* x) {
  return pack_float8<kArch, kType>(x[0], x[1]) | pack_float8<kArch, kType>(x[2], x[3]) << 16;
}

template <int kArch>
FLASHBSR_DEVICE Unit from_floats(const float (&x)[kUnit], DType t) {
  uint32_t words[4] = {};
  if (t == DType::kF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<kArch, DType::kF16>(x[2 * i], x[2 * i + 1]);
  } else if (t == DType::kBF16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<kArch, DType::kBF16>(x[2 * i], x[2 * i + 1]);
  } else if (t == DType::kE4M3) {
    words[0] = pack4_float8<kArch, DType::kE4M3>(x);
    words[1] = pack4_float8<kArch, DType::kE4M3>(x + 4);
  } else {
    words[0] = pack4_float8<kArch, DType::kE5M2>(x);
    words[1] = pack4_float8<kArch, DType::kE5M2>(x + 4);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Eight elements of one type as another, scaled.
template <int kArch>
FLASHBSR_DEVICE Unit convert(const Unit& in, DType from, DType to, float scale) {
  float x[kUnit];
  to_floats<kArch>(in, from, x);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] *= scale;
  return from_floats<kArch>(x, to);
}

}  // namespace flashbsr::ops
