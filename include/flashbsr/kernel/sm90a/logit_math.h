// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The math policy of users' variants on Hopper: one logit, that has not been multiplied and added
// to yet. An instruction for each logit costs 6 % of a prefill there, and most of what variants do
// is the same for a row: scales, caps, biases, slopes, the row's own position.
#pragma once

#include <flashbsr/ptx/math.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr::sm90a {

template <class T, class... Kinds>
concept OneOf = (flashbsr::detail::kSame<T, Kinds> || ...);
template <class T>
concept RealNumber = OneOf<T, float, double>;
template <class T>
concept WholeNumber = OneOf<T, int, unsigned, long, unsigned long, long long, unsigned long long,
                            short, unsigned short, signed char, unsigned char, char, bool>;
template <class T>
concept Number = WholeNumber<T> || RealNumber<T>;

/// x * factor, plus an offset if it is `moved`. Numbers are multiplied and added to the last two,
/// which the compiler works out once for a row, until the value is asked for. It knows `moved`:
/// without that an infinite factor would make a NaN of an offset that is not there.
struct Logit {
  float x = 0.0f;
  float factor = 1.0f;
  float offset = 0.0f;
  bool moved = false;

  Logit() = default;
  template <RealNumber T>
  FLASHBSR_DEVICE Logit(T value) : x(static_cast<float>(value)) {}
  FLASHBSR_DEVICE Logit(float value, float times) : x(value), factor(times) {}
  FLASHBSR_DEVICE Logit(float value, float times, float plus)
      : x(value), factor(times), offset(plus), moved(true) {}

  FLASHBSR_DEVICE float value() const { return moved ? x * factor + offset : x * factor; }
  FLASHBSR_DEVICE operator float() const { return value(); }

  FLASHBSR_DEVICE Logit times(float b) const {
    return moved ? Logit(x, factor * b, offset * b) : Logit(x, factor * b);
  }
  FLASHBSR_DEVICE Logit plus(float b) const { return {x, factor, moved ? offset + b : b}; }

  FLASHBSR_DEVICE friend Logit operator-(const Logit& a) { return a.times(-1.0f); }
  FLASHBSR_DEVICE friend Logit operator+(const Logit& a, const Logit& b) {
    if (a.moved && b.moved) return a.x * a.factor + (b.x * b.factor + (a.offset + b.offset));
    if (a.moved) return b.x * b.factor + (a.x * a.factor + a.offset);
    return a.x * a.factor + b.value();
  }
  FLASHBSR_DEVICE friend Logit operator-(const Logit& a, const Logit& b) { return a + -b; }
  FLASHBSR_DEVICE friend Logit operator*(const Logit& a, const Logit& b) {
    return a.value() * b.value();
  }
  FLASHBSR_DEVICE friend Logit operator/(const Logit& a, const Logit& b) {
    return a.value() / b.value();
  }

