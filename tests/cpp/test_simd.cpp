// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The vector code of one SIMD level against scalar code. Compiled once per level.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <flashbsr/cpu/blocks.h>
#include <flashbsr/cpu/convert.h>
#include <flashbsr/cpu/math.h>
#include <flashbsr/cpu/transpose.h>

#include "random_integers.h"

namespace flashbsr::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Same bits, or both NaN: the payload of a NaN is nobody's promise.
void expect_same(float actual, float expected, const std::string& what) {
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(actual)) << what;
  } else {
    ASSERT_EQ(float_bits(actual), float_bits(expected)) << what;
  }
}

template <DType T, class Code>
void expect_loads_every_pattern() {
  const uint32_t count = 1u << (8 * sizeof(Code));
  std::vector<Code> codes(count);
  for (uint32_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(i);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const FloatV v = load_as<T>(codes.data() + i);
    for (int lane = 0; lane < kLanes; ++lane) {
      expect_same(v[lane], load_as_float(codes.data(), i + lane, T),
                  std::string(dtype_name(T)) + " code " + std::to_string(i + lane));
    }
  }
}

TEST(Convert, LoadsEveryPatternOfEveryType) {
  expect_loads_every_pattern<DType::kF16, uint16_t>();
  expect_loads_every_pattern<DType::kBF16, uint16_t>();
  expect_loads_every_pattern<DType::kE4M3, uint8_t>();
  expect_loads_every_pattern<DType::kE5M2, uint8_t>();
  expect_loads_every_pattern<DType::kI8, uint8_t>();
}

// Every 16-bit value, every midpoint between two of them, and the float neighbours of both.
template <DType T>
std::vector<float> rounding_cases() {
  std::vector<float> cases;
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const uint16_t pair[2] = {static_cast<uint16_t>(code), static_cast<uint16_t>(code + 1)};
    const float x = load_as_float(pair, 0, T), y = load_as_float(pair, 1, T);
    const float middle = std::isfinite(x) && std::isfinite(y) ? x / 2 + y / 2 : x;
    for (float v : {x, middle}) {
      cases.insert(cases.end(), {v, std::nextafter(v, -kInf), std::nextafter(v, kInf)});
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 100000; ++i) cases.push_back(bits_float(random()));
  cases.resize(round_up<size_t>(cases.size(), kLanes), 0.0f);
  return cases;
}

template <DType T>
void expect_stores_like_scalar() {
  const std::vector<float> cases = rounding_cases<T>();
  uint16_t actual[kLanes], expected;
  for (size_t i = 0; i < cases.size(); i += kLanes) {
    store_as<T>(actual, load(cases.data() + i));
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = cases[i + lane];
      store_from_float(&expected, 0, T, x);
#if defined(__AVX512BF16__)
      // vcvtneps2bf16 takes float denormals (below 1.2e-38) as zeros, whatever the FPU mode.
      if (T == DType::kBF16 && std::fpclassify(x) == FP_SUBNORMAL) {
        ASSERT_EQ(actual[lane] & 0x7fff, 0) << x;
        continue;
      }
#endif
      expect_same(load_as_float(actual, lane, T), load_as_float(&expected, 0, T),
                  std::string(dtype_name(T)) + " of bits " + std::to_string(float_bits(x)));
    }
  }
}

TEST(Convert, StoresRoundToNearestEven) {
  expect_stores_like_scalar<DType::kF16>();
  expect_stores_like_scalar<DType::kBF16>();
}

template <DType T>
void expect_rows_of_any_length() {
  for (int n = 0; n <= 3 * kLanes + 1; ++n) {
    std::vector<float> source(n), back(n + 1, 77.0f);
    for (int i = 0; i < n; ++i) source[i] = static_cast<float>(i % 8) - 3.5f;  // exact in all types
    std::vector<char> row(static_cast<size_t>(n + 1) * dtype_size(T), 0x55);
    row_from_float<T>(source.data(), row.data(), n);
    for (int i = 0; i < dtype_size(T); ++i) EXPECT_EQ(row[n * dtype_size(T) + i], 0x55);
    row_to_float<T>(row.data(), back.data(), n);
    for (int i = 0; i < n; ++i) EXPECT_EQ(back[i], source[i]);
    EXPECT_EQ(back[n], 77.0f);
  }
}

