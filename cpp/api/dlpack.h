// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// DLPack's tensors as arrays. Who brings them has a struct of his own for DLTensor, of one layout.
#pragma once

#include <optional>
#include <string>

#include "array.h"

namespace flashbsr::api {

/// A type of DLPack 1.1, of one lane. Codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10
/// float8_e4m3fn, 12 float8_e5m2.
struct DlpackType {
  uint8_t code, bits;
  Element element;
};
inline constexpr DlpackType kDlpackTypes[] = {{2, 32, Element::kF32},  {2, 16, Element::kF16},
                                              {4, 16, Element::kBF16}, {10, 8, Element::kE4M3},
                                              {12, 8, Element::kE5M2}, {0, 8, Element::kI8},
                                              {0, 32, Element::kI32},  {0, 64, Element::kI64},
                                              {1, 8, Element::kU8},    {6, 8, Element::kBool}};

/// A name that stays, for Array::other: few types are ever met.
const char* kept_name(const std::string& text);

/// Of a type that is none of these: what to call it.
const char* dlpack_type_name(int code, int bits);

/// Host memory, memory of a GPU, or memory that both reach (managed); throws for others.
Place dlpack_place(const char* name, int device_type, int device_id);

/// Fills in all of `to` but its name. `named`: its type, where that of the tensor does not say it.
template <class Tensor>
void take_dlpack(const Tensor& t, std::optional<Element> named, Array& to) {
  to.place = dlpack_place(to.name, static_cast<int>(t.device.device_type), t.device.device_id);
  if (t.ndim < 0 || t.ndim > Array::kMaxDims) {
    throw Error(ErrorCode::kShape, to.name, std::to_string(t.ndim) + " dimensions",
                "at most " + std::to_string(Array::kMaxDims));
  }
  std::optional<Element> element = named;
  for (const DlpackType& type : kDlpackTypes) {
    if (!element && t.dtype.code == type.code && t.dtype.bits == type.bits && t.dtype.lanes == 1) {
      element = type.element;
    }
  }
  to.element = element.value_or(Element::kOther);
  if (!element) to.other = dlpack_type_name(t.dtype.code, t.dtype.bits);
  to.ndim = t.ndim;
  int64_t compact = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    to.shape[i] = t.shape[i];
    to.stride[i] = t.strides ? t.strides[i] : compact;
    compact *= t.shape[i];
  }
  if (!t.data && to.size() > 0) {  // PyTorch's fake tensors, while it traces
    throw Error(ErrorCode::kDevice, to.name, "an array without memory",
                "an array in host memory or on a CUDA device");
  }
  to.data = static_cast<char*>(t.data) + t.byte_offset;
}

}  // namespace flashbsr::api