  template <Number T>
  FLASHBSR_DEVICE friend Logit operator+(const Logit& a, T b) {
    return a.plus(static_cast<float>(b));
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator+(T a, const Logit& b) {
    return b + a;
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator-(const Logit& a, T b) {
    return a.plus(-static_cast<float>(b));
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator-(T a, const Logit& b) {
    return -b + a;
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator*(const Logit& a, T b) {
    return a.times(static_cast<float>(b));
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator*(T a, const Logit& b) {
    return b * a;
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator/(const Logit& a, T b) {
    const float c = static_cast<float>(b);
    return a.moved ? Logit(a.x, a.factor / c, a.offset / c) : Logit(a.x, a.factor / c);
  }
  template <Number T>
  FLASHBSR_DEVICE friend Logit operator/(T a, const Logit& b) {
    return static_cast<float>(a) / b.value();
  }

  template <class T>
  FLASHBSR_DEVICE Logit& operator+=(const T& b) {
    return *this = *this + b;
  }
  template <class T>
  FLASHBSR_DEVICE Logit& operator-=(const T& b) {
    return *this = *this - b;
  }
  template <class T>
  FLASHBSR_DEVICE Logit& operator*=(const T& b) {
    return *this = *this * b;
  }
  template <class T>
  FLASHBSR_DEVICE Logit& operator/=(const T& b) {
    return *this = *this / b;
  }
};

/// An integer that begins with the KV position of a logit: what is the same in a row, and the rest,
/// which the compiler knows.
struct LogitInt {
  int32_t first = 0;
  int32_t column = 0;

  LogitInt() = default;
  template <WholeNumber T>
  FLASHBSR_DEVICE LogitInt(T value) : first(static_cast<int32_t>(value)) {}
  FLASHBSR_DEVICE LogitInt(int32_t row, int32_t rest) : first(row), column(rest) {}

  FLASHBSR_DEVICE int32_t value() const { return first + column; }
  FLASHBSR_DEVICE operator int32_t() const { return value(); }
  FLASHBSR_DEVICE Logit real() const {
    return {static_cast<float>(column), 1.0f, static_cast<float>(first)};
  }

  FLASHBSR_DEVICE friend LogitInt operator-(LogitInt a) { return {-a.first, -a.column}; }
  FLASHBSR_DEVICE friend LogitInt operator+(LogitInt a, LogitInt b) {
    return {a.first + b.first, a.column + b.column};
  }
  FLASHBSR_DEVICE friend LogitInt operator-(LogitInt a, LogitInt b) { return a + -b; }
  template <WholeNumber T>
  FLASHBSR_DEVICE friend LogitInt operator+(LogitInt a, T b) {
    return a + LogitInt(b);
  }
  template <WholeNumber T>
  FLASHBSR_DEVICE friend LogitInt operator+(T a, LogitInt b) {
    return LogitInt(a) + b;
  }
  template <WholeNumber T>
  FLASHBSR_DEVICE friend LogitInt operator-(LogitInt a, T b) {
    return a - LogitInt(b);
  }
  template <WholeNumber T>
  FLASHBSR_DEVICE friend LogitInt operator-(T a, LogitInt b) {
    return LogitInt(a) - b;
  }
  template <RealNumber T>
  FLASHBSR_DEVICE friend Logit operator*(LogitInt a, T b) {
    return a.real() * b;
  }
  template <RealNumber T>
  FLASHBSR_DEVICE friend Logit operator*(T a, LogitInt b) {
    return b.real() * a;
  }
};

struct LogitMath : ThreadMath {
  using Float = Logit;
  using Int = LogitInt;

  /// An element of S before its factor, and its position: the row's first one and what is added.
  FLASHBSR_DEVICE static Float logit(float x, float factor) { return {x, factor}; }
  FLASHBSR_DEVICE static Int position(int32_t first, int32_t column) { return {first, column}; }

  FLASHBSR_DEVICE static Float to_float(Int x) { return x.real(); }
  FLASHBSR_DEVICE static Int to_int(const Float& x) { return ThreadMath::to_int(x); }
  FLASHBSR_DEVICE static Float select(Bool m, const Float& yes, const Float& no) {
    return m ? yes.value() : no.value();
  }
  FLASHBSR_DEVICE static Int select(Bool m, Int yes, Int no) {
    return m ? yes.value() : no.value();
  }
  FLASHBSR_DEVICE static Float exp(const Float& x) { return ptx::exp2(x * kLog2e); }
  /// As ThreadMath has it, with the factors in one.
  FLASHBSR_DEVICE static Float tanh(const Float& x) {
    const float y = x * (2.0f * kLog2e), e = ptx::exp2(-fabsf(y));
    return copysignf((1.0f - e) * ptx::reciprocal(1.0f + e), y);
  }
  FLASHBSR_DEVICE static Float sigmoid(const Float& x) {
    return ptx::reciprocal(1.0f + ptx::exp2(x * -kLog2e));
  }
  FLASHBSR_DEVICE static Float abs(const Float& x) { return fabsf(x); }
  FLASHBSR_DEVICE static Int abs(Int x) { return ThreadMath::abs(x.value()); }
  FLASHBSR_DEVICE static Float max(const Float& a, const Float& b) {
    return ThreadMath::max(a.value(), b.value());
  }
  FLASHBSR_DEVICE static Float min(const Float& a, const Float& b) {
    return ThreadMath::min(a.value(), b.value());
  }
  FLASHBSR_DEVICE static Int max(Int a, Int b) { return max_of(a.value(), b.value()); }
  FLASHBSR_DEVICE static Int min(Int a, Int b) { return min_of(a.value(), b.value()); }
};

}  // namespace flashbsr::sm90a