TEST(Convert, RowsOfAnyLengthTouchNothingElse) {
  expect_rows_of_any_length<DType::kF32>();
  expect_rows_of_any_length<DType::kF16>();
  expect_rows_of_any_length<DType::kBF16>();
}

template <class F, class G>
double worst_error(float low, float high, bool relative, F function, G exact) {
  double worst = 0;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(low, high);
  for (int i = 0; i < 200000; ++i) {
    const float x = uniform(random);
    const double expected = exact(static_cast<double>(x));
    const double error = std::fabs(static_cast<double>(function(splat(x))[0]) - expected);
    worst = std::max(worst, relative ? error / std::fabs(expected) : error);
  }
  return worst;
}

TEST(Math, ExponentialsKeepTheirPromisedError) {
  const auto exact = [](double x) { return std::exp2(x); };
  EXPECT_LT(worst_error(-126, 127, true, [](FloatV x) { return exp2_clamped(x); }, exact), 2e-7);
  EXPECT_LT(
      worst_error(
          -80, 80, true, [](FloatV x) { return exp(x); }, [](double x) { return std::exp(x); }),
      1e-5);
  EXPECT_LT(
      worst_error(
          -12, 12, false, [](FloatV x) { return tanh(x); }, [](double x) { return std::tanh(x); }),
      5e-7);
  EXPECT_LT(worst_error(
                -90, 90, false, [](FloatV x) { return sigmoid(x); },
                [](double x) { return 1 / (1 + std::exp(-x)); }),
            5e-7);
}

TEST(Math, ExponentialAtTheEdges) {
  EXPECT_EQ(exp2_clamped(splat(0.0f))[0], 1.0f);
  for (float x : {-127.0f, -1000.0f, -3e38f, -kInf}) {
    EXPECT_EQ(float_bits(exp2_clamped(splat(x))[0]), 0u) << x;
  }
  // NaN of any payload: signalling, quiet, negative.
  for (uint32_t nan : {0x7fc00000u, 0x7fc00001u, 0x7fffffffu, 0xffc00000u, 0x7f800001u}) {
    EXPECT_TRUE(std::isnan(exp2_clamped(splat(bits_float(nan)))[0])) << std::hex << nan;
  }
}

TEST(Math, NanInNanOut) {
  const FloatV nan = splat(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(exp(nan)[0]));
  EXPECT_TRUE(std::isnan(tanh(nan)[0]));
  EXPECT_TRUE(std::isnan(sigmoid(nan)[0]));
}

TEST(Math, SaturatesAtInfinity) {
  EXPECT_NEAR(tanh(splat(kInf))[0], 1.0f, 1e-6f);
  EXPECT_NEAR(tanh(splat(-kInf))[0], -1.0f, 1e-6f);
  EXPECT_EQ(sigmoid(splat(kInf))[0], 1.0f);
  EXPECT_LT(sigmoid(splat(-kInf))[0], 1e-37f);
}

TEST(Math, TestBitsReadsNoByteBeyondItsRange) {
  std::mt19937 random(9);
  for (int count = 1; count <= kLanes; ++count) {
    for (int first = 0; first < 40; ++first) {
      const int bytes = (first + count + 7) / 8;
      // Exactly the bytes needed: AddressSanitizer watches the end.
      std::vector<uint8_t> bits(bytes);
      for (uint8_t& b : bits) b = static_cast<uint8_t>(random());
      const IntV actual = VectorMath::test_bits(bits.data(), first, count);
      for (int i = 0; i < count; ++i) {
        const int bit = first + i;
        EXPECT_EQ(actual[i], bits[bit / 8] >> (bit % 8) & 1 ? -1 : 0);
      }
    }
  }
}

TEST(Math, TestBitsOfKeptLanesAreNotRead) {
  std::mt19937 random(9);
  for (int count = 1; count <= kLanes; ++count) {
    for (int kept = 0; kept < count; ++kept) {
      for (int begin = 0; begin < 9; ++begin) {
        // The string begins at bit 0: bits of kept lanes may lie before it.
        std::vector<uint8_t> bits((begin + count - kept + 7) / 8);
        for (uint8_t& b : bits) b = static_cast<uint8_t>(random());
        const IntV actual = VectorMath::test_bits(bits.data(), begin - kept, count, kept);
        for (int i = 0; i < count; ++i) {
          const int bit = begin - kept + i;
          EXPECT_EQ(actual[i], i < kept || bits[bit / 8] >> (bit % 8) & 1 ? -1 : 0);
        }
      }
    }
  }
}

