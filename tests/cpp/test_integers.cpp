// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Products with int8 and int4 codes as integers against double, on emulated tiles of Intel's.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "emulated_tiles.h"

#include <flashbsr/cpu/attend.h>

namespace flashbsr::cpu {
namespace {

struct Shape {
  DType type;
  int dim, groups, count, rows;
  bool scattered;  ///< rows of K are not at one distance
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << dtype_name(s.type) << " dim " << s.dim << " groups " << s.groups << " tokens "
             << s.count << " rows " << s.rows << (s.scattered ? " scattered" : "");
}

std::vector<Shape> shapes() {
  std::vector<Shape> found;
  for (const int rows : {1, 3, 4, 5, 8, 16}) {
    for (const int count : {1, 5, 16, 17, 33, 64, 100, 128}) {
      found.push_back({DType::kI8, 128, 1, count, rows, false});
      found.push_back({DType::kI8, 64, 1, count, rows, true});
      found.push_back({DType::kI8, 576, 1, count, rows, false});
      found.push_back({DType::kI4, 128, 2, count, rows, false});
      found.push_back({DType::kI4, 256, 1, count, rows, true});
    }
  }
  return found;
}

class Integers : public testing::TestWithParam<Shape> {
 protected:
  Integers() {
    for (auto& code : codes_) code = static_cast<char>(random_());
    for (int i = 0; i < kKvTile; ++i) {
      const int row = s_.scattered ? i * 37 % kKvTile : i;
      rows_[i] = codes_.data() + row * row_bytes(s_.type, s_.dim);
      scale_rows_[i] = reinterpret_cast<const char*>(&packed_[static_cast<size_t>(i * s_.groups)]);
      for (int g = 0; g < s_.groups; ++g) {
        const uint32_t zero = is_int4() ? random_() % 16 : 0;
        const float scale = number(1.0f) + 1.5f;
        const uint32_t kept = is_int4() ? float_bits(scale) & ~15u : float_bits(scale);
        packed_[static_cast<size_t>(i * s_.groups + g)] = bits_float(kept | zero);
        // What is beyond the tokens has no scale, as the loader leaves it.
        folded_[static_cast<size_t>(g * kKvTile + i)] = i < s_.count ? bits_float(kept) : 0.0f;
      }
    }
  }

  bool is_int4() const { return s_.type == DType::kI4; }
  float number(float size) {
    return (static_cast<float>(random_() % 2001) - 1000.0f) * (size / 1000.0f);
  }

  int code(int token, int d) const {
    if (!is_int4()) return static_cast<int8_t>(rows_[token][d]);
    const float packed = packed_[size_t(token * s_.groups + d / (s_.dim / s_.groups))];
    return static_cast<int>(packed_code(rows_[token], d)) - int4_zero(packed);
  }
  double scale(int token, int d) const {
    return folded_[size_t(d / (s_.dim / s_.groups) * kKvTile + token)];
  }

  template <DType T>
  void expect_exact() {
    const PagedView x{.dtype = T, .dim = s_.dim};
    PagedView scales{.dtype = DType::kF32, .dim = s_.groups};
    scales.data = reinterpret_cast<char*>(packed_.data());
    const Operand operand{x, scales, rows_, scale_rows_, false};
    std::vector<char> block(static_cast<size_t>(IntegerMemory(nullptr, s_.rows, s_.dim).bytes) +
                            64);
    const IntegerMemory memory(aligned(block), s_.rows, s_.dim);
    std::vector<float> q(static_cast<size_t>(s_.rows * s_.dim));
    for (auto& element : q) element = number(2.0f);
    for (int r = 0; r < s_.rows; ++r)
      split_query(&q[size_t(r * s_.dim)], s_.dim, r, s_.rows, memory);

    std::vector<float> s(static_cast<size_t>(s_.rows * kKvTile), 1e30f);
    score_integers<T>(operand, s_.count, folded_.data(), kKvTile, s_.rows, memory, s.data(),
                      kKvTile);
    for (int r = 0; r < s_.rows; ++r) {
      for (int t = 0; t < s_.count; ++t) {
        double exact = 0, size = 0;
        for (int d = 0; d < s_.dim; ++d) {
          const double term = q[size_t(r * s_.dim + d)] * scale(t, d) * code(t, d);
          exact += term;
          size += std::fabs(term);
        }
        ASSERT_NEAR(s[size_t(r * kKvTile + t)], exact, 1e-6 * size)
            << "row " << r << " token " << t;
      }
    }

    expect_exact_values<T>(operand, memory, s);
  }

  template <DType T>
  void expect_exact_values(const Operand& operand, const IntegerMemory& memory,
                           std::vector<float>& s) {
    for (int i = 0; i < s_.rows * kKvTile; ++i) {
      s[size_t(i)] = i % kKvTile < s_.count ? std::exp(number(8.0f)) : 0.0f;
    }
    std::vector<char> v(static_cast<size_t>(round_up(s_.dim, 64) * kKvTile) + 64);
    int8_t* interleaved = reinterpret_cast<int8_t*>(aligned(v));
    std::vector<float> o(static_cast<size_t>(s_.rows * s_.dim), 1.0f);
    interleave_values<T>(operand, s_.count, interleaved);
    accumulate_integers<T>(operand, s_.count, s.data(), kKvTile, folded_.data(), kKvTile, s_.rows,
                           interleaved, memory, o.data(), s_.dim);
    for (int r = 0; r < s_.rows; ++r) {
      for (int d = 0; d < s_.dim; ++d) {
        double exact = 1, size = 1, largest = 0, codes = 0;
        for (int t = 0; t < s_.count; ++t) {
          const double weight = s[size_t(r * kKvTile + t)] * scale(t, d);
          exact += weight * code(t, d);
          size += std::fabs(weight * code(t, d));
          largest = std::max(largest, weight);
          codes += std::abs(code(t, d));
        }
        // Weights are integers of 31 bits of the largest.
        const double bound = 1e-6 * size + largest * codes * 0x1p-31;
        ASSERT_NEAR(o[size_t(r * s_.dim + d)], exact, bound) << "row " << r << " dim " << d;
      }
    }
  }

  static char* aligned(std::vector<char>& block) {
    const auto at = reinterpret_cast<uintptr_t>(block.data());
    return block.data() + (64 - at % 64) % 64;
  }

  const Shape s_ = GetParam();
  std::mt19937 random_{7};
  std::vector<char> codes_ = std::vector<char>(size_t(kKvTile * row_bytes(s_.type, s_.dim)));
  std::vector<float> packed_ = std::vector<float>(size_t(kKvTile * s_.groups));
  std::vector<float> folded_ = std::vector<float>(size_t(kKvTile * s_.groups));
  const char* rows_[kKvTile];
  const char* scale_rows_[kKvTile];
};

TEST_P(Integers, AreExact) {
  if (GetParam().type == DType::kI8) {
    expect_exact<DType::kI8>();
  } else {
    expect_exact<DType::kI4>();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Integers, testing::ValuesIn(shapes()));

}  // namespace
}  // namespace flashbsr::cpu
