// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays of a plan and of a run, and the checks that turn those of a run into Params.
#pragma once

#include <optional>
#include <vector>

#include "options.h"

namespace flashbsr::api {

/// At most one of them.
struct MaskArrays {
  std::optional<Array> boolean;  ///< bool or uint8, flattened, sum of q_len * kv_len
  std::optional<Array> packed;   ///< uint8, little-endian bits, each request starts at a byte
  std::optional<Array> parents;  ///< int32 or int64, of every query token's in a tree; -1: a root

  bool given() const { return boolean || packed || parents; }
};

/// A scale: one number, or an array with one per head; of K and V also one of every token.
struct Scale {
  float number = 1.0f;
  const Array* per_head = nullptr;
  const Array* per_token = nullptr;
};

/// The value of an ExtraOption.
struct ExtraValue {
  uint32_t bits = 0;             ///< of a float or an int32_t
  const Array* array = nullptr;  ///< of a tensor
};

/// Null: not given.
struct RunArrays {
  const Array& q;
  const Array& k;  ///< or the stacked cache
  const Array* v = nullptr;
  const Array& out;
  const Array* out_scales = nullptr;  ///< of an output in NVFP4
  const Array* lse = nullptr;
  Scale q_scale, k_scale, v_scale;
  float o_scale = 1.0f;  ///< the output is divided by it
  const Array* sinks = nullptr;
  const Array* alibi_slopes = nullptr;
  std::vector<ExtraValue> extras;  ///< as many as AttentionOptions::extras
};

/// Places the mask's bits behind each other, request by request, and notes where in the layout.
/// `placed`: where requests say the positions of their queries, which keys are here; otherwise
/// null.
void take_mask(const MaskArrays& mask, const Shape* placed, Layout& layout,
               std::vector<uint8_t>& bits);
/// Of a block-sparse matrix with blocks of r rows: [blocks, r, c], or the same packed without gaps.
/// `columns`: its block columns as the caller gave them.
void take_block_mask(const MaskArrays& mask, int64_t r, const IndexView& columns, Layout& layout,
                     std::vector<uint8_t>& bits);

/// Checks the arrays of a run against the options, the plan and the place of the computation. What
/// belongs to the plan (mask, default slopes, RoPE tables, partial states) is the backend's to add.
/// `spare_rows`: q may have more rows than the plan names.
Params params_for(const AttentionOptions& options, const PlanHeader& plan, const RunArrays& arrays,
                  Place place, bool spare_rows);

}  // namespace flashbsr::api
