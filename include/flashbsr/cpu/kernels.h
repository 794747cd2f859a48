// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Instantiates the kernels of the SIMD level this file is compiled for.
#pragma once

#include <flashbsr/cpu/attend.h>
#include <flashbsr/variant/standard.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

inline const KernelTable& kernel_table(){static constexpr KernelTable kTable = {
  .isa = FLASHBSR_STRINGIFY(FLASHBSR_CPU_ISA),
#if defined(__AVX512BF16__)
  .has_bf16_dot = true,
#else
  .has_bf16_dot = false,
#endif
  .lanes = kLanes,
  .scratch_bytes = &scratch_bytes,
  .attend = {{&attend<F32Op, Standard>, &attend<F32Op, Sigmoid>},
#if defined(__AVX512BF16__)
             {&attend<Bf16Op, Standard>, &attend<Bf16Op, Sigmoid>}},
#else
             {nullptr, nullptr}},
#endif
  .merge = {&merge_tile<Standard>, &merge_tile<Sigmoid>},
};
return kTable;
}  // namespace FLASHBSR_CPU_ISA

}  // namespace flashbsr::cpu
}  // namespace flashbsr::cpu
