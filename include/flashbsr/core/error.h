// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The one exception of the host side: which argument, what it was, what it must be.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace flashbsr {

enum class ErrorCode {
  kValue,
  kShape,
  kDType,
  kDevice,
  kIndexRange,
  kCapacity,
  kPlan,
  kUnsupported,
  kCuda,
};

class Error : public std::invalid_argument {
 public:
  Error(ErrorCode code, std::string argument, std::string actual, std::string expected)
      : std::invalid_argument(argument + ": got " + actual + "; expected " + expected),
        code(code),
        argument(std::move(argument)),
        actual(std::move(actual)),
        expected(std::move(expected)) {}

  ErrorCode code;
  std::string argument;
  std::string actual;
  std::string expected;
};

}  // namespace flashbsr
