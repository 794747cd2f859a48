// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Users' variants on Hopper. Their functions get one logit each, as on every other GPU, and not a
// row of them: any C++ on a float compiles, and an expression of many steps keeps its intermediate
// values for one logit at a time, where rows of 40 to 64 of them would spill.
#pragma once

#include <flashbsr/kernel/sm90a/fragment_math.h>
#include <flashbsr/kernel/sm90a/logit_math.h>
#include <flashbsr/variant/custom.h>

namespace flashbsr::sm90a {

/// What Custom<PerLogit<V, Math>, true> does with the bits of a plan's mask, which are read as
/// words.
template <int kGroups>
FLASHBSR_DEVICE RowBits<kGroups> operator&(const RowBits<kGroups>& a, const RowBits<kGroups>& b) {
  RowBits<kGroups> r;
#pragma unroll
  for (int i = 0; i < RowBits<kGroups>::kWords; ++i) r.word[i] = a.word[i] & b.word[i];
  return r;
}

/// The policy of texts that need a float where LogitMath has an expression (`c ? x : 0.0f`).
struct FloatMath : ThreadMath {
  FLASHBSR_DEVICE static float logit(float x, float factor) { return x * factor; }
  FLASHBSR_DEVICE static int32_t position(int32_t first, int32_t column) { return first + column; }
};

/// @tparam Math  LogitMath, or FloatMath where `V` does not compile with that (jit/cuda.py)
template <class V, class Math>
struct PerLogit : V {
  static constexpr bool per_logit = true;

  FLASHBSR_DEVICE explicit PerLogit(const Params& p) : V(flashbsr::detail::make_variant<V>(p)) {}

  template <class M>
  FLASHBSR_DEVICE typename M::Float logits_transform(const typename M::Float& x,
                                                     const LogitsAt<M>& at) const {
    typename M::Float r;
#pragma unroll
    for (int i = 0; i < M::Float::kCount; ++i) {
      r.x[i] = V::template logits_transform<Math>(logit(x, i), one(at, i));
    }
    return r;
  }
  template <class M>
  FLASHBSR_DEVICE typename M::Bool logits_mask(const LogitsAt<M>& at) const {
    typename M::Bool r{};
#pragma unroll
    for (int i = 0; i < M::Float::kCount; ++i) {
      const uint32_t keep = V::template logits_mask<Math>(one(at, i));
      r.word[i / 8] |= keep << (i / 2 % 4 * 8 + i % 2);  // as RowBits::at reads it
    }
    return r;
  }
  template <class M>
  FLASHBSR_DEVICE typename M::Float activation(const typename M::Float& x) const {
    typename M::Float r;
#pragma unroll
    for (int i = 0; i < M::Float::kCount; ++i) {
      r.x[i] = V::template activation<Math>(logit(x, i));
    }
    return r;
  }

 private:
  /// Logit `i` of a row that nothing has been added to.
  template <class Row>
  FLASHBSR_DEVICE static auto logit(const Row& x, int i) {
    return Math::logit(x.x[i], x.factor);
  }
  /// Where logit `i` of a row sits.
  template <class M>
  FLASHBSR_DEVICE static LogitsAt<Math> one(const LogitsAt<M>& at, int i) {
    const int32_t column = i / 2 * 8 + i % 2;
    return {.request = at.request,
            .q_token = at.q_token,
            .q_position = at.q_position,
            .q_head = at.q_head,
            .kv_head = at.kv_head,
            .kv_first = at.kv_position.first + column,
            .lanes = 1,
            .kv_position = Math::position(at.kv_position.first, column),
            .row_value = at.row_value};
  }
};

}  // namespace flashbsr::sm90a
