// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a Hopper kernel is launched with: the arrays as its copy engine sees them.
#pragma once

#include <flashbsr/core/launch.h>

#include "registry.h"

namespace flashbsr::cuda {

/// Describes Q, K and V to the copy engine and says how K and V come to shared memory. Throws
/// Error(kCuda) where the driver refuses.
HopperArgs hopper_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header);

}  // namespace flashbsr::cuda
