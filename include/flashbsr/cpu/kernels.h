// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Instantiates the kernels of the SIMD level this file is compiled for.
#pragma once

#include <flashbsr/cpu/attend.h>
#include <flashbsr/cpu/built_in.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline const KernelTable& kernel_table() {
  static constexpr KernelTable kTable = {
      .isa = FLASHBSR_STRINGIFY(FLASHBSR_CPU_ISA),
#if defined(__AVX512BF16__)
      .has_bf16_dot = true,
#else
      .has_bf16_dot = false,
#endif
      .lanes = kLanes,
      .scratch_bytes = &scratch_bytes,
#if defined(__AVX512BF16__)
      .blocks = {&kBlocks<F32Op>, &kBlocks<Bf16Op>},
      .attend = {&attend<F32Op, BuiltIn>, &attend<Bf16Op, BuiltIn>},
#else
      .blocks = {&kBlocks<F32Op>, nullptr},
      .attend = {&attend<F32Op, BuiltIn>, nullptr},
#endif
      .merge = &merge_tile<BuiltIn>,
  };
  return kTable;
}  // namespace FLASHBSR_CPU_ISA

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
