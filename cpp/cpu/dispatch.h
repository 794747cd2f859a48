// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Chooses the SIMD level at run time.
#pragma once

#include <string>
#include <vector>

#include <flashbsr/cpu/kernel_table.h>

namespace flashbsr::cpu {

/// Tables that this build has and this CPU can run, best last. Never empty.
const std::vector<const KernelTable*>& available_tables();

/// Compiler flags of a level, separated by spaces.
const char* level_flags(const std::string& isa);

/// The best of them, or the one that the environment variable FLASHBSR_ISA names. Throws
/// flashbsr::Error where that one is unknown or cannot run here.
const KernelTable& chosen_table();

}  // namespace flashbsr::cpu
