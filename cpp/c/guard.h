// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What every function of flashbsr/c_api.h shares: errors become codes and a sentence, structs of
// other versions are read, tensors become arrays.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include <flashbsr/c_api.h>

#include "../api/dlpack.h"

namespace flashbsr::c {

static_assert(FBSR_ERROR_VALUE == static_cast<int>(ErrorCode::kValue) + 1);
static_assert(FBSR_ERROR_CUDA == static_cast<int>(ErrorCode::kCuda) + 1);

/// Of the calling thread.
std::string& last_error();

template <class Body>
fbsr_status guarded(const Body& body) noexcept {
  const auto fail = [](fbsr_status status, const char* text) {
    try {
      last_error() = text;
      return status;
    } catch (const std::bad_alloc&) {
      return FBSR_ERROR_NO_MEMORY;  // the sentence is an earlier one's
    }
  };
  try {
    body();
    return FBSR_OK;
  } catch (const Error& error) {
    return fail(static_cast<fbsr_status>(static_cast<int>(error.code) + 1), error.what());
  } catch (const std::bad_alloc&) {
    return fail(FBSR_ERROR_NO_MEMORY, "the host has no memory left");
  } catch (const std::exception& error) {
    return fail(FBSR_ERROR_INTERNAL, error.what());
  }
}

/// Writes defaults to a struct of the caller's version, `size` bytes. What later versions have
/// behind it is 0: not asked for.
template <class Struct>
fbsr_status initialise(Struct* to, size_t size, Struct defaults) noexcept {
  return guarded([&] {
    if (!to) throw Error(ErrorCode::kValue, "struct", "NULL", "the address of one");
    if (size < sizeof(Struct)) {
      throw Error(ErrorCode::kValue, "size", std::to_string(size),
                  "sizeof the struct, at least " + std::to_string(sizeof(Struct)));
    }
    defaults.size = size;
    std::memset(static_cast<void*>(to), 0, size);
    std::memcpy(static_cast<void*>(to), &defaults, sizeof(Struct));
  });
}

/// Throws for a struct that no _init has seen, and for fields of later versions that are set.
template <class Struct>
const Struct& checked(const Struct* given, const char* name) {
  if (!given) throw Error(ErrorCode::kValue, name, "NULL", "the address of a struct");
  if (given->size < sizeof(Struct)) {
    throw Error(ErrorCode::kValue, std::string(name) + ".size", std::to_string(given->size),
                "what its _init writes, at least " + std::to_string(sizeof(Struct)));
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  if (std::any_of(bytes + sizeof(Struct), bytes + given->size, [](char b) { return b != 0; })) {
    throw Error(ErrorCode::kUnsupported, name, "a field of a later version than " FLASHBSR_VERSION,
                "the header of this library");
  }
  return *given;
}

inline bool boolean(const char* name, int32_t value) {
  if (value == 0 || value == 1) return value == 1;
  throw Error(ErrorCode::kValue, name, std::to_string(value), "0 or 1");
}

/// A value of an enumeration that goes from `first` to `last`.
inline int32_t choice(const char* name, int32_t value, int32_t first, int32_t last) {
  if (value >= first && value <= last) return value;
  throw Error(
      ErrorCode::kValue, name, std::to_string(value),
      "a value of its enumeration, " + std::to_string(first) + " to " + std::to_string(last));
}

inline std::optional<DType> dtype(const char* name, int32_t value) {
  static_assert(FBSR_FLOAT32 == static_cast<int>(DType::kF32) + 1);
  static_assert(FBSR_NVFP4 == static_cast<int>(DType::kE2M1) + 1);
  if (choice(name, value, FBSR_DTYPE_OF_ARRAYS, FBSR_NVFP4) == 0) return std::nullopt;
  return static_cast<DType>(value - 1);
}

/// Empty: NULL.
inline std::optional<api::Array> maybe_array(const fbsr_tensor* tensor, const char* name) {
  if (!tensor) return std::nullopt;
  std::optional<api::Array> to(std::in_place);
  to->name = name;
  if (tensor->ndim > 0 && !tensor->shape) {
    throw Error(ErrorCode::kShape, name, "a tensor without a shape", "its extents");
  }
  api::take_dlpack(*tensor, std::nullopt, *to);
  return to;
}

inline api::Array array(const fbsr_tensor* tensor, const char* name) {
  if (tensor) return *maybe_array(tensor, name);
  throw Error(ErrorCode::kValue, name, "NULL", "a tensor");
}

/// Of what the host reads.
inline std::optional<api::Array> maybe_host_array(const fbsr_tensor* tensor, const char* name) {
  std::optional<api::Array> a = maybe_array(tensor, name);
  if (a) api::check_place(*a, {}, "this function works on the host");
  return a;
}

}  // namespace flashbsr::c
