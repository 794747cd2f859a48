// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Which attention kernel serves a computation on a device.
#pragma once

#include <flashbsr/core/dtype.h>

#include "driver.h"
#include "registry.h"

namespace flashbsr::cuda {

/// What decides about the kernel.
struct Need {
  int head_dim = 0;  ///< the larger of the two
  DType kv = DType::kF16;
  bool hooks = false;    ///< soft-cap, ALiBi, RoPE or a custom mask: more than plain attention
  bool rotates = false;  ///< RoPE inside attention: the decode family has none
  bool sigmoid = false;  ///< instead of softmax
  double rows = 1;       ///< packed rows of a request, on average
};

/// The kernel whose row tile wastes least: the smallest that holds the rows, otherwise the largest
/// there is. Longer requests are cut into tiles, so every choice is correct. Throws
/// Error(kUnsupported), naming the nearest kernel, where there is none.
const KernelRow& choose_kernel(const Need& need, const DeviceInfo& device);

inline bool is_decode(const KernelRow& row) { return row.family[0] == 'd'; }

}  // namespace flashbsr::cuda
