// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The only macros of the library. Everything else is C++20.
#pragma once

#define FLASHBSR_VERSION_MAJOR 0
#define FLASHBSR_VERSION_MINOR 1
#define FLASHBSR_VERSION_PATCH 0
#define FLASHBSR_VERSION "0.1.0"

// FLASHBSR_FN: a function for host, device and every SIMD level.
// Forced inline so that a translation unit compiled for AVX-512 never emits a shared out-of-line
// copy that the linker could hand to the baseline build.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FLASHBSR_FN __host__ __device__ __forceinline__
#else
#define FLASHBSR_FN inline __attribute__((always_inline))
#endif

// FLASHBSR_DEVICE: a function of device headers (ptx/, tile/, kernel/), which only nvcc and NVRTC
// see.
#define FLASHBSR_DEVICE __device__ __forceinline__

// FLASHBSR_ARCH: the architecture that this pass of the compiler makes code for, 90 for sm_90, and
// 0 on the host. For kernels whose one source is compiled for several.
#if defined(__CUDA_ARCH__)
#define FLASHBSR_ARCH (__CUDA_ARCH__ / 10)
#else
#define FLASHBSR_ARCH 0
#endif

// NVRTC has no <cstdint>, and nothing else is wanted of the toolkit's headers: kernels compile at
// run time from this folder alone. The types are those of <cstdint> on 64-bit Linux.
#if defined(__CUDACC_RTC__)
namespace flashbsr {
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
using uint8_t = unsigned char;
}  // namespace flashbsr
#else
#include <cstdint>
namespace flashbsr {
using std::int16_t;
using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
}  // namespace flashbsr
#endif

// Name of the SIMD level a translation unit is compiled for. The library builds cpu/ once per level
// with per-file compiler flags; the level is part of every symbol so that no copy is shared.
// Without a name it follows the compiler's flags, so that files with different ones do not share.
#ifndef FLASHBSR_CPU_ISA
#if defined(__AVX512BF16__)
#define FLASHBSR_CPU_ISA native_avx512_bf16
#elif defined(__AVX512F__)
#define FLASHBSR_CPU_ISA native_avx512
#elif defined(__AVX2__)
#define FLASHBSR_CPU_ISA native_avx2
#else
#define FLASHBSR_CPU_ISA native
#endif
#endif
