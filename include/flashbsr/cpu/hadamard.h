// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The orthonormal Hadamard transform of a head. Host code.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace flashbsr::cpu {

/// A symmetric Hadamard matrix of D = order * 2^k rows, divided by sqrt(D): it is its own inverse.
///
/// The Kronecker product of one of `order` rows and Sylvester's of 2^k. That of order 12 or 20 is
/// Paley's of the primes 11 and 19 with rows and signs arranged to be symmetric: ones in the first
/// row and column, and at (i, j) of the rest whether i + j is a square modulo the prime, 1, or 0 or
/// none, -1.
class Hadamard {
 public:
  explicit Hadamard(int dim) : dim_(dim), order_(order_of(dim)) {
    if (order_ < 2) return;
    const int prime = order_ - 1;
    std::vector<bool> square(static_cast<size_t>(prime), false);
    for (int i = 1; i < prime; ++i) square[static_cast<size_t>(i * i % prime)] = true;
    signs_.assign(static_cast<size_t>(order_ * order_), 1.0f);
    for (int i = 0; i < prime; ++i) {
      for (int j = 0; j < prime; ++j) {
        if (square[static_cast<size_t>((i + j) % prime)]) continue;
        signs_[static_cast<size_t>((i + 1) * order_ + j + 1)] = -1.0f;
      }
    }
  }

  /// 1, 12 or 20; 0: there is none here of so many rows.
  static int order_of(int dim) {
    for (const int order : {1, 12, 20}) {
      const int rest = dim / order;
      if (dim > 0 && dim % order == 0 && (rest & (rest - 1)) == 0) return order;
    }
    return 0;
  }

  /// In place. `x` has D elements.
  void operator()(float* x) const {
    const int power = dim_ / order_;
    for (int half = 1; half < power; half *= 2) {
      for (int first = 0; first < dim_; first += 2 * half) {
        for (int i = first; i < first + half; ++i) {
          const float a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
      }
    }
    float column[kMaxOrder];
    for (int c = 0; order_ > 1 && c < power; ++c) {
      for (int i = 0; i < order_; ++i) {
        column[i] = 0;
        for (int j = 0; j < order_; ++j) {
          column[i] += signs_[static_cast<size_t>(i * order_ + j)] * x[j * power + c];
        }
      }
      for (int i = 0; i < order_; ++i) x[i * power + c] = column[i];
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
    for (int i = 0; i < dim_; ++i) x[i] *= scale;
  }

 private:
  static constexpr int kMaxOrder = 20;
  int dim_, order_;
  std::vector<float> signs_;
};

}  // namespace flashbsr::cpu
