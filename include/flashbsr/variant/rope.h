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

  /// Radians per position of pair i of a head of `dim` rotary dims.
  double operator()(int i, int dim) const {
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

/// Owns the tables that RopeTables points to; extends them as sequences grow.
class RopeTableStorage {
 public:
  /// Tables that cover positions [0, positions).
  RopeTables tables(const RopeFrequencies& frequencies, int dim, int64_t positions) {
    const int64_t rows = positions / RopeTables::kFine + 1;
    if (fine_.empty()) {
      for (int64_t p = 0; p < RopeTables::kFine; ++p) append(fine_, frequencies, dim, p);
    }
    for (; coarse_rows_ < rows; ++coarse_rows_) {
      append(coarse_, frequencies, dim, coarse_rows_ * RopeTables::kFine);
    }
    return {coarse_.data(), fine_.data()};
  }

 private:
  static void append(std::vector<float>& out, const RopeFrequencies& f, int dim, int64_t position) {
    for (int i = 0; i < dim / 2; ++i) {
      out.push_back(static_cast<float>(std::cos(static_cast<double>(position) * f(i, dim))));
    }
    for (int i = 0; i < dim / 2; ++i) {
      out.push_back(static_cast<float>(std::sin(static_cast<double>(position) * f(i, dim))));
    }
  }

  std::vector<float> fine_;
  std::vector<float> coarse_;
  int64_t coarse_rows_ = 0;
};

}  // namespace flashbsr
