// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What test_fragments_cuda.py launches: one warp's 16 rows of S = Q K^T and O = P V by the operands
// of tile/fragments.h, and every float8 code as fp16, for each architecture's code that this device
// runs.
#include <flashbsr/tile/fragments.h>

namespace {

using namespace flashbsr;

constexpr int kTokens = 32;

/// Rows to a swizzled tile.
template <int kRowBytes>
FLASHBSR_DEVICE uint32_t keep(char* tile, const uint4* from, int rows) {
  constexpr int kChunks = kRowBytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kChunks; i += 32) {
    *reinterpret_cast<uint4*>(tile + Swizzle<kRowBytes>::offset(i / kChunks, i % kChunks)) =
        from[i];
  }
  __syncwarp();
  return static_cast<uint32_t>(__cvta_generic_to_shared(tile));
}

/// Two neighbours of a row-major matrix of 16 bits.
FLASHBSR_DEVICE uint32_t pair(const uint32_t* from, int columns, int row, int column) {
  return from[(row * columns + column) / 2];
}

/// @tparam kType  of Q and P, and of K and V once they are widened
template <int kArch, int kDim, DType kType, DType kKv>
FLASHBSR_DEVICE void attend(const uint4* q, const uint4* k, const uint4* v, const uint4* p,
                            float* s, float* o) {
  using Keys = KeyFragments<kArch, kDim, kKv>;
  using Values = ValueFragments<kArch, kDim, kKv>;
  constexpr int kRowBytes = kDim * dtype_size(kKv);
  __shared__ alignas(1024) char q_tile[16 * kDim * 2], k_tile[kTokens * kRowBytes],
      v_tile[kTokens * kRowBytes];
  const int lane = threadIdx.x, row = lane / 4, t = lane % 4;
  const uint32_t q_at = keep<kDim * 2>(q_tile, q, 16);
  const Keys keys(keep<kRowBytes>(k_tile, k, kTokens), lane);
  const Values values(keep<kRowBytes>(v_tile, v, kTokens), lane);
  const QueryFragments<kDim * 2> queries(q_at, 0, lane);
  const auto* q_pairs = reinterpret_cast<const uint32_t*>(q);
  const auto* p_pairs = reinterpret_cast<const uint32_t*>(p);

  for (int token = 0; token < kTokens; token += Keys::kTokens) {
    float c[Keys::kTokens / 8][4] = {};
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4], b[Keys::kTokens / 8][2];
      if constexpr (Keys::kBytes) {  // Q's columns follow K's order
        for (int i = 0; i < 4; ++i) {
          a[i] = pair(q_pairs, kDim, row + i % 2 * 8, Keys::column_of(step, i / 2, lane));
        }
      } else {
        queries.load(a, 0, step);
      }
      keys.load(b, token, step);
      for (int i = 0; i < Keys::kTokens / 8; ++i) {
        mma_16x8x16<kArch, kType>(c[i], a, b[i][0], b[i][1]);
      }
    }
    for (int i = 0; i < Keys::kTokens / 8; ++i) {
      for (int e = 0; e < 4; ++e) {
        s[(row + e / 2 * 8) * kTokens + token + 8 * i + 2 * t + e % 2] = c[i][e];
      }
    }
  }

  for (int d = 0; d < kDim; d += Values::kDims) {
    float c[Values::kDims / 8][4] = {};
    for (int token = 0; token < kTokens; token += 16) {
      uint32_t a[4], b[Values::kDims / 8][2];
      for (int i = 0; i < 4; ++i) {
        a[i] = pair(p_pairs, kTokens, row + i % 2 * 8, token + 2 * t + i / 2 * 8);
      }
      values.load(b, token, d);
      for (int i = 0; i < Values::kDims / 8; ++i) {
        mma_16x8x16<kArch, kType>(c[i], a, b[i][0], b[i][1]);
      }
    }
    for (int i = 0; i < Values::kDims / 8; ++i) {
      for (int e = 0; e < 4; ++e) {
        const int at = 2 * t + e % 2;  // float8: operands of even columns, operands of odd ones
        const int column = Values::kBytes ? i / 2 * 16 + 2 * at + i % 2 : 8 * i + at;
        o[(row + e / 2 * 8) * kDim + d + column] = c[i][e];
      }
    }
  }
}

}  // namespace

#define ATTEND(arch, dim, type, kv)                                                         \
  extern "C" __global__ void attend_##arch##_##dim##_##type##_##kv(                         \
      const uint4* q, const uint4* k, const uint4* v, const uint4* p, float* s, float* o) { \
    attend<arch, dim, DType::k##type, DType::k##kv>(q, k, v, p, s, o);                      \
  }
#define WIDEN(arch, kv)                                                                  \
  extern "C" __global__ void widen_##arch##_##kv(const uint32_t* codes, uint2* halves) { \
    uint2& two = halves[threadIdx.x];                                                    \
    ptx::float8_to_f16<arch, DType::k##kv>(codes[threadIdx.x], two.x, two.y);            \
  }
#define DIMS(arch, type, kv) \
  ATTEND(arch, 64, type, kv) ATTEND(arch, 128, type, kv) ATTEND(arch, 256, type, kv)
DIMS(75, F16, F16)
DIMS(80, F16, F16)
DIMS(80, BF16, BF16)
DIMS(80, F16, E4M3)
DIMS(80, F16, E5M2)
WIDEN(80, E4M3)
WIDEN(80, E5M2)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
WIDEN(90, E4M3)
DIMS(90, F16, E4M3)
DIMS(90, F16, E5M2)
#endif
