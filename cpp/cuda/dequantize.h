// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The pass that writes NVFP4 as 16 bits before attention (plan/dequantize.h decides about it), and
// the memory for these. For sources of cpp/cuda only.
#pragma once

#include <flashbsr/core/launch.h>

#include "memory.h"

namespace flashbsr::cuda {

/// Bytes of K and V, in 16 bits, of so many tokens.
inline int64_t dense_bytes(int64_t tokens, int64_t heads, int64_t dims) {
  return 2 * tokens * heads * dims;
}

class DensePages {
 public:
  explicit DensePages(int device) : device_(device), values_(device), ids_(device) {}

  /// Launches the pass for the K and V of `args`, in the type of Q, and points `args` at what it
  /// writes. The kernel behind it must not start before it has finished.
  void write(KernelArgs& args, const PlanHeader& header, CUstream stream);

 private:
  const int device_;
  DeviceMemory values_;
  DeviceMemory ids_;
};

}  // namespace flashbsr::cuda
