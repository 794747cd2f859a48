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

/// The exception class of the Python package.
constexpr const char* error_name(ErrorCode code) {
  constexpr const char* kNames[] = {"FlashbsrError", "ShapeError",       "DTypeError",
                                    "DeviceError",   "IndexRangeError",  "CapacityError",
                                    "PlanError",     "UnsupportedError", "CudaError"};
  return kNames[static_cast<int>(code)];
}

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