TEST(Simd, ReductionsSeeEveryLane) {
  for (int lane = 0; lane < kLanes; ++lane) {
    FloatV v = splat(-2.0f);
    v[lane] = 5.0f;
    EXPECT_EQ(reduce_max(v), 5.0f);
    EXPECT_EQ(reduce_add(v), 5.0f - 2.0f * (kLanes - 1));
  }
}

TEST(Simd, FourReductionsAtOnce) {
  FloatV v[4];
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kLanes; ++lane)
      v[i][lane] = static_cast<float>((1 << i) * (lane + 1));
  }
  const FloatV4 sums = reduce_add4(v[0], v[1], v[2], v[3]);
  const float one = static_cast<float>(kLanes * (kLanes + 1) / 2);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(sums[i], static_cast<float>(1 << i) * one);
}

TEST(Simd, InterleavedPairs) {
  std::vector<uint16_t> a(2 * kLanes), b(2 * kLanes);
  for (int i = 0; i < 2 * kLanes; ++i) {
    a[i] = static_cast<uint16_t>(i);
    b[i] = static_cast<uint16_t>(1000 + i);
  }
  FloatV words[2];
  interleave16(reinterpret_cast<const char*>(a.data()), reinterpret_cast<const char*>(b.data()),
               words[0], words[1]);
  for (int i = 0; i < 2 * kLanes; ++i) {
    EXPECT_EQ(bits(words[i / kLanes])[i % kLanes], a[i] | uint32_t{b[i]} << 16);
  }
}

TEST(Simd, MaximumKeepsANanInTheSecondOperand) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(max(splat(1.0f), splat(nan))[0]));
  EXPECT_TRUE(std::isnan(min(splat(1.0f), splat(nan))[0]));
}

TEST(Transpose, SquareOfWords) {
  std::vector<float> in(kLanes * 40), out(kLanes * 24, -1.0f);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  const char* rows[kLanes];
  for (int j = 0; j < kLanes; ++j) rows[j] = reinterpret_cast<const char*>(in.data() + j * 40);
  transpose_words(rows, 3, out.data(), 24);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) EXPECT_EQ(out[i * 24 + j], in[j * 40 + 3 + i]);
  }
}

// Small integers as elements of another type, in rows.
template <DType T>
struct Rows {
  std::vector<char> memory;
  std::vector<const char*> rows;

  Rows(const std::vector<float>& from, int count, int64_t step)
      : memory(from.size() * dtype_size(T)) {
    for (size_t i = 0; i < from.size(); ++i) {
      store_from_float(memory.data(), static_cast<int64_t>(i), T, from[i]);
    }
    for (int i = 0; i < count; ++i) rows.push_back(memory.data() + i * step * dtype_size(T));
  }
};

template <class F>
void for_each_row_type(const F& f) {
  for (DType t : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8}) with_row_type<F32Op>(t, f);
}

// C (+)= A B for B packed, and for B as rows somewhere in memory, starting at an offset.
void expect_gemm(int rows, int vecs, int k, bool accumulate) {
  const int cols = vecs * kLanes, lda = k + 3, ldb = cols + kLanes, ldc = cols + 1, offset = 5;
  const std::vector<float> a = random_integers(rows * lda, 1);
  const std::vector<float> b = random_integers(k * ldb + offset, 2);
  const std::vector<float> start = random_integers(rows * ldc, 3);
  std::vector<const char*> rows_of_b;
  for (int l = 0; l < k; ++l) rows_of_b.push_back(reinterpret_cast<const char*>(&b[l * ldb]));

  const auto run = [&](auto operand, int shift) {
    std::vector<float> expected = start, actual = start;
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < cols; ++j) {
        float sum = accumulate ? start[i * ldc + j] : 0;
        for (int l = 0; l < k; ++l) sum += a[i * lda + l] * b[l * ldb + j + shift];
        expected[i * ldc + j] = sum;
      }
    }
    using B = decltype(operand);
    const auto blocks = accumulate ? gemm_blocks<F32Op, true, B>() : gemm_blocks<F32Op, false, B>();
    blocks.run({a.data(), lda, operand, actual.data(), ldc, k}, rows, vecs);
    ASSERT_EQ(actual, expected) << rows << " rows, " << vecs << " vectors, k = " << k;
  };
  run(PackedB<F32Op>{b.data(), ldb}, 0);
  run(RowsB<F32Op>{{rows_of_b.data(), nullptr}, offset}, offset);
  for_each_row_type([&]<DType T>() {
    const Rows<T> elements(b, k, ldb);
    run(RowsB<F32Op, T>{{elements.rows.data(), nullptr}, offset}, offset);
  });
}

