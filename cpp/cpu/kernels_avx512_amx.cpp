// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#define FLASHBSR_CPU_ISA avx512_amx
#include <flashbsr/cpu/kernels.h>

#include "levels.h"

const flashbsr::cpu::KernelTable& flashbsr_kernels_avx512_amx() {
  return flashbsr::cpu::kernel_table();
}
