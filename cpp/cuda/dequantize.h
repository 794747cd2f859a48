// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The pass that writes codes as 16 bits before attention (plan/dequantize.h decides about it), and
// the memory for these. For sources of cpp/cuda only.
#pragma once

#include <optional>

#include <flashbsr/core/launch.h>
#include <flashbsr/plan/dequantize.h>

#include "api/backend.h"
#include "choice.h"
#include "memory.h"

namespace flashbsr::cuda {

/// What a kernel has to do over a batch's codes in 16 bits; none: there is no such pass, or no room
/// (o.dequantize_bytes). Of NVFP4 these are the values. Of other types K stay codes and bring their
/// scales, which kernels without hooks multiply into logits.
std::optional<Need> dense_need(const api::AttentionOptions& o, const Need& need,
                               const api::Batch& batch);
/// Whether scales of such codes are as the kernel has them: one of a row, or of each half of it.
bool takes_scales(const PagedView& codes, const PagedView& scales, int head_dim);
/// What the pass of a batch reads and writes.
DequantizePass dense_pass(const api::AttentionOptions& o, const api::Batch& batch,
                          double bandwidth);

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
