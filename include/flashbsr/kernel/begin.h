// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// How a kernel begins beside the one before it in the stream, and lets the next one begin.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/ptx/sync.h>

namespace flashbsr {

/// Before a thread reads anything of the plan: waits where the kernel before is writing that.
template <int kArch>
FLASHBSR_DEVICE void wait_for_plan(const KernelArgs& args) {
  if (args.overlap == Overlap::kLaunch) ptx::wait_for_prerequisites<kArch>();
}

/// The next launch may take SMs as they become free, and read its plan there: behind
/// wait_for_plan, so that what the kernels before this one wrote is there for that one, too.
template <int kArch>
FLASHBSR_DEVICE void let_next_start(const KernelArgs& args) {
  if (args.overlap != Overlap::kNone) ptx::launch_dependents<kArch>();
}

}  // namespace flashbsr
