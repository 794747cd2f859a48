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

/// What runs have brought of the scales of K's codes, which decide about the kernel over these in
/// 16 bits. Of other types than int4 there is one of a row.
class CodeScales {
 public:
  /// Whether the kernel of the plan takes those of a run. Otherwise that of the next plan does.
  bool serve(const Params& p, int head_dim);
  /// So few dims have one that codes in 16 bits have no kernel.
  bool fine() const { return fine_; }
  /// Each half of a row may have its own.
  bool halves(DType codes) const { return codes == DType::kI4 && !rows_; }

 private:
  bool fine_ = false;
  bool rows_ = false;         ///< int4 has one of a row
  bool halves_seen_ = false;  ///< or had two at some time: then their kernel serves both
};

/// What a kernel has to do over a batch's codes in 16 bits; none: there is no such pass, or no room
/// (o.dequantize_bytes). Of NVFP4 these are the values. Of other types K stay codes and bring their
/// scales, which kernels without hooks multiply into logits.
/// @param narrow_rows  requests of so many packed rows at most are read as codes, by a kernel of
///                     their own; 0: there are none
std::optional<Need> dense_need(const api::AttentionOptions& o, const Need& need,
                               const api::Batch& batch, const CodeScales& scales,
                               int32_t narrow_rows);
/// What the pass of a batch reads and writes.
DequantizePass dense_pass(const api::AttentionOptions& o, const api::Batch& batch, double bandwidth,
                          int32_t narrow_rows);

class DensePages {
 public:
  explicit DensePages(int device) : device_(device), values_(device), ids_(device) {}

  /// Launches the pass for the K and V of `args`, in the type of Q, and points `args` at what it
  /// writes. The kernel behind it must not start before it has finished. Of a plan that has narrow
  /// items those of wide ones.
  void write(KernelArgs& args, const PlanView& plan, CUstream stream);

 private:
  const int device_;
  DeviceMemory values_;
  DeviceMemory ids_;
};

}  // namespace flashbsr::cuda
