// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Everything a run needs besides the plan: the only contract between host and kernels.
#pragma once

#include <flashbsr/core/extras.h>
#include <flashbsr/core/plan.h>
#include <flashbsr/core/view.h>

namespace flashbsr {

enum class Position : int32_t { kNone = 0, kRopeLlama = 1, kAlibi = 2 };
enum class Activation : int32_t { kSoftmax = 0, kSigmoid = 1 };

/// RoPE inside attention. Angles are position x inv_freq[i]; tables are split in two so that they
/// stay small: angle(64 a + b) = coarse[a] + fine[b], combined by the angle-sum formulas. Negative
/// positions change the sign of the sines.
///
/// Dims i and i + half turn together, by column i, for i < half; what is behind them stays. With
/// `interleave` neighbours do: of dims i, i + 1 and i + half, i + half + 1 (i even), which a GPU
/// thread has in two words anyway, the first two by column i and the others by column i + 1. half
/// is dim / 2 then, and columns of dims that stay turn by nothing.
struct RopeTables {
  static constexpr int32_t kFine = 64;
  const float* coarse = nullptr;  ///< [max_position / 64 + 1][2][dim / 2]: cosines, sines
  const float* fine = nullptr;    ///< [64][2][dim / 2]
  int32_t half = 0;               ///< pairs: half of the rotated dims
  bool interleave = false;
};

struct Params {
  RaggedView q;  ///< [nnz_q, H_qo, D_qk]
  PagedView k;   ///< pages of [page_size, H_kv, D_qk]
  PagedView v;   ///< pages of [page_size, H_kv, D_vo]
  /// Where K lies in two arrays, its dims behind those of `k`; otherwise of dim 0.
  PagedView k_tail;
  RaggedView out;        ///< [nnz_q, H_qo, D_vo]
  float* lse = nullptr;  ///< [nnz_q, H_qo] or null
  int64_t lse_stride_token = 0;
  int64_t lse_stride_head = 0;

  float sm_scale = 1.0f;                ///< on q.k, with the scalar q and k scales folded in
  float out_scale = 1.0f;               ///< on the output: the scalar v scale
  const float* q_head_scale = nullptr;  ///< [H_qo] or null
  const float* k_head_scale = nullptr;  ///< [H_kv] or null
  const float* v_head_scale = nullptr;  ///< [H_kv] or null

  float soft_cap = 0.0f;                 ///< 0: off
  const float* alibi_slopes = nullptr;   ///< [H_qo] or null
  const float* sinks = nullptr;          ///< [H_qo] natural logits, or null
  const uint8_t* custom_mask = nullptr;  ///< bit-packed; offsets are in the requests
  float sigmoid_bias = 0.0f;
  float lse_unit = 0.6931471805599453f;  ///< ln 2 for natural LSE, 1 for base 2
  RopeTables rope;

  float* partial_out = nullptr;  ///< [rows of partial states, D_vo]
  float* partial_lse = nullptr;  ///< [rows of partial states], base 2

  /// Scales of every token and KV head, in pages as K and V are; dim: of groups of a row's dims,
  /// one behind the other. Without data: none.
  PagedView k_scales;
  PagedView v_scales;
  /// Of an output in NVFP4 [nnz_q, H_qo, D_vo / 16]. Kernels write float32 and a pass behind them
  /// reads it; the CPU's write codes.
  RaggedView out_scales;

  /// Of a user's variant. Last: 480 bytes that other kernels never fetch.
  Extras extras;
};

}  // namespace flashbsr
