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
const KernelTable& level_for(Compute compute);

/// Opens a shared object that was compiled for `level`: what its flashbsr_cpu_kernels() returns,
/// with the level's micro-kernels. It stays open as long as the process. Throws
/// Error(kUnsupported) where the loader refuses it.
KernelTable load_table(const std::string& path, const KernelTable& level);

}  // namespace flashbsr::cpu
