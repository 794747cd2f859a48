// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What kernels of sm_90 are launched with: the arrays as its copy engine sees them.
#pragma once

#include <flashbsr/core/launch.h>

#include "api/backend.h"
#include "api/options.h"
#include "registry.h"

namespace flashbsr::cuda {

/// One dimension of an array, and what a box takes of it.
struct MapDim {
  int64_t extent;
  int64_t stride;  ///< elements; ignored for the innermost
  int64_t box;

  bool operator==(const MapDim&) const = default;
};

/// A map, and what it was made of. The driver takes 0.2 us for one and every run has four, of
/// arrays that are often those of the run before.
class MapCache {
 public:
  static constexpr int kRank = 4;

  /// The map of these dimensions; null where the driver refuses them.
  const TensorMap* find(const void* data, DType type, const MapDim (&dims)[kRank]);

 private:
  const void* data_ = nullptr;
  DType type_ = DType::kF32;
  MapDim dims_[kRank] = {};
  bool known_ = false, taken_ = false;
  TensorMap map_;
};

/// Of the last run.
struct HopperMaps {
  MapCache q, q_token, k, v, out;
  MapCache k_scales, v_scales;
};

/// KV tokens of a box of K and V, of which a tile of the kernel takes several; 0: boxes do not
/// serve, as too few tokens are in a row in memory.
/// @param run      tokens that are: of all pages, 0: ragged KV (page_run)
/// @param rotates  a kernel that can copy K and V in either way rotates them, too
int64_t kv_box(const KernelRow& row, int64_t run, bool rotates = false);

/// Whether boxes may serve, as far as a plan knows.
bool may_box(const KernelRow& row, const api::Batch& batch, const api::AttentionOptions& options);

/// Whether TMA copies the run's K and V. Where it does not, a kernel has to gather them.
bool takes_boxes(const Params& params, const KernelRow& row, const PlanHeader& header,
                 HopperMaps& maps);

/// Describes Q, K and V to the copy engine and says how K and V come to shared memory. Throws
/// Error(kUnsupported) where the driver refuses Q.
HopperArgs hopper_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header,
                       HopperMaps& maps);

/// What decode_pairs is launched with.
PairArgs pair_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header,
                   HopperMaps& maps);

}  // namespace flashbsr::cuda
