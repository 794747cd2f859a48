// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What test_hopper_cuda.py launches: one kernel per wrapper of sm_90a, with tiles kept as the
// attention kernels keep them.
#include <flashbsr/kernel/sm90a/fragment_math.h>
#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/mbarrier.h>
#include <flashbsr/ptx/tma.h>
#include <flashbsr/ptx/wgmma.h>
#include <flashbsr/tile/swizzle.h>

namespace {

using namespace flashbsr;

/// Dynamic shared memory from a multiple of 1024 on.
FLASHBSR_DEVICE char* tiles() {
  extern __shared__ char memory[];
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  return memory + (1024 - at % 1024) % 1024;
}

FLASHBSR_DEVICE uint32_t address(const char* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Rows of whole 128-byte lines to [line][row][128 bytes], 128-byte swizzle.
FLASHBSR_DEVICE void keep(char* tile, const uint4* from, int rows, int lines) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines * 8; i += blockDim.x) {
    const int row = i / (lines * 8), chunk = i % (lines * 8);
    char* line = tile + chunk / 8 * rows * 128;
    *reinterpret_cast<uint4*>(line + Swizzle<128>::offset(row, chunk % 8)) = from[i];
  }
}

/// Accumulators of a warpgroup to a row-major matrix, by the layout that ptx/wgmma_shapes.h states.
template <int kColumns>
FLASHBSR_DEVICE void store(float* out, const float (&c)[kColumns / 2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int i = 0; i < kColumns / 8; ++i) {
    for (int e = 0; e < 4; ++e) {
      out[(row + e / 2 * 8) * kColumns + 8 * i + lane % 4 * 2 + e % 2] = c[4 * i + e];
    }
  }
}

/// (128, kColumns) = A B^T of rows of 256 bytes, by two warpgroups of 64 rows each.
template <DType kType, int kColumns>
FLASHBSR_DEVICE void multiply_shared(const uint4* a, const uint4* b, float* out) {
  constexpr int kRows = 128, kLines = 2;
  char *const a_tile = tiles(), *const b_tile = a_tile + kLines * kRows * 128;
  keep(a_tile, a, kRows, kLines);
  keep(b_tile, b, kColumns, kLines);
  ptx::fence_async_proxy();
  __syncthreads();
  const int group = threadIdx.x / 128;
  const uint64_t at_a = ptx::matrix_descriptor(address(a_tile) + group * 64 * 128, 1024, 16);
  const uint64_t at_b = ptx::matrix_descriptor(address(b_tile), 1024, 16);
  float c[kColumns / 2];
  // The first product must not read them.
  for (int i = 0; i < kColumns / 2; ++i) c[i] = __int_as_float(0x7fffffff);
  ptx::pin(c);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4 * kLines; ++k) {
    const uint32_t in_line = k % 4 * 32;
    ptx::wgmma_shared<kType>(c, at_a + ptx::descriptor_step(k / 4 * kRows * 128 + in_line),
                             at_b + ptx::descriptor_step(k / 4 * kColumns * 128 + in_line), k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(c);
  store<kColumns>(out + group * 64 * kColumns, c);
}

/// (64, kColumns) = 1 + A B, A of 16 bits in registers, B of kDepth rows.
template <DType kType, int kColumns>
FLASHBSR_DEVICE void multiply_transposed(const uint32_t* a, const uint4* b, float* out) {
  constexpr int kDepth = 80;
  char* const b_tile = tiles();
  keep(b_tile, b, kDepth, kColumns / 64);
  ptx::fence_async_proxy();
  __syncthreads();
  const uint64_t at_b = ptx::matrix_descriptor(address(b_tile), 1024, kDepth * 128);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  uint32_t fragments[kDepth / 16][4];
  for (int k = 0; k < kDepth / 16; ++k) {
    for (int i = 0; i < 4; ++i) {  // as ptx/mma.h states
      const int column = 16 * k + lane % 4 * 2 + i / 2 * 8;
      fragments[k][i] = a[((row + i % 2 * 8) * kDepth + column) / 2];
    }
  }
  float c[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) c[i] = 1.0f;
  ptx::pin(c);
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) ptx::pin(fragments[k]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 16; ++k) {
    ptx::wgmma_registers<kType>(c, fragments[k], at_b + ptx::descriptor_step(k * 16 * 128), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(c);
  store<kColumns>(out, c);
}

/// (64, kColumns) = 1 + A B^T of float8, A in registers, rows of 256 bytes.
template <int kColumns>
FLASHBSR_DEVICE void multiply_float8(const uint32_t* a, const uint4* b, float* out) {
  constexpr int kLines = 2, kDepth = 128 * kLines;
  char* const b_tile = tiles();
  keep(b_tile, b, kColumns, kLines);
  ptx::fence_async_proxy();
  __syncthreads();
  const uint64_t at_b = ptx::matrix_descriptor(address(b_tile), 1024, 16);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  uint32_t fragments[kDepth / 32][4];
  for (int k = 0; k < kDepth / 32; ++k) {
    for (int i = 0; i < 4; ++i) {  // four neighbours where 16-bit types have two
      const int column = 32 * k + lane % 4 * 4 + i / 2 * 16;
      fragments[k][i] = a[((row + i % 2 * 8) * kDepth + column) / 4];
    }
  }
  float c[kColumns / 2];
  for (int i = 0; i < kColumns / 2; ++i) c[i] = 1.0f;
  ptx::pin(c);
#pragma unroll
  for (int k = 0; k < kDepth / 32; ++k) ptx::pin(fragments[k]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDepth / 32; ++k) {
    const uint32_t at = k / 4 * kColumns * 128 + k % 4 * 32;
    ptx::wgmma_registers<DType::kE4M3>(c, fragments[k], at_b + ptx::descriptor_step(at), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(c);
  store<kColumns>(out, c);
}

/// A thread's logits of `count` rows: the position where the mask has a bit, otherwise -1. The first
/// `kept` columns have one whatever is read.
template <int kGroups>
FLASHBSR_DEVICE void select_by_bits(const uint8_t* bits, const int64_t* firsts, int count, int kept,
                                    float* out) {
  using Math = sm90a::FragmentMath<kGroups>;
  if (static_cast<int>(threadIdx.x) >= count) return;
  const int64_t first = firsts[threadIdx.x];
  typename Math::Float nothing;
  for (int i = 0; i < 2 * kGroups; ++i) nothing.x[i] = -1.0f;
  const auto mask = Math::test_bits(bits, first, 8 * kGroups, kept);
  const auto x =
      Math::select(mask, Math::to_float(typename Math::Int{static_cast<int32_t>(first)}), nothing);
  for (int i = 0; i < 2 * kGroups; ++i) out[threadIdx.x * 2 * kGroups + i] = x.x[i];
}

}  // namespace

/// A box of `rows` rows of 128 bytes to row `first_row` of a poisoned tile of `tile_rows`; what is
/// in the tile then, row by row, read where tile/swizzle.h says that it lies.
extern "C" __global__ void load_box(const __grid_constant__ TensorMap map, int x, int y, int z,
                                    int w, int rows, int first_row, int tile_rows, uint4* out) {
  __shared__ alignas(8) uint64_t memory;
  char* const tile = tiles();
  const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&memory));
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * 8; i += blockDim.x) {
    reinterpret_cast<uint4*>(tile)[i] = {~0u, ~0u, ~0u, ~0u};
  }
  ptx::fence_async_proxy();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(map);
    ptx::mbarrier_expect_bytes(barrier, rows * 128);
    ptx::tma_load(address(tile) + first_row * 128, map, barrier, x, y, z, w);
  }
  ptx::mbarrier_wait<90>(barrier, 0);
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * 8; i += blockDim.x) {
    out[i] = *reinterpret_cast<const uint4*>(tile + Swizzle<128>::offset(i / 8, i % 8));
  }
}