TEST(Gemm, EveryBlockShape) {
  for (int rows = 1; rows <= kBlockRows; ++rows) {
    for (int vecs = 1; vecs <= 2 * kBlockVecs + 1; ++vecs) {
      for (int k : {1, 2, 7, 33}) {
        expect_gemm(rows, vecs, k, false);
        expect_gemm(rows, vecs, k, true);
      }
    }
  }
}

#if defined(__AVX512BF16__)
TEST(Gemm, PairsOfBf16InPlaceAndPacked) {
  // A word of A is a pair along k; B has its rows in place, or interleaved.
  constexpr int kRows = 5, kWords = 6, kVecs = 6, kCols = kVecs * kLanes;
  const std::vector<float> a = random_integers(kRows * 2 * kWords, 4);
  const std::vector<float> b = random_integers(2 * kWords * kCols, 5);
  const auto narrow = [](const std::vector<float>& from) {
    std::vector<uint16_t> to;
    for (float x : from) to.push_back(float_to_bf16(x));
    return to;
  };
  const std::vector<uint16_t> a16 = narrow(a), b16 = narrow(b);
  std::vector<const char*> rows;
  for (int l = 0; l < 2 * kWords; ++l)
    rows.push_back(reinterpret_cast<const char*>(&b16[l * kCols]));
  std::vector<float> expected(kRows * kCols), actual(kRows * kCols);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCols; ++j) {
      for (int l = 0; l < 2 * kWords; ++l) {
        expected[i * kCols + j] += a[i * 2 * kWords + l] * b[l * kCols + j];
      }
    }
  }
  std::vector<float> words(kRows * kWords), packed(kWords * kCols);
  std::memcpy(words.data(), a16.data(), words.size() * 4);
  for (int w = 0; w < kWords; ++w) {
    for (int j = 0; j < kCols; ++j) {
      packed[w * kCols + j] =
          bits_float(b16[2 * w * kCols + j] | uint32_t{b16[(2 * w + 1) * kCols + j]} << 16);
    }
  }
  const auto run = [&](auto operand) {
    gemm_blocks<Bf16Op, false, decltype(operand)>().run(
        {words.data(), kWords, operand, actual.data(), kCols, kWords}, kRows, kVecs);
    ASSERT_EQ(actual, expected);
  };
  run(PackedB<Bf16Op>{packed.data(), kCols});
  run(RowsB<Bf16Op>{{rows.data(), nullptr}, 0});
}
#endif

template <DType T>
void expect_dots(int begin, int count) {
  constexpr int kWords = 3 * kLanes, kTokens = 2 * kDotTokens, kStride = kTokens + 4;
  const std::vector<float> keys = random_integers(kTokens * kWords, 7);
  const std::vector<float> q = random_integers(count * kWords, 8);
  const Rows<T> elements(keys, kTokens, kWords);
  std::vector<float> s(count * kStride, 99.0f);
  kBlocks<F32Op>.template in_place<T>().dot[count - 1](
      q.data(), kWords, {elements.rows.data(), nullptr}, kTokens, begin, kWords, s.data(), kStride);
  for (int r = 0; r < count; ++r) {
    for (int t = 0; t < kStride; ++t) {
      float expected = t < kTokens ? 0.0f : 99.0f;
      for (int w = begin; t < kTokens && w < kWords; ++w) {
        expected += q[r * kWords + w] * keys[t * kWords + w];
      }
      ASSERT_EQ(s[r * kStride + t], expected) << count << " rows, row " << r << " token " << t;
    }
  }
}

TEST(Dot, EveryRowCountOverSomeWords) {
  for_each_row_type([]<DType T>() {
    for (const int begin : {0, kLanes}) {
      for (int count = 1; count <= kBlockRows; ++count) expect_dots<T>(begin, count);
    }
  });
}

}  // namespace
}  // namespace flashbsr::cpu
