// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Products in bf16 with rows of codes where they lie, against scalar code. Compiled once per level
// that has such products.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include <flashbsr/cpu/blocks.h>

#include "random_integers.h"

namespace flashbsr::cpu {
namespace {

// Rows of random codes; those of int4 have zero points, those of NVFP4 scales.
template <DType T>
struct Codes {
  std::vector<char> memory, scale_memory;
  std::vector<const char*> rows, scales;
  std::vector<uint16_t> lifts;
  int64_t bytes;

  Codes(int count, int dim) : scale_memory(count * dim / 16), bytes(row_bytes(T, dim)) {
    std::mt19937 random(9);
    memory.resize(count * bytes);
    for (char& byte : memory) byte = static_cast<char>(random());
    // From 2^-3 to 2^3 times 1 to 1.875, of either sign: sums stay exact.
    for (char& byte : scale_memory)
      byte = static_cast<char>((32 + random() % 48) | random() % 2 << 7);
    for (int i = 0; i < count; ++i) {
      rows.push_back(memory.data() + i * bytes);
      scales.push_back(scale_memory.data() + i * dim / 16);
      lifts.push_back(static_cast<uint16_t>(T == DType::kI4 ? 1 + random() % 16 : 16));
    }
    rows[0] = rows[count - 1];  // out of order
    scales[0] = scales[count - 1];
  }

  TokenRows in_place() const {
    return {rows.data(), T == DType::kI4 ? lifts.data() : nullptr, scales.data()};
  }
  float operator()(int row, int d) const {
    if (T == DType::kI8) return static_cast<signed char>(rows[row][d]);
    if (T == DType::kE2M1) {
      const float scale = e4m3_to_float(static_cast<uint8_t>(scales[row][d / 16]));
      return e2m1_to_float(packed_code(rows[row], d)) * scale;
    }
    return static_cast<float>(static_cast<int>(packed_code(rows[row], d)) + lifts[row] - 16);
  }
};

template <class F>
void for_each_code_type(const F& f) {
  f.template operator()<DType::kI8>();
  f.template operator()<DType::kI4>();
  f.template operator()<DType::kE2M1>();
}

TEST(Codes, HalvesOfEveryScale) {
  for (int i = 0; i < 256; ++i) {
    const uint8_t code = static_cast<uint8_t>(i);
    const float expected = 0.5f * e4m3_to_float(code);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(half_e4m3(code))) << i;
    } else {
      EXPECT_EQ(float_bits(half_e4m3(code)), float_bits(expected)) << i;
    }
  }
}

TEST(Gemm, CodesInPlace) {
  for_each_code_type([]<DType T>() {
    constexpr int kWords = 5, kCols = 8 * kLanes, kFirst = 2 * kLanes;
    const Codes<T> b(2 * kWords, kFirst + kCols);
    for (int rows = 1; rows <= kBlockRows; ++rows) {
      const std::vector<float> a = random_integers(rows * 2 * kWords, 4);
      std::vector<float> words(rows * kWords), expected(rows * kCols), actual(rows * kCols, 1.0f);
      row_from_float<DType::kBF16>(a.data(), reinterpret_cast<char*>(words.data()),
                                   rows * 2 * kWords);
      for (int i = 0; i < rows * kCols; ++i) {
        expected[i] = 1.0f;
        for (int l = 0; l < 2 * kWords; ++l) {
          expected[i] += a[i / kCols * 2 * kWords + l] * b(l, kFirst + i % kCols);
        }
      }
      gemm_blocks<Bf16Op, true, RowsB<Bf16Op, T>>().run(
          {words.data(), kWords, {b.in_place(), kFirst}, actual.data(), kCols, kWords}, rows,
          kCols / kLanes);
      if (is_packed(T)) unzip_columns(actual.data(), rows * kCols);
      ASSERT_EQ(actual, expected) << rows << " rows of " << dtype_name(T);
    }
  });
}

TEST(Dot, CodesInPlace) {
  for_each_code_type([]<DType T>() {
    constexpr int kDim = 6 * kLanes, kTokens = 2 * kDotTokens, kBegin = kLanes;
    const Codes<T> keys(kTokens, kDim);
    for (int rows = 1; rows <= kBlockRows; ++rows) {
      const std::vector<float> q = random_integers(rows * kDim, 8);
      std::vector<float> words(rows * kDim / 2), s(rows * kTokens);
      for (int r = 0; r < rows; ++r) {
        float* const to = &words[r * kDim / 2];
        if (T == DType::kI8) {
          swap_queries(&q[r * kDim], kDim, to);
        } else {
          row_from_float<DType::kBF16>(&q[r * kDim], reinterpret_cast<char*>(to), kDim);
        }
      }
      kBlocks<Bf16Op>.template in_place<T>().dot[rows - 1](
          words.data(), kDim / 2, keys.in_place(), kTokens, kBegin, kDim / 2, s.data(), kTokens);
      for (int i = 0; i < rows * kTokens; ++i) {
        float expected = 0;
        for (int d = 2 * kBegin; d < kDim; ++d) {
          expected += q[i / kTokens * kDim + d] * keys(i % kTokens, d);
        }
        ASSERT_EQ(s[i], expected) << dtype_name(T) << " row " << i / kTokens;
      }
    }
  });
}
}  // namespace
}  // namespace flashbsr::cpu
