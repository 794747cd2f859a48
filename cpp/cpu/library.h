// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Kernels of the CPU engine that were compiled at run time.
#pragma once

#include <string>

#include <flashbsr/cpu/kernel_table.h>

namespace flashbsr::cpu {

/// The SIMD level, of those that this machine runs and up to the one in use, in which products of
/// this type are compiled: the highest with bf16 dot products, or the highest without.
const char* level_for(Compute compute);

/// Opens a shared object and returns what its flashbsr_cpu_kernels() does. It stays open as long as
/// the process. Throws Error(kUnsupported) where the loader refuses it.
const KernelTable& load_table(const std::string& path);

}  // namespace flashbsr::cpu
