// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a serving loop does around attention, on the CPU: append to a paged cache, rotate q and k,
// merge states that were computed apart. Host code, called through views.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include <flashbsr/core/params.h>
#include <flashbsr/core/state.h>
#include <flashbsr/cpu/quantize.h>
#include <flashbsr/plan/layout.h>
#include <flashbsr/variant/rope.h>

namespace flashbsr::cpu {

inline constexpr int kMaxMergeDim = 1024;
inline constexpr int kMaxQuantDim = 576;

/// Writes src[token] * scale into its slot; equal types without a scale are copied bit for bit.
/// Where `scales` has data, as codes with scales of their own.
inline void store_token(const RaggedView& src, int64_t token, const PagedView& cache,
                        const PagedView& scales, int64_t page, int64_t slot, float inverse_scale) {
  float row[kMaxQuantDim];
  for (int32_t h = 0; h < src.heads; ++h) {
    const char* in = src.row(token, h);
    char* out = cache.row(page, slot, h);
    if (scales.data) {
      for (int32_t d = 0; d < src.dim; ++d)
        row[d] = load_as_float(in, d, src.dtype) * inverse_scale;
      quantize_row(row, src.dim, cache.dtype, out, scales, scales.row(page, slot, h));
      continue;
    }
    if (src.dtype == cache.dtype && inverse_scale == 1.0f) {
      std::memcpy(out, in, static_cast<size_t>(src.dim) * dtype_size(src.dtype));
      continue;
    }
    for (int32_t d = 0; d < src.dim; ++d) {
      store_from_float(out, d, cache.dtype, load_as_float(in, d, src.dtype) * inverse_scale);
    }
  }
}

/// Where token `position` of request `b` lives. The caller has checked the range.
struct Slot {
  int64_t page;
  int64_t offset;
};

inline Slot find_slot(const IndexView& kv_indices, const IndexView& kv_indptr, int32_t page_size,
                      int64_t b, int64_t position) {
  return {kv_indices[kv_indptr[b] + position / page_size], position % page_size};
}

/// Angle of every (position, pair) is worked out once per token, in double.
class TokenRotation {
 public:
  TokenRotation(const RopeFrequencies& frequencies, int rotary_dim) : dim_(rotary_dim) {
    for (int i = 0; i < dim_ / 2; ++i) frequency_.push_back(frequencies(i, dim_));
    cos_.resize(frequency_.size());
    sin_.resize(frequency_.size());
  }

  void move_to(int64_t position) {
    for (size_t i = 0; i < frequency_.size(); ++i) {
      const double angle = static_cast<double>(position) * frequency_[i];
      cos_[i] = static_cast<float>(std::cos(angle));
      sin_[i] = static_cast<float>(std::sin(angle));
    }
  }

  const float* cosines() const { return cos_.data(); }
  const float* sines() const { return sin_.data(); }

 private:
  int dim_;
  std::vector<double> frequency_;
  std::vector<float> cos_, sin_;
};

/// Copies elements [begin, dim) of a row times `scale`; equal types without one bit for bit.
inline void move_elements(const char* src, DType from, char* dst, DType to, int32_t begin,
                          int32_t dim, float scale) {
  if (from == to && scale == 1.0f) {
    const size_t size = static_cast<size_t>(dtype_size(from)), at = static_cast<size_t>(begin);
    std::memmove(dst + at * size, src + at * size, static_cast<size_t>(dim - begin) * size);
    return;
  }
  for (int32_t d = begin; d < dim; ++d) {
    store_from_float(dst, d, to, load_as_float(src, d, from) * scale);
  }
}

/// Rotates the first `rotary_dim` elements of every head of a token and copies the rest, all times
/// `scale`. NeoX: element i pairs with i + rotary_dim / 2. Interleaved: 2 i with 2 i + 1. `in` may
/// be `out`.
inline void rotate_token(const RaggedView& in, const RaggedView& out, int64_t token, int rotary_dim,
                         bool interleave, const float* cosines, const float* sines, float scale) {
  const int half = rotary_dim / 2;
  for (int32_t h = 0; h < in.heads; ++h) {
    const char* src = in.row(token, h);
    char* dst = out.row(token, h);
    for (int i = 0; i < half; ++i) {
      const int first = interleave ? 2 * i : i, second = interleave ? 2 * i + 1 : i + half;
      const float x = load_as_float(src, first, in.dtype);
      const float y = load_as_float(src, second, in.dtype);
      store_from_float(dst, first, out.dtype, (x * cosines[i] - y * sines[i]) * scale);
      store_from_float(dst, second, out.dtype, (y * cosines[i] + x * sines[i]) * scale);
    }
    move_elements(src, in.dtype, dst, out.dtype, rotary_dim, in.dim, scale);
  }
}

/// The state of one row merged from `count` others, accumulated in float in the order given.
/// `unit` is ln 2 for natural LSEs, 1 for base 2. `out` may be one of `rows`. Returns the merged
/// LSE.
inline float merge_row(const char* const* rows, const float* lses, int count, char* out, DType t,
                       int dim, float unit) {
  float top = -infinity(), sum = 0;
  for (int i = 0; i < count; ++i) top = max_of(lses[i], top);
  const auto weight = [&](int i) {
    return lses[i] == -infinity() ? 0.0f : std::exp2((lses[i] - top) / unit);
  };
  for (int i = 0; i < count; ++i) sum += weight(i);
  float acc[kMaxMergeDim] = {};
  for (int i = 0; i < count; ++i) {
    const float w = weight(i);
    // A state of weight 0 is skipped, not multiplied: where its LSE is -inf its O may be anything.
    if (w == 0) continue;
    for (int d = 0; d < dim; ++d) acc[d] += w * load_as_float(rows[i], d, t);
  }
  const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
  for (int d = 0; d < dim; ++d) store_from_float(out, d, t, acc[d] * inverse);
  return sum == 0 ? -infinity() : top + std::log2(sum) * unit;
}

}  // namespace flashbsr::cpu
