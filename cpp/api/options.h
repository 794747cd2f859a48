// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What is fixed when an attention is constructed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <flashbsr/plan/limits.h>
#include <flashbsr/variant/rope.h>

#include "array.h"
#include "cache.h"
#include "provider.h"

namespace flashbsr::api {

/// Where to compute. kAuto: where the arrays are.
enum class BackendChoice { kAuto, kCpu, kCuda };

/// Which CUDA attention kernels, by the names that FlashInfer's users know.
enum class Family {
  kAuto,  ///< whichever serves best
  kFa2,   ///< mma.sync, on every device
  kFa3,   ///< wgmma: compute capability 9.0
};

/// What the caller wrote as backend= to get this family.
constexpr const char* family_backend(Family family) {
  return family == Family::kFa2 ? "fa2" : family == Family::kFa3 ? "fa3" : "cuda";
}

/// A number or an array that a user's variant declares.
struct ExtraOption {
  std::string name;
  Element element = Element::kF32;
  int rank = 0;  ///< 0: a number, float32 or int32
};

struct AttentionOptions {
  Shape shape;
  bool hnd = false;  ///< KV heads before tokens
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  bool latent = false;            ///< V are the first dims of K: one array, or K in two
  bool packed_latents = false;    ///< they are rows of 656 bytes (core/latent_row.h)
  std::optional<DType> q_dtype;   ///< empty: that of the arrays
  std::optional<DType> kv_dtype;  ///< likewise; of K where V has another
  std::optional<DType> v_dtype;   ///< likewise
  std::optional<DType> o_dtype;   ///< empty: that of q, and any where q is float8
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  Position position = Position::kNone;
  RopeOptions rope;
  Activation activation = Activation::kSoftmax;
  float sigmoid_bias = 0.0f;
  bool lse_base2 = false;
  SplitPolicy split;
  Capacity capacity;
  int32_t num_workers = 0;               ///< 0: the device's default
  int32_t tile_rows = 0;                 ///< of a GPU's kernel; 0: the cheapest
  bool mixed = false;                    ///< captured runs take a kernel for mixed batches
  int32_t num_threads = 0;               ///< 0: the cores this process may use
  int64_t dequantize_bytes = 256 << 20;  ///< most memory for codes that are written as 16 bits
  bool fast_fp8 = false;  ///< fewer promotions of float8 sums on tensor cores that truncate
  BackendChoice backend = BackendChoice::kAuto;
  Family family = Family::kAuto;  ///< another than kAuto only with BackendChoice::kCuda
  int32_t device = -1;            ///< CUDA ordinal; -1: that of the arrays

  /// A variant of the user's, compiled by the provider. `activation` says whether it has a softmax.
  bool custom_variant = false;
  bool rewrites_rows = false;       ///< it has hooks of whole rows: no products of 16-bit numbers
  bool row_hooks = false;           ///< likewise, or one of whole rows of the output
  bool asks_where = false;          ///< it asks for positions or the request
  std::vector<ExtraOption> extras;  ///< that it declares, numbers and arrays in turn
  std::shared_ptr<KernelProvider> provider;  ///< null: what the build has is all there is
};

}  // namespace flashbsr::api
