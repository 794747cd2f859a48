// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The kernel tables of the SIMD levels that this build has, one per translation unit.
#pragma once

#include <flashbsr/cpu/kernel_table.h>

const flashbsr::cpu::KernelTable& flashbsr_kernels_baseline();
const flashbsr::cpu::KernelTable& flashbsr_kernels_avx2();
const flashbsr::cpu::KernelTable& flashbsr_kernels_avx512();
const flashbsr::cpu::KernelTable& flashbsr_kernels_avx512_bf16();
const flashbsr::cpu::KernelTable& flashbsr_kernels_avx512_amx();
