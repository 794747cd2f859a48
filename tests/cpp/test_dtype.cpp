// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Element types against an independent reference: every 16-bit and 8-bit pattern is decoded by the
// definition of the format in double precision, and encoding is held to "the nearest of all values,
// ties to the even code" at every value, every midpoint and both float neighbours of it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include <flashbsr/core/dtype.h>

namespace flashbsr {
namespace {

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  bool finite;     // e4m3fn: no infinities, one NaN pattern per sign
  bool saturates;  // what the library promises for stores beyond the largest value
  std::function<float(uint32_t)> decode;
  std::function<uint32_t(float)> encode;

  int width() const { return 1 + exponent_bits + mantissa_bits; }
  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t largest() const { return finite ? sign_bit() - 2 : infinity() - 1; }

  // The definition: (-1)^s 2^(e - bias) 1.m, or 2^(1 - bias) 0.m where e is 0.
  double value(uint32_t code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double sign = code & sign_bit() ? -1 : 1;
    const int exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
    const uint32_t magnitude = code & (sign_bit() - 1);
    if (finite ? magnitude == sign_bit() - 1 : magnitude > infinity()) return std::nan("");
    if (!finite && magnitude == infinity()) return sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
};

const Format kFormats[] = {
    {"float16", 5, 10, false, false,
     [](uint32_t h) { return f16_to_float(static_cast<uint16_t>(h)); },
     [](float x) -> uint32_t { return float_to_f16(x); }},
    {"bfloat16", 8, 7, false, false,
     [](uint32_t h) { return bf16_to_float(static_cast<uint16_t>(h)); },
     [](float x) -> uint32_t { return float_to_bf16(x); }},
    {"float8_e4m3fn", 4, 3, true, true,
     [](uint32_t h) { return e4m3_to_float(static_cast<uint8_t>(h)); },
     [](float x) -> uint32_t { return float_to_e4m3(x); }},
    {"float8_e5m2", 5, 2, false, true,
     [](uint32_t h) { return e5m2_to_float(static_cast<uint8_t>(h)); },
     [](float x) -> uint32_t { return float_to_e5m2(x); }},
};

class DTypeFormat : public testing::TestWithParam<Format> {
 protected:
  // Both signs of one rounding decision.
  void expect_encodes(float x, uint32_t code) const {
    const Format& f = GetParam();
    ASSERT_EQ(f.encode(x), code) << "x = " << x;
    ASSERT_EQ(f.encode(-x), code | f.sign_bit()) << "x = " << -x;
  }
};

TEST_P(DTypeFormat, DecodesEveryPattern) {
  const Format& f = GetParam();
  for (uint32_t code = 0; code < 1u << f.width(); ++code) {
    const double expected = f.value(code);
    const float actual = f.decode(code);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(actual)) << "code " << code;
    } else {
      ASSERT_EQ(static_cast<double>(actual), expected) << "code " << code;
      ASSERT_EQ(std::signbit(actual), (code & f.sign_bit()) != 0) << "code " << code;
    }
  }
}

TEST_P(DTypeFormat, RoundTripsEveryValue) {
  const Format& f = GetParam();
  for (uint32_t code = 0; code < 1u << f.width(); ++code) {
    const float x = f.decode(code);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(f.decode(f.encode(x)))) << "code " << code;
    } else if (std::isinf(x) && f.saturates) {
      ASSERT_EQ(f.encode(x), f.largest() | (code & f.sign_bit()));
    } else {
      ASSERT_EQ(f.encode(x), code);
    }
  }
}

TEST_P(DTypeFormat, RoundsToNearestEvenAtEveryMidpoint) {
  const Format& f = GetParam();
  for (uint32_t code = 0; code < f.largest(); ++code) {
    const double middle = (f.value(code) + f.value(code + 1)) / 2;
    const float x = static_cast<float>(middle);
    if (static_cast<double>(x) != middle) continue;  // bf16's smallest: below float's resolution
    const float inf = std::numeric_limits<float>::infinity();
    expect_encodes(x, code % 2 == 0 ? code : code + 1);
    expect_encodes(std::nextafter(x, 0.0f), code);
    expect_encodes(std::nextafter(x, inf), code + 1);
  }
}

TEST_P(DTypeFormat, BeyondTheLargestSaturatesOrOverflows) {
  const Format& f = GetParam();
  // The value that the pattern after the largest would have, were the format one binade wider.
  const double step = f.value(f.largest()) - f.value(f.largest() - 1);
  const float edge = static_cast<float>(f.value(f.largest()) + step / 2);
  const uint32_t over = f.saturates ? f.largest() : f.infinity();
  expect_encodes(std::nextafter(edge, 0.0f), f.largest());
  expect_encodes(edge, over);
  expect_encodes(std::numeric_limits<float>::max(), over);
  expect_encodes(std::numeric_limits<float>::infinity(), over);
}

