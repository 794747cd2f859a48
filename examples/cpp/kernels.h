// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// FlashSigmoid in the library's loops, as CUDA kernels: nvcc and NVRTC compile this file. Traits
// say what a kernel is made for, and what it asks of a launch: threads and shared memory.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/kernel.h>
#include <flashbsr/kernel/sm80/kernel.h>

#include "flash_sigmoid.h"

/// Head dim 64, float16, 64 rows: query tokens times the query heads of a KV head.
using Prefill = flashbsr::sm80::PrefillTraits<64, flashbsr::DType::kF16, 64>;
/// The same for few rows, 8, bound by the memory that holds K and V.
using Decode = flashbsr::DecodeTraits<80, 64, flashbsr::DType::kF16, 8>;

__global__ void __launch_bounds__(Prefill::kThreads, Prefill::kBlocksPerSM)
    sigmoid_prefill(const __grid_constant__ flashbsr::KernelArgs args) {
  flashbsr::sm80::prefill<Prefill, FlashSigmoid>(args);
}

__global__ void __launch_bounds__(Decode::kThreads, Decode::kBlocksPerSM)
    sigmoid_decode(const __grid_constant__ flashbsr::KernelArgs args) {
  flashbsr::decode<Decode, FlashSigmoid>(args);
}
