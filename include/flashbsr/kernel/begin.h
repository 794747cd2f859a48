// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// How a kernel begins beside the one before it in the stream, and lets the next one begin.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/ptx/sync.h>

namespace flashbsr {

/// A kernel's parameters come through the constant cache, a miss per 64 bytes and one after another
/// where they are first needed: each warp asks for other ones at once. All threads, at the
/// beginning.
template <class Args>
FLASHBSR_DEVICE void touch_parameters(const Args& args) {
  constexpr int32_t kWords = sizeof(Args) / sizeof(int32_t), kLine = 16;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t step = kLine * static_cast<int32_t>(blockDim.x) / 32;
#pragma unroll 1
  for (int32_t at = kLine * warp; at < kWords; at += step) {
    const int32_t ahead = reinterpret_cast<const int32_t*>(&args)[at];
    asm volatile("" ::"r"(ahead));
  }
}

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