TEST_P(DTypeFormat, RandomFloatsGoToANearestValue) {
  const Format& f = GetParam();
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const float x = bits_float(random());
    const uint32_t code = f.encode(x);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(f.decode(code)));
      continue;
    }
    const uint32_t magnitude = code & (f.sign_bit() - 1);
    if (magnitude >= f.largest()) continue;  // the test above
    const double error = std::fabs(f.value(magnitude) - std::fabs(x));
    ASSERT_LE(error, std::fabs(f.value(magnitude + 1) - std::fabs(x))) << "x = " << x;
    if (magnitude > 0) {
      ASSERT_LE(error, std::fabs(f.value(magnitude - 1) - std::fabs(x))) << "x = " << x;
    }
  }
}

TEST_P(DTypeFormat, EveryNanStaysNan) {
  const Format& f = GetParam();
  for (uint32_t payload : {0x1u, 0x200u, 0x1fffu, 0x3fffffu, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      EXPECT_TRUE(std::isnan(f.decode(f.encode(bits_float(sign | 0x7f800000u | payload)))));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DTypeFormat, testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DType, SizesAndNames) {
  EXPECT_EQ(dtype_size(DType::kF32), 4);
  EXPECT_EQ(dtype_size(DType::kF16), 2);
  EXPECT_EQ(dtype_size(DType::kBF16), 2);
  EXPECT_EQ(dtype_size(DType::kE4M3), 1);
  EXPECT_EQ(dtype_size(DType::kE5M2), 1);
  EXPECT_EQ(dtype_size(DType::kI8), 1);
  EXPECT_STREQ(dtype_name(DType::kI8), "int8");
  EXPECT_STREQ(dtype_name(DType::kE4M3), "float8_e4m3fn");
  EXPECT_STREQ(dtype_name(DType::kBF16), "bfloat16");
}

TEST(DType, LoadAndStoreThroughTheTag) {
  for (int t = 0; t < kNumDTypes; ++t) {
    const DType type = static_cast<DType>(t);
    if (is_packed(type)) continue;
    unsigned char memory[3 * 4];
    std::memset(memory, 0xff, sizeof(memory));
    const float value = type == DType::kI8 ? -3.0f : -1.5f;  // exact in the type
    store_from_float(memory, 1, type, value);
    EXPECT_EQ(load_as_float(memory, 1, type), value) << dtype_name(type);
    for (int i = 0; i < 12; ++i) {  // the neighbours are untouched
      const int size = dtype_size(type);
      if (i < size || i >= 2 * size) {
        EXPECT_EQ(memory[i], 0xff) << dtype_name(type) << " byte " << i;
      }
    }
  }
}

TEST(DType, PackedCodesAreTwoInAByteTheFirstInTheLowerHalf) {
  unsigned char memory[3] = {0xaa, 0xaa, 0xaa};
  store_from_float(memory, 2, DType::kI4, 5);
  EXPECT_EQ(memory[1], 0xa5);
  store_from_float(memory, 3, DType::kI4, 99);
  EXPECT_EQ(memory[1], 0xf5);
  EXPECT_EQ(load_as_float(memory, 2, DType::kI4), 5);
  EXPECT_EQ(load_as_float(memory, 3, DType::kI4), 15);
  EXPECT_EQ(memory[0], 0xaa);
  EXPECT_EQ(memory[2], 0xaa);
  EXPECT_EQ(row_bytes(DType::kI4, 64), 32);
  EXPECT_EQ(row_bytes(DType::kBF16, 64), 128);
}

TEST(DType, IntegersRoundToEvenAndSaturate) {
  for (const auto& [x, expected] : {std::pair{0.5f, 0},
                                    {1.5f, 2},
                                    {-2.5f, -2},
                                    {126.6f, 127},
                                    {1e30f, 127},
                                    {-1e30f, -127},
                                    {-126.51f, -127}}) {
    EXPECT_EQ(round_within(x, -127, 127), expected) << x;
  }
  EXPECT_EQ(round_within(std::nanf(""), -127, 127), 0);
}

TEST(DType, E2M1IsTheNearestOfItsSixteenNumbers) {
  const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = code & 8 ? -values[code & 7] : values[code & 7];
    EXPECT_EQ(e2m1_to_float(code), value);
    EXPECT_EQ(float_to_e2m1(value), code);
  }
  for (float x = -8; x <= 8; x += 1.0f / 64) {
    const uint32_t code = float_to_e2m1(x);
    for (uint32_t other = 0; other < 16; ++other) {
      const float error = std::fabs(e2m1_to_float(code) - x);
      const float others = std::fabs(e2m1_to_float(other) - x);
      EXPECT_LE(error, others) << x;
      if (error == others && e2m1_to_float(other) != e2m1_to_float(code)) {
        EXPECT_EQ(code & 1, 0u) << x;
      }
    }
  }
}

TEST(DType, AScaleOfInt4HoldsItsZeroPoint) {
  const float packed = bits_float((float_bits(0.1f) & ~15u) | 11);
  EXPECT_EQ(int4_zero(packed), 11);
  EXPECT_EQ(float_bits(int4_scale(packed)) & 15, 0u);
  EXPECT_NEAR(int4_scale(packed), 0.1f, 0.1f * 0x1p-19f);
}

}  // namespace
}  // namespace flashbsr
