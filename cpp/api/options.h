// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What is fixed when an attention is constructed.
#pragma once

#include <optional>

#include <flashbsr/plan/limits.h>
#include <flashbsr/variant/rope.h>

#include "cache.h"

namespace flashbsr::api {

/// Where to compute. kAuto: where the arrays are.
enum class BackendChoice { kAuto, kCpu, kCuda };

struct AttentionOptions {
  Shape shape;
  CacheShape cache;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  std::optional<DType> kv_dtype;  ///< empty: that of the arrays
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  Position position = Position::kNone;
  RopeFrequencies rope;
  Activation activation = Activation::kSoftmax;
  float sigmoid_bias = 0.0f;
  bool lse_base2 = false;
  SplitPolicy split;
  Capacity capacity;
  int32_t num_workers = 0;  ///< 0: the device's default
  int32_t num_threads = 0;  ///< 0: the cores this process may use
  BackendChoice backend = BackendChoice::kAuto;
  int32_t device = -1;  ///< CUDA ordinal; -1: that of the arrays
};

}  // namespace flashbsr::api
