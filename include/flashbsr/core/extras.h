// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Numbers and arrays that a user's variant asks for beyond what every attention has. They reach
// kernels by value in Params, in the order in which the variant declares them; the generated
// constructor of the variant (jit/source.py) gives them back their names and types.
#pragma once

#include <flashbsr/core/dtype.h>
#include <flashbsr/core/math.h>

namespace flashbsr {

inline constexpr int32_t kMaxExtraScalars = 8;
inline constexpr int32_t kMaxExtraTensors = 8;
inline constexpr int32_t kMaxExtraRank = 4;

/// An array of the caller's. Every extent is at least 1; strides are in elements.
struct ExtraArray {
  const void* data = nullptr;
  int32_t size[kMaxExtraRank] = {};
  int64_t stride[kMaxExtraRank] = {};
};

/// Plain data: 512 bytes.
struct Extras {
  uint32_t scalar[kMaxExtraScalars] = {};  ///< bits of a float or an int32_t
  ExtraArray tensor[kMaxExtraTensors] = {};

  template <class T>
  FLASHBSR_FN T number(int32_t i) const {
    static_assert(sizeof(T) == 4, "a scalar extra is a float or an int32_t");
    return __builtin_bit_cast(T, scalar[i]);
  }
};
static_assert(sizeof(Extras) <= 700, "kernels take it by value");

/// Storage types without arithmetic of their own, for ExtraTensor<Half, rank>.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

namespace detail {
/// What an element is computed with: float, int32_t or bool.
FLASHBSR_FN float element_value(float x) { return x; }
FLASHBSR_FN float element_value(Half x) { return f16_to_float(x.bits); }
FLASHBSR_FN float element_value(BFloat16 x) { return bf16_to_float(x.bits); }
FLASHBSR_FN int32_t element_value(int32_t x) { return x; }
FLASHBSR_FN int32_t element_value(int64_t x) { return static_cast<int32_t>(x); }
FLASHBSR_FN int32_t element_value(uint8_t x) { return x; }
FLASHBSR_FN bool element_value(bool x) { return x; }
}  // namespace detail

/// An extra tensor with its element type and rank. Indices are clamped to the extents: kernels
/// compute whole vectors and tiles of logits, of which the last ones may lie behind the request's
/// end, and what they look up there is dropped but must be memory of the caller's.
template <class T, int kRank>
class ExtraTensor {
  static_assert(kRank >= 1 && kRank <= kMaxExtraRank);

 public:
  using Element = T;
  using Value = decltype(detail::element_value(T{}));
  static constexpr int kDims = kRank;

  ExtraTensor() = default;
  FLASHBSR_FN explicit ExtraTensor(const ExtraArray& array) : array_(array) {}

  FLASHBSR_FN int32_t size(int dim) const { return array_.size[dim]; }
  FLASHBSR_FN int64_t stride(int dim) const { return array_.stride[dim]; }
  FLASHBSR_FN const T* data() const { return static_cast<const T*>(array_.data); }

  /// Elements from the first one to that at `i` of dimension `dim`.
  FLASHBSR_FN int64_t step(int dim, int32_t i) const {
    return min_of(max_of(i, 0), array_.size[dim] - 1) * array_.stride[dim];
  }

  template <class... I>
  FLASHBSR_FN Value operator()(I... index) const {
    return detail::element_value(stored(index...));
  }

  /// The element as it is in memory.
  template <class... I>
  FLASHBSR_FN T stored(I... index) const {
    static_assert(sizeof...(I) == kRank, "one index for each dimension");
    int dim = 0;
    int64_t offset = 0;
    ((offset += step(dim++, static_cast<int32_t>(index))), ...);
    return data()[offset];
  }

 private:
  ExtraArray array_;
};

}  // namespace flashbsr
