// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Python arrays in: what an adapter's export() gives becomes an api::Array. The adapters own the
// framework and stream questions; here arrive only buffers, DLPack objects, arrays of a framework
// that has handed over its exchange API, and (bits, name) tuples.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "../api/array.h"

namespace flashbsr::bind {

namespace nb = nanobind;

/// Which memory a function can work in; arrays elsewhere are refused by name.
enum class Memory { kHost, kAny };

/// A CUDA stream as Python has it, a number.
inline void* stream_of(uintptr_t handle) { return reinterpret_cast<void*>(handle); }

/// Objects of `type`, and of its subclasses, are described by the functions of this capsule from
/// now on: DLPack's C exchange API, `type.__dlpack_c_exchange_api__` (DLPack 1.3). False, and
/// nothing happens, where its major version is another than 1 or it does not describe arrays.
bool use_exchange_api(nb::handle type, nb::handle capsule);

/// Keeps the imported array alive as long as its view is used; one that the exchange API describes
/// is the caller's to keep.
class Import {
 public:
  Import(nb::handle object, const char* name, bool writable = false, Memory memory = Memory::kHost);

  const api::Array& array() const { return array_; }
  const api::Array* operator->() const { return &array_; }

 private:
  void take(const nb::dlpack::dltensor& tensor, std::optional<api::Element> named, Memory memory);

  nb::ndarray<nb::ro> read_;
  nb::ndarray<> write_;
  api::Array array_;
};

/// The DLPack type of an element.
nb::dlpack::dtype dlpack_type(const std::string& dtype_name);

/// The element type of that name; every one that arrays may have.
api::Element element_named(const std::string& dtype_name);

/// None stays empty.
class OptionalImport {
 public:
  OptionalImport(nb::handle object, const char* name, bool writable = false,
                 Memory memory = Memory::kHost) {
    if (!object.is_none()) import_.emplace(object, name, writable, memory);
  }
  const api::Array* get() const { return import_ ? &import_->array() : nullptr; }
  std::optional<api::Array> copy() const {
    return import_ ? std::optional<api::Array>(import_->array()) : std::nullopt;
  }

 private:
  std::optional<Import> import_;
};

void bind_buffers(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_programs(nb::module_& m);

}  // namespace flashbsr::bind
