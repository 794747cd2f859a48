// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <atomic>

#include <nanobind/stl/string.h>

#include "../api/dlpack.h"
#include "exchange.h"

namespace flashbsr::bind {

namespace {

using api::Element;

Element named_element(const std::string& text) {
  for (const Element e : {Element::kBF16, Element::kE4M3, Element::kE5M2}) {
    if (text == api::element_name(e)) return e;
  }
  return Element::kOther;
}

/// A type and who describes its objects. Frameworks add theirs when they are first met.
struct Exchange {
  PyObject* type;
  int (*describe)(void* object, nb::dlpack::dltensor* out);
  const Exchange* next;
};
std::atomic<const Exchange*> exchange{nullptr};

const Exchange* exchange_of(nb::handle object) {
  const Exchange* at = exchange.load(std::memory_order_acquire);
  for (; at; at = at->next) {
    if (PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(at->type))) break;
  }
  return at;
}

template <class NdArray>
nb::dlpack::dltensor tensor_of(const NdArray& a) {
  return {.data = const_cast<void*>(static_cast<const void*>(a.data())),
          .device = {a.device_type(), a.device_id()},
          .ndim = static_cast<int32_t>(a.ndim()),
          .dtype = a.dtype(),
          .shape = const_cast<int64_t*>(a.shape_ptr()),
          .strides = const_cast<int64_t*>(a.stride_ptr())};
}

}  // namespace

nb::dlpack::dtype dlpack_type(const std::string& dtype_name) {
  for (const api::DlpackType& r : api::kDlpackTypes) {
    if (dtype_name == api::element_name(r.element)) return {r.code, r.bits, 1};
  }
  throw Error(ErrorCode::kDType, "dtype_name", dtype_name, "a data type of flashbsr");
}

Element element_named(const std::string& dtype_name) {
  for (const api::DlpackType& r : api::kDlpackTypes) {
    if (dtype_name == api::element_name(r.element)) return r.element;
  }
  throw Error(ErrorCode::kDType, "dtype_name", dtype_name, "a data type of flashbsr");
}

bool use_exchange_api(nb::handle type, nb::handle capsule) {
  void* pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
  if (!pointer) nb::raise_python_error();
  const auto* header = static_cast<const ExchangeHeader*>(pointer);
  while (header && header->major != 1) header = header->previous;
  const auto* functions = reinterpret_cast<const ExchangeApi<nb::dlpack::dltensor>*>(header);
  if (!functions || !functions->describe) return false;
  // Never freed: the type and its functions live as long as the process.
  exchange = new Exchange{nb::borrow(type).release().ptr(), functions->describe, exchange.load()};
  return true;
}

Import::Import(nb::handle object, const char* name, bool writable, Memory memory) {
  array_.name = name;
  if (const Exchange* by = exchange_of(object)) {
    nb::dlpack::dltensor tensor;
    if (by->describe(object.ptr(), &tensor) != 0) {
      const nb::python_error error;
      const std::string text = nb::cast<std::string>(nb::str(error.value()));
      throw Error(ErrorCode::kDType, name,
                  "one that DLPack cannot describe (" + text.substr(0, text.find('\n')) + ")",
                  "a strided array of numbers");
    }
    take(tensor, std::nullopt, memory);
    return;
  }
  nb::object source = nb::borrow(object);
  std::optional<Element> named;
  if (nb::isinstance<nb::tuple>(object)) {
    const nb::tuple pair = nb::borrow<nb::tuple>(object);
    source = nb::borrow(pair[0]);
    const std::string text = nb::cast<std::string>(pair[1]);
    named = named_element(text);
    if (named == Element::kOther) array_.other = api::kept_name(text);
  }
  const bool imported =
      writable ? nb::try_cast(source, write_, false) : nb::try_cast(source, read_, false);
  if (!imported && !writable && nb::hasattr(source, "dtype")) {  // bytes swapped, or objects
    array_.element = Element::kOther;
    const nb::object type = source.attr("dtype");
    array_.other = api::kept_name(nb::cast<std::string>(nb::str(type)));
    return;
  }
  if (!imported) {
    const std::string type = nb::cast<std::string>(nb::str(source.type().attr("__name__")));
    throw Error(ErrorCode::kDType, name, "a " + type,
                writable ? "a writable array" : "an array (DLPack or buffer protocol)");
  }
  if (writable) {
    take(tensor_of(write_), named, memory);
  } else {
    take(tensor_of(read_), named, memory);
  }
}

void Import::take(const nb::dlpack::dltensor& t, std::optional<Element> named, Memory memory) {
  api::take_dlpack(t, named, array_);
  if (memory == Memory::kHost) api::check_place(array_, {}, "this function works on the host");
}

}  // namespace flashbsr::bind
