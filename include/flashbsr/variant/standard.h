// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The built-in variants, composed: soft-cap, then ALiBi, then the custom mask, each switched at run
// time because the switch is taken once per row of a tile. Scale, causality, windows and RoPE are
// properties of the tile, sinks of the epilogue; they need no hook.
#pragma once

#include <flashbsr/variant/alibi.h>
#include <flashbsr/variant/custom_mask.h>
#include <flashbsr/variant/soft_cap.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr {

/// Softmax attention and nothing else: what is left when no hook is in use. Kernels that have it as
/// an instance of its own save the registers of the hooks.
struct Plain : VariantBase {
  static constexpr bool takes_rope = false;

  FLASHBSR_FN explicit Plain(const Params&) {}
};

/// Soft-cap alone, and ALiBi alone: instances of their own on Hopper, whose tiles seen whole go
/// without maxima then (kernel/sm90a/exponents.h).
struct SoftCapped : VariantBase {
  static constexpr bool takes_rope = false;
  SoftCap soft_cap;

  FLASHBSR_FN explicit SoftCapped(const Params& p) : soft_cap{p.soft_cap} {}

  FLASHBSR_FN bool transforms_logits() const { return true; }

  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>&) const {
    return soft_cap.apply<M>(x);
  }
};

struct WithAlibi : VariantBase {
  static constexpr bool takes_rope = false;
  Alibi alibi;

  FLASHBSR_FN explicit WithAlibi(const Params& p) : alibi{p.alibi_slopes} {}

  FLASHBSR_FN bool transforms_logits() const { return true; }
  FLASHBSR_FN float row_value(int32_t q_head) const { return alibi.slopes[q_head]; }

  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    return alibi.apply<M>(x, at);
  }
};

struct Standard : VariantBase {
  SoftCap soft_cap;
  Alibi alibi;
  CustomMask custom_mask;

  FLASHBSR_FN explicit Standard(const Params& p)
      : soft_cap{p.soft_cap}, alibi{p.alibi_slopes}, custom_mask{p.custom_mask} {}

  FLASHBSR_FN bool transforms_logits() const { return soft_cap.active() || alibi.active(); }
  FLASHBSR_FN bool masks_logits() const { return custom_mask.active(); }
  FLASHBSR_FN bool keeps_all(const Request& request, int32_t q_token, int32_t begin,
                             int32_t end) const {
    return custom_mask.keeps_all(request, q_token, begin, end);
  }
  FLASHBSR_FN int32_t mask_begin(const Request& request) const { return request.mask_begin; }
  FLASHBSR_FN float row_value(int32_t q_head) const {
    return alibi.active() ? alibi.slopes[q_head] : 0.0f;
  }

  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>& at) const {
    if (soft_cap.active()) x = soft_cap.apply<M>(x);
    if (alibi.active()) x = alibi.apply<M>(x, at);
    return x;
  }

  template <class M>
  FLASHBSR_FN typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    return custom_mask.keep<M>(at);
  }
};

/// Sigmoid attention (Ramapuram et al., 2024; FlashInfer, MLSys 2025, figure 5): each logit weighs
/// its value by sigmoid(x + bias), with no normalisation over the row and so no LSE.
struct Sigmoid : Standard {
  static constexpr bool use_softmax = false;
  static constexpr bool weights_at_most_one = true;
  float bias;

  FLASHBSR_FN explicit Sigmoid(const Params& p) : Standard(p), bias(p.sigmoid_bias) {}

  template <class M>
  FLASHBSR_FN typename M::Float activation(typename M::Float x) const {
    return M::sigmoid(x + bias);
  }
};

/// The same alone, an instance of its own: with the switches of the others decode takes a quarter
/// more time, and a step of Hopper's prefill 311 instructions in place of 263.
struct SigmoidAlone : VariantBase {
  static constexpr bool takes_rope = false;
  static constexpr bool use_softmax = false;
  static constexpr bool weights_at_most_one = true;
  float bias;

  FLASHBSR_FN explicit SigmoidAlone(const Params& p) : bias(p.sigmoid_bias) {}

  template <class M>
  FLASHBSR_FN typename M::Float activation(typename M::Float x) const {
    return M::sigmoid(x + bias);
  }
};

}  // namespace flashbsr
