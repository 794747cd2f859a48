// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <nanobind/stl/string.h>

namespace flashbsr::bind {

namespace {

using api::Element;

struct TypeRow {
  uint8_t code, bits;
  Element element;
};
// DLPack 1.1 type codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3fn, 12 e5m2.
constexpr TypeRow kTypes[] = {
    {2, 32, Element::kF32},  {2, 16, Element::kF16},  {4, 16, Element::kBF16},
    {10, 8, Element::kE4M3}, {12, 8, Element::kE5M2}, {0, 32, Element::kI32},
    {0, 64, Element::kI64},  {1, 8, Element::kU8},    {6, 8, Element::kBool}};

std::optional<Element> element_of(nb::dlpack::dtype t) {
  for (const TypeRow& r : kTypes) {
    if (t.code == r.code && t.bits == r.bits && t.lanes == 1) return r.element;
  }
  return std::nullopt;
}

/// Host memory, memory of a GPU, or memory that both reach (managed).
std::optional<api::Place> place_of(int device_type, int device_id) {
  if (device_type == nb::device::cpu::value) return api::Place{};
  if (device_type == nb::device::cuda::value || device_type == nb::device::cuda_managed::value) {
    return api::Place{.cuda = true, .device = device_id};
  }
  return std::nullopt;
}

std::string text_of(nb::dlpack::dtype t) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string kind =
      t.code < 7 ? kKinds[t.code] : "type code " + std::to_string(t.code) + ", ";
  return kind + std::to_string(t.bits);
}

Element named_element(const std::string& text, const char* argument) {
  for (const Element e : {Element::kBF16, Element::kE4M3, Element::kE5M2}) {
    if (text == api::element_name(e)) return e;
  }
  throw Error(ErrorCode::kDType, argument, text, "bfloat16, float8_e4m3fn, float8_e5m2");
}

}  // namespace

nb::dlpack::dtype dlpack_type(const std::string& dtype_name) {
  for (const TypeRow& r : kTypes) {
    if (dtype_name == api::element_name(r.element)) return {r.code, r.bits, 1};
  }
  throw Error(ErrorCode::kDType, "dtype_name", dtype_name, "a data type of flashbsr");
}

Element element_named(const std::string& dtype_name) {
  for (const TypeRow& r : kTypes) {
    if (dtype_name == api::element_name(r.element)) return r.element;
  }
  throw Error(ErrorCode::kDType, "dtype_name", dtype_name, "a data type of flashbsr");
}

Import::Import(nb::handle object, const char* name, bool writable, Memory memory) {
  array_.name = name;
  nb::object source = nb::borrow(object);
  std::optional<Element> named;
  if (nb::isinstance<nb::tuple>(object)) {
    const nb::tuple pair = nb::borrow<nb::tuple>(object);
    source = nb::borrow(pair[0]);
    named = named_element(nb::cast<std::string>(pair[1]), name);
  }
  const auto fill = [&](const auto& a) {
    const std::optional<api::Place> place = place_of(a.device_type(), a.device_id());
    if (!place) {
      throw Error(ErrorCode::kDevice, name,
                  "an array on a device of DLPack type " + std::to_string(a.device_type()),
                  "an array in host memory or on a CUDA device");
    }
    array_.place = *place;
    if (memory == Memory::kHost) api::check_place(array_, {}, "this function works on the host");
    if (a.ndim() > api::Array::kMaxDims) {
      throw Error(ErrorCode::kShape, name, std::to_string(a.ndim()) + " dimensions",
                  "at most " + std::to_string(api::Array::kMaxDims));
    }
    const std::optional<Element> element = named ? named : element_of(a.dtype());
    if (!element) {
      throw Error(ErrorCode::kDType, name, text_of(a.dtype()),
                  "float32, float16, bfloat16, float8, int32, int64, uint8 or bool");
    }
    array_.element = *element;
    array_.ndim = static_cast<int>(a.ndim());
    for (size_t i = 0; i < a.ndim(); ++i) {
      array_.shape[i] = static_cast<int64_t>(a.shape(i));
      array_.stride[i] = a.stride(i);
    }
    array_.data = const_cast<void*>(static_cast<const void*>(a.data()));
  };
  const bool imported =
      writable ? nb::try_cast(source, write_, false) : nb::try_cast(source, read_, false);
  if (!imported) {
    const std::string type = nb::cast<std::string>(nb::str(source.type().attr("__name__")));
    throw Error(ErrorCode::kDType, name, "a " + type,
                writable ? "a writable array" : "an array (DLPack or buffer protocol)");
  }
  if (writable) {
    fill(write_);
  } else {
    fill(read_);
  }
}

}  // namespace flashbsr::bind
