// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A variant is a plain struct that says what is new about an attention:
//
//   O = epilogue( activation( mask( logits_transform( q . k * scale ) ) ) . v )
//
// One source serves every backend. Its functions are templates over a math policy M, which names
// the type of a logit (`M::Float`: one float on a GPU thread, a vector of logits on the CPU) and
// the functions on it (`M::tanh`, `M::exp`, `M::select`, ...). Ordinary operators work on both.
//
//   struct MyVariant : flashbsr::VariantBase {
//     float bias;
//     bool transforms_logits() const { return true; }
//     template <class M>
//     FLASHBSR_FN typename M::Float logits_transform(typename M::Float x,
//                                                    const LogitsAt<M>& at) const {
//       return x + bias;
//     }
//   };
#pragma once

#include <flashbsr/core/math.h>
#include <flashbsr/core/params.h>

namespace flashbsr {

/// Where a logit (or a vector of consecutive KV positions) sits.
template <class M>
struct LogitsAt {
  const Request* request;
  int32_t q_token;     ///< query token within the request
  int32_t q_position;  ///< its position in the sequence: kv_len - q_len + q_token, or as planned
  int32_t q_head;
  int32_t kv_head;
  int32_t kv_first;             ///< KV position of the first lane
  int32_t lanes;                ///< lanes that are inside the visible span; others are discarded
  typename M::Int kv_position;  ///< of every lane
  float row_value = 0.0f;       ///< what the variant's row_value() said of q_head
};

/// Whose row of q, k, v or the output a hook is given.
struct RowAt {
  const Request* request;
  int32_t token;     ///< query token within the request, or KV position
  int32_t position;  ///< in the sequence
  int32_t head;      ///< of queries for q and the output, of KV for k and v
  int32_t dim;       ///< elements of the row
};

/// Defaults: plain softmax attention. The engine asks `transforms_logits` and `masks_logits` once
/// per row tile, so that a variant which is off costs nothing in the inner loop.
struct VariantBase {
  static constexpr bool use_softmax = true;
  /// Without softmax: no weight exceeds 1. Then fp16 weights are kept 2^15 larger, so that small
  /// ones are not lost as subnormals; others would overflow.
  static constexpr bool weights_at_most_one = false;
  /// False: it is never run under RoPE, and a GPU's kernels have no code for that, which takes a
  /// third (Hopper, head dim 128) to a half (decode) of a compiler's time.
  static constexpr bool takes_rope = true;

  // Hooks of whole rows, which cost what unpacking a row costs. A struct that sets one to true has
  // the function: `template <class Row> void query_transform(Row x, const RowAt& at) const` changes
  // x[0], ..., x[at.dim - 1], floats. Queries and keys come before RoPE; the output is normalised
  // and scaled.
  static constexpr bool transforms_queries = false;  ///< query_transform
  static constexpr bool transforms_keys = false;     ///< key_transform
  static constexpr bool transforms_values = false;   ///< value_transform
  static constexpr bool transforms_outputs = false;  ///< output_transform

  FLASHBSR_FN bool transforms_logits() const { return false; }
  FLASHBSR_FN bool masks_logits() const { return false; }

  /// A number that the logits of a query head need, looked up before they are there.
  FLASHBSR_FN float row_value(int32_t) const { return 0.0f; }

  /// `x` is the scaled logit in natural units.
  template <class M>
  FLASHBSR_FN typename M::Float logits_transform(typename M::Float x, const LogitsAt<M>&) const {
    return x;
  }
  /// True keeps the logit. Causality and windows are spans, not masks: they never come here.
  template <class M>
  FLASHBSR_FN typename M::Bool logits_mask(const LogitsAt<M>&) const {
    return M::all();
  }
  /// Whether the mask keeps KV positions [begin, end) for a query token. Kernels may ask, to save
  /// the mask for tiles that it keeps whole.
  FLASHBSR_FN bool keeps_all(const Request&, int32_t, int32_t, int32_t) const { return false; }
  /// The mask keeps every KV position before this one for every query token of a request: kernels
  /// go without it there.
  FLASHBSR_FN int32_t mask_begin(const Request&) const { return 0; }

  /// What multiplies v where use_softmax is false.
  template <class M>
  FLASHBSR_FN typename M::Float activation(typename M::Float x) const {
    return x;
  }
};

namespace detail {
template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;
}  // namespace detail

/// Checked where a kernel is instantiated, so that a wrong signature fails with this name.
template <class V, class M>
concept AttentionVariant = requires(const V v, typename M::Float x, const LogitsAt<M> at) {
  requires detail::kSame<decltype(V::use_softmax), const bool>;
  requires detail::kSame<decltype(V::takes_rope), const bool>;
  requires detail::kSame<decltype(V::transforms_queries), const bool>;
  requires detail::kSame<decltype(V::transforms_keys), const bool>;
  requires detail::kSame<decltype(V::transforms_values), const bool>;
  requires detail::kSame<decltype(V::transforms_outputs), const bool>;
  requires detail::kSame<decltype(v.transforms_logits()), bool>;
  requires detail::kSame<decltype(v.masks_logits()), bool>;
  requires detail::kSame<decltype(v.row_value(0)), float>;
  requires detail::kSame<decltype(v.template logits_transform<M>(x, at)), typename M::Float>;
  requires detail::kSame<decltype(v.template logits_mask<M>(at)), typename M::Bool>;
  requires detail::kSame<decltype(v.template activation<M>(x)), typename M::Float>;
};

}  // namespace flashbsr
