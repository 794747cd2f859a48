// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <atomic>
#include <mutex>
#include <set>

#include <nanobind/stl/string.h>

#include "exchange.h"

namespace flashbsr::bind {

namespace {

using api::Element;

struct TypeRow {
  uint8_t code, bits;
  Element element;
};
// DLPack 1.1 type codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3fn, 12 e5m2.
constexpr TypeRow kTypes[] = {{2, 32, Element::kF32},  {2, 16, Element::kF16},
                              {4, 16, Element::kBF16}, {10, 8, Element::kE4M3},
                              {12, 8, Element::kE5M2}, {0, 8, Element::kI8},
                              {0, 32, Element::kI32},  {0, 64, Element::kI64},
                              {1, 8, Element::kU8},    {6, 8, Element::kBool}};

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
  constexpr const char* kSmall[] = {"float8_e3m4",     "float8_e4m3",     "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",   "float8_e4m3fnuz", "float8_e5m2",
                                    "float8_e5m2fnuz", "float8_e8m0fnu",  "float6_e2m3fn",
                                    "float6_e3m2fn",   "float4_e2m1fn"};
  if (t.code < 7) return kKinds[t.code] + std::to_string(t.bits);
  if (t.code < 18) return kSmall[t.code - 7];
  return "type code " + std::to_string(t.code) + " of " + std::to_string(t.bits) + " bits";
}

/// A name that stays: few types are ever met.
const char* kept(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string>* const names = new std::set<std::string>;
  const std::lock_guard<std::mutex> hold(mutex);
  return names->insert(text).first->c_str();
}

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
    if (named == Element::kOther) array_.other = kept(text);
  }
  const bool imported =
      writable ? nb::try_cast(source, write_, false) : nb::try_cast(source, read_, false);
  if (!imported && !writable && nb::hasattr(source, "dtype")) {  // bytes swapped, or objects
    array_.element = Element::kOther;
    const nb::object type = source.attr("dtype");
    array_.other = kept(nb::cast<std::string>(nb::str(type)));
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
  const std::optional<api::Place> place = place_of(t.device.device_type, t.device.device_id);
  if (!place) {
    throw Error(ErrorCode::kDevice, array_.name,
                "an array on a device of DLPack type " + std::to_string(t.device.device_type),
                "an array in host memory or on a CUDA device");
  }
  array_.place = *place;
  if (memory == Memory::kHost) api::check_place(array_, {}, "this function works on the host");
  if (t.ndim > api::Array::kMaxDims) {
    throw Error(ErrorCode::kShape, array_.name, std::to_string(t.ndim) + " dimensions",
                "at most " + std::to_string(api::Array::kMaxDims));
  }
  const std::optional<Element> element = named ? named : element_of(t.dtype);
  array_.element = element.value_or(Element::kOther);
  if (!element) array_.other = kept(text_of(t.dtype));
  array_.ndim = t.ndim;
  for (int i = 0; i < t.ndim; ++i) {
    array_.shape[i] = t.shape[i];
    array_.stride[i] = t.strides[i];
  }
  if (!t.data && array_.size() > 0) {  // PyTorch's fake tensors, while it traces
    throw Error(ErrorCode::kDevice, array_.name, "an array without memory",
                "an array in host memory or on a CUDA device");
  }
  array_.data = static_cast<char*>(t.data) + t.byte_offset;
}

}  // namespace flashbsr::bind
