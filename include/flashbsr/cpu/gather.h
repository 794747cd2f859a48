// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Elements of a variant's tensors for a vector of logits. Most lie side by side, as an element per
// key does; then it is one load. Measured on a Zen 5 core: docs/variants.md.
#pragma once

#include <type_traits>

#include <flashbsr/core/extras.h>
#include <flashbsr/cpu/convert.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Whether every lane is zero.
FLASHBSR_FN bool all_zero(IntV x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(x)) == 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x)) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= x[i];
  return any == 0;
#endif
}

/// kLanes neighbouring elements.
template <class T>
FLASHBSR_FN auto load_elements(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return load<FloatV>(p);
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return load<IntV>(p);
  } else if constexpr (std::is_same_v<T, Half>) {
    return load_as<DType::kF16>(p);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return load_as<DType::kBF16>(p);
  } else if constexpr (std::is_same_v<T, uint8_t>) {
    return reinterpret_cast<IntV>(widen8(p));
  } else if constexpr (std::is_same_v<T, bool>) {
    return reinterpret_cast<IntV>(widen8(p)) != 0;
  } else {
    using LongV = int64_t __attribute__((vector_size(8 * kLanes)));
    LongV wide;  // copied here: no function returns vectors wider than the level's
    std::memcpy(&wide, p, sizeof(wide));
    return __builtin_convertvector(wide, IntV);
  }
}

/// The last lane first.
template <class V>
FLASHBSR_FN V reversed(V x) {
  return [&]<int... I>(Lanes<I...>) __attribute__((always_inline)) {
    return __builtin_shufflevector(x, x, (kLanes - 1 - I)...);
  }(LaneSequence{});
}

/// Elements at offsets, one by one.
template <class T>
FLASHBSR_FN auto pick_elements(const T* p, IntV offset) {
  using Value = decltype(flashbsr::detail::element_value(T{}));
  std::conditional_t<std::is_same_v<Value, float>, FloatV, IntV> r;
  for (int i = 0; i < kLanes; ++i) {
    const Value x = flashbsr::detail::element_value(p[offset[i]]);
    r[i] = std::is_same_v<Value, bool> ? -static_cast<int32_t>(x) : x;
  }
  return r;
}

/// Offset of an index that is one for all lanes, or one for each, in elements.
FLASHBSR_FN int32_t clamped_offset(int32_t i, int32_t size, int32_t stride) {
  return min_of(max_of(i, 0), size - 1) * stride;
}
FLASHBSR_FN IntV clamped_offset(IntV i, int32_t size, int32_t stride) {
  const IntV low = i < 0 ? IntV{} : i;
  const IntV last = splat_int(size - 1);
  return (low > last ? last : low) * stride;
}

/// Elements at clamped indices, of which at least one differs from lane to lane.
template <class T, int kRank, class... I>
FLASHBSR_FN auto gather(const ExtraTensor<T, kRank>& x, I... index) {
  // Indices of one number for all lanes go into the address, which has 64 bits; the others must
  // span fewer than 2^31 elements.
  const T* base = x.data();
  IntV offset{};
  int64_t span = 0;
  int dim = 0;
  const auto add = [&](auto i) __attribute__((always_inline)) {
    const int d = dim++;
    if constexpr (std::is_same_v<decltype(i), IntV>) {
      const int64_t stride = x.stride(d);
      span += (x.size(d) - 1) * (stride < 0 ? -stride : stride);
      offset += clamped_offset(i, x.size(d), static_cast<int32_t>(stride));
    } else {
      base += x.step(d, static_cast<int32_t>(i));
    }
  };
  (add(index), ...);
  if (span > 0x7fffffff) {
    // Rare, and so done lane by lane with 64-bit offsets.
    decltype(pick_elements(base, offset)) r;
    const auto one = [](auto i, int lane) __attribute__((always_inline)) -> int32_t {
      if constexpr (std::is_same_v<decltype(i), IntV>)
        return i[lane];
      else
        return i;
    };
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto value = x(one(index, lane)...);
      r[lane] = std::is_same_v<decltype(value), const bool> ? -static_cast<int32_t>(value) : value;
    }
    return r;
  }
  if (all_zero((offset - iota()) ^ offset[0])) return load_elements(base + offset[0]);
  // A table by distance is read backwards: q_position - kv_position.
  if (all_zero((offset + iota()) ^ offset[0])) {
    return reversed(load_elements(base + offset[kLanes - 1]));
  }
  return pick_elements(base, offset);
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
