// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#define FLASHBSR_CPU_ISA avx512
#include <flashbsr/cpu/kernels.h>

#include "levels.h"

const flashbsr::cpu::KernelTable& flashbsr_kernels_avx512() {
  return flashbsr::cpu::kernel_table();
}