/// Lines of 128 bytes to a tile, each from where `lines` says, zeros where that is negative, by one
/// warp that waits for nothing; the others wait for its copies.
extern "C" __global__ void gather_lines(const uint4* from, const int* lines, int count,
                                        uint4* out) {
  __shared__ alignas(8) uint64_t memory;
  char* const tile = tiles();
  const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&memory));
  if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 32);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x < 32) {
    for (int i = lane / 8; i < count; i += 4) {
      const uint4* const line = from + max_of(lines[i], 0) * 8 + lane % 8;
      ptx::cp_async_16_if(address(tile) + Swizzle<128>::offset(i, lane % 8), line, lines[i] >= 0);
    }
    ptx::cp_async_arrive(barrier);
    return;
  }
  ptx::mbarrier_wait<90>(barrier, 0);
  for (int i = static_cast<int>(threadIdx.x) - 32; i < count * 8; i += blockDim.x - 32) {
    out[i] = *reinterpret_cast<const uint4*>(tile + Swizzle<128>::offset(i / 8, i % 8));
  }
}

#define SHARED(type, columns)                                                                  \
  extern "C" __global__ void __launch_bounds__(256)                                            \
      shared_##type##_##columns(const uint4* a, const uint4* b, float* out) {                  \
    multiply_shared<DType::k##type, columns>(a, b, out);                                       \
  }
#define SHARED_SHAPES(type) SHARED(type, 64) SHARED(type, 80) SHARED(type, 96) SHARED(type, 128)
SHARED_SHAPES(F16)
SHARED_SHAPES(BF16)
SHARED_SHAPES(E4M3)

#define REGISTERS(type, columns)                                                               \
  extern "C" __global__ void __launch_bounds__(128)                                            \
      registers_##type##_##columns(const uint32_t* a, const uint4* b, float* out) {            \
    multiply_transposed<DType::k##type, columns>(a, b, out);                                   \
  }
#define FLOAT8(columns)                                                                        \
  extern "C" __global__ void __launch_bounds__(128)                                            \
      registers_E4M3_##columns(const uint32_t* a, const uint4* b, float* out) {                \
    multiply_float8<columns>(a, b, out);                                                       \
  }
REGISTERS(F16, 64) REGISTERS(F16, 128) REGISTERS(F16, 256)
REGISTERS(BF16, 64) REGISTERS(BF16, 128) REGISTERS(BF16, 256)
FLOAT8(64) FLOAT8(128) FLOAT8(256)

#define BITS(groups)                                                                           \
  extern "C" __global__ void bits_##groups(const uint8_t* bits, const int64_t* firsts,         \
                                           int count, int kept, float* out) {                  \
    select_by_bits<groups>(bits, firsts, count, kept, out);                                    \
  }
BITS(8) BITS(10) BITS(12) BITS(16)
