// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What is asked for when an attention needs code that the build does not have.
#pragma once

#include <string>

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/launch.h>

namespace flashbsr::api {

/// A CUDA kernel, in the terms of a row of cpp/instances.txt.
struct KernelWish {
  std::string name;    ///< of the extern "C" function
  std::string family;  ///< "decode", "prefill", "hopper", and of codes with scales "decode_scaled"
                       ///< and the like
  std::string arch;    ///< instruction set of its template: "sm80", "sm90a"
  std::string target;  ///< what machine code is for: "sm_86", "sm_90a"
  int head_dim = 0;    ///< of q and k
  int head_dim_vo = 0;
  DType q = DType::kF16;
  DType kv = DType::kF16;  ///< of K
  DType v = DType::kF16;
  int rows = 0;  ///< of a tile
  /// "plain", "standard", "sigmoid"; the provider's own: "custom", with a mask "custom_masked".
  std::string variant;
  /// On Hopper: in boxes by TMA, row by row as any lie, or either.
  KvCopies copies = KvCopies::kBoxes;
};

/// Compiles kernels of one variant. Implemented in Python (flashbsr/jit), which takes the GIL: no
/// thread may wait for an Attention's lock while it holds that.
class KernelProvider {
 public:
  virtual ~KernelProvider() = default;

  /// Name of its variant, no other's: kernels are told apart by it.
  virtual std::string name() = 0;

  /// Path of a shared object for a SIMD level of the CPU engine ("avx512_bf16"), which exports
  /// `extern "C" const flashbsr::cpu::KernelTable* flashbsr_cpu_kernels()`.
  virtual std::string cpu_library(const std::string& isa) = 0;

  /// Machine code (a cubin) of one CUDA kernel.
  virtual std::string cuda_kernel(const KernelWish& wish) = 0;
};

}  // namespace flashbsr::api
