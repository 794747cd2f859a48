// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rotary frequencies (Su et al., RoFormer, 2021, section 3.4.2) and the Llama-3.1 smoothing of
// them. Host code: the angles are worked out once in double and reach the kernels as tables.
#pragma once

#include <cmath>
#include <vector>

#include <flashbsr/core/params.h>

namespace flashbsr {

struct RopeFrequencies {
  double theta = 1e4;
  double scale = 1.0;  ///< divides every frequency, or the long wavelengths only with Llama-3.1
  bool llama31 = false;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double old_context_len = 8192;
  std::vector<double> given;  ///< radians per position of each pair, in place of all that

  /// Radians per position of pair i of a head of `dim` rotary dims.
  double operator()(int i, int dim) const {
    if (!given.empty()) return given[static_cast<size_t>(i)];
    const double f = std::pow(theta, -2.0 * i / dim);
    if (!llama31) return f / scale;
    // Wavelengths below the high bound stay, beyond the low bound they stretch, between they blend
    // (Llama 3.1 reference code, apply_scaling).
    const double turns = old_context_len * f / (2.0 * M_PI);
    if (turns > high_freq_factor) return f;
    if (turns < low_freq_factor) return f / scale;
    const double smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    return (1.0 - smooth) * f / scale + smooth * f;
  }
};

/// RoPE inside attention, as a caller asks for it.
struct RopeOptions {
  RopeFrequencies frequencies;
  int32_t rotary_dim = 0;      ///< the first dims of a head, an even number of them
  bool interleave = false;     ///< pairs are dims (2 i, 2 i + 1), not (i, i + rotary_dim / 2)
  double magnitude = 1.0;      ///< of what is rotated, q and k each (YaRN's attention factor)
  int64_t max_positions = -1;  ///< that the caller's own table has; -1: any
};

/// Owns the tables that RopeTables points to; extends them as sequences grow.
class RopeTableStorage {
 public:
  /// Tables for heads of `dim` that cover positions [0, positions).
  RopeTables tables(const RopeOptions& rope, int dim, int64_t positions) {
    const int64_t rows = positions / RopeTables::kFine + 1;
    if (fine_.empty()) {
      for (int i = 0; i < rope.rotary_dim / 2; ++i) {
        frequencies_.push_back(rope.frequencies(i, rope.rotary_dim));
      }
      // The magnitude is the coarse table's alone: kernels also step by what the fine one says.
      for (int64_t p = 0; p < RopeTables::kFine; ++p) append(fine_, dim, rope.interleave, p, 1.0);
    }
    for (; coarse_rows_ < rows; ++coarse_rows_) {
      append(coarse_, dim, rope.interleave, coarse_rows_ * RopeTables::kFine, rope.magnitude);
    }
    return {coarse_.data(), fine_.data(), rope.interleave ? dim / 2 : rope.rotary_dim / 2,
            rope.interleave};
  }

 private:
  void append(std::vector<float>& out, int dim, bool interleave, int64_t position,
              double magnitude) const {
    const size_t begin = out.size(), columns = static_cast<size_t>(dim) / 2;
    out.resize(begin + 2 * columns);
    for (size_t c = 0; c < columns; ++c) {
      const size_t pair = !interleave ? c : c % 2 == 0 ? c / 2 : (c - 1 + columns) / 2;
      const bool turns = pair < frequencies_.size();
      const double angle = turns ? static_cast<double>(position) * frequencies_[pair] : 0.0;
      const double size = turns ? magnitude : 1.0;
      out[begin + c] = static_cast<float>(size * std::cos(angle));
      out[begin + columns + c] = static_cast<float>(size * std::sin(angle));
    }
  }

  std::vector<double> frequencies_;
  std::vector<float> fine_;
  std::vector<float> coarse_;
  int64_t coarse_rows_ = 0;
};

}  // namespace flashbsr
