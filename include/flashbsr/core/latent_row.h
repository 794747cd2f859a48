// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A token of a latent cache packed in 656 bytes, which vLLM and FlashMLA call "fp8_ds_mla":
//
//   512 codes of e4m3 | 4 scales in float32, one for each 128 codes | 64 rotated keys in bf16
//
// As views: `k` are the codes, `k_tail` the rotated keys of the same rows, in another type; scales
// lie behind the codes.
#pragma once

#include <flashbsr/core/params.h>

namespace flashbsr {

struct PackedLatent {
  static constexpr int kDim = 512;
  static constexpr int kGroupDims = 128;  ///< of a scale
  static constexpr int kScaleOffset = kDim;
  static constexpr int kTailDim = 64;
  static constexpr int kTailOffset = kScaleOffset + kDim / kGroupDims * 4;
  static constexpr int kBytes = kTailOffset + kTailDim * 2;
};
static_assert(PackedLatent::kBytes == 656);

/// Whether K are such rows.
FLASHBSR_FN bool has_packed_latents(const Params& p) {
  return p.k_tail.dim > 0 && p.k_tail.dtype != p.k.dtype;
}

/// Whether K are codes with scales of every token.
FLASHBSR_FN bool has_token_scales(const Params& p) {
  return p.k_scales.data != nullptr || has_packed_latents(p);
}

}  // namespace flashbsr
