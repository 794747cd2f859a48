// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// An array as the bindings hand it over, and the checks that turn it into a view. Framework-free.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include <flashbsr/core/error.h>
#include <flashbsr/core/view.h>
#include <flashbsr/plan/layout.h>

namespace flashbsr::api {

enum class Element : int32_t {
  kF32,
  kF16,
  kBF16,
  kE4M3,
  kE5M2,
  kI8,
  kI32,
  kI64,
  kU8,
  kBool,
  kOther  ///< one that nothing takes: whoever asks for a type says which would do
};

constexpr const char* element_name(Element e) {
  constexpr const char* kNames[] = {"float32",     "float16", "bfloat16",    "float8_e4m3fn",
                                    "float8_e5m2", "int8",    "int32",       "int64",
                                    "uint8",       "bool",    "another type"};
  return kNames[static_cast<int>(e)];
}

constexpr int64_t element_bytes(Element e) {
  constexpr int64_t kBytes[] = {4, 2, 2, 1, 1, 1, 4, 8, 1, 1, 1};
  return kBytes[static_cast<int>(e)];
}

/// Where an array's memory is.
struct Place {
  bool cuda = false;
  int32_t device = 0;  ///< CUDA ordinal; 0 for host memory

  bool operator==(const Place&) const = default;
};

inline std::string place_text(Place place) {
  return place.cuda ? "cuda:" + std::to_string(place.device) : "host memory";
}

/// Borrowed memory; `name` is the caller's name of the argument.
struct Array {
  static constexpr int kMaxDims = 6;
  const char* name = "";
  void* data = nullptr;
  Element element = Element::kF32;
  const char* other = nullptr;  ///< name of Element::kOther, which lives as long as the process
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  ///< in elements
  Place place;

  std::string shape_text() const {
    std::string s = "(";
    for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + (ndim == 1 ? ",)" : ")");
  }
  int64_t size() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= shape[i];
    return n;
  }
};

/// `why` says what fixed the place.
inline void check_place(const Array& a, Place expected, const char* why) {
  if (a.place == expected) return;
  throw Error(ErrorCode::kDevice, a.name, "an array in " + place_text(a.place),
              "one in " + place_text(expected) + ": " + why);
}

[[noreturn]] inline void bad_shape(const Array& a, const std::string& expected) {
  throw Error(ErrorCode::kShape, a.name, "shape " + a.shape_text(), expected);
}

inline void check_rank(const Array& a, int ndim, const char* meaning) {
  if (a.ndim != ndim) bad_shape(a, std::to_string(ndim) + " dimensions " + meaning);
}

// A run makes two dozen of these checks, so that texts are put together for failures only: that was
// 0.5 us of a run.

[[noreturn]] inline void bad_shape(const Array& a, std::initializer_list<int64_t> expected) {
  std::string text = "(";
  int i = 0;
  for (const int64_t e : expected) {
    text += (i++ ? ", " : "") + (e < 0 ? std::string("any") : std::to_string(e));
  }
  bad_shape(a, "shape " + text + (i == 1 ? ",)" : ")"));
}

/// -1 accepts any extent.
inline void check_shape(const Array& a, std::initializer_list<int64_t> expected) {
  bool same = a.ndim == static_cast<int>(expected.size());
  for (int i = 0; same && i < a.ndim; ++i) {
    const int64_t e = expected.begin()[i];
    same = e < 0 || a.shape[i] == e;
  }
  if (!same) bad_shape(a, expected);
}

[[noreturn]] inline void bad_element(const Array& a, std::initializer_list<Element> allowed) {
  std::string text;
  for (const Element e : allowed) {
    text += (text.empty() ? "" : ", ") + std::string(element_name(e));
  }
  throw Error(ErrorCode::kDType, a.name, a.other ? a.other : element_name(a.element), text);
}

inline void check_element(const Array& a, std::initializer_list<Element> allowed) {
  for (const Element e : allowed) {
    if (a.element == e) return;
  }
  bad_element(a, allowed);
}

/// The rows of the last dimension must be contiguous; every other stride is free.
inline void check_rows(const Array& a) {
  if (a.ndim == 0 || a.size() == 0) return;
  const int last = a.ndim - 1;
  if (a.shape[last] > 1 && a.stride[last] != 1) {
    throw Error(ErrorCode::kShape, a.name,
                "stride " + std::to_string(a.stride[last]) + " in the last dimension",
                "a contiguous last dimension (stride 1)");
  }
}

inline void check_contiguous(const Array& a) {
  if (a.size() == 0) return;
  int64_t stride = 1;
  for (int i = a.ndim - 1; i >= 0; --i) {
    if (a.shape[i] > 1 && a.stride[i] != stride) {
      throw Error(ErrorCode::kShape, a.name, "a strided array", "a contiguous one");
    }
    stride *= a.shape[i];
  }
}

/// No element of a written array may be another one's: broadcast views would race.
inline void check_no_overlap(const Array& a) {
  if (a.size() == 0) return;
  int order[Array::kMaxDims];
  int count = 0;
  const auto step = [&](int dim) { return a.stride[dim] < 0 ? -a.stride[dim] : a.stride[dim]; };
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] == 1) continue;
    int at = count++;
    for (; at > 0 && step(order[at - 1]) > step(i); --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t extent = 1;  // elements that the dimensions so far span
  for (int i = 0; i < count; ++i) {
    if (step(order[i]) < extent) {
      throw Error(ErrorCode::kShape, a.name, "a view whose elements overlap",
                  "memory of its own for every element");
    }
    extent += step(order[i]) * (a.shape[order[i]] - 1);
  }
}

inline DType float_dtype(const Array& a, bool fp8 = false) {
  if (fp8) {
    check_element(a,
                  {Element::kF32, Element::kF16, Element::kBF16, Element::kE4M3, Element::kE5M2});
  } else {
    check_element(a, {Element::kF32, Element::kF16, Element::kBF16});
  }
  return static_cast<DType>(a.element);
}

/// The type of K or V: that of the array, or of the packed codes that its bytes are said to be.
inline DType kv_dtype(const Array& a, std::optional<DType> said) {
  if (said && is_packed(*said)) {
    check_element(a, {Element::kU8});
    return *said;
  }
  if (a.element == Element::kU8) {
    throw Error(ErrorCode::kDType, a.name, "uint8",
                "kv_dtype='int4' or 'nvfp4' with it: bytes do not say which codes they are");
  }
  check_element(a, {Element::kF32, Element::kF16, Element::kBF16, Element::kE4M3, Element::kE5M2,
                    Element::kI8});
  return static_cast<DType>(a.element);
}

/// A contiguous 1-D array of int32 or int64.
inline IndexView indices(const Array& a) {
  check_element(a, {Element::kI32, Element::kI64});
  check_rank(a, 1, "(an index array)");
  check_contiguous(a);
  return a.element == Element::kI64 ? IndexView(static_cast<const int64_t*>(a.data), a.shape[0])
                                    : IndexView(static_cast<const int32_t*>(a.data), a.shape[0]);
}

/// [tokens, heads, dim], rows contiguous.
inline RaggedView ragged_view(const Array& a, bool fp8 = false) {
  const DType dtype = float_dtype(a, fp8);
  check_rank(a, 3, "[tokens, heads, dim]");
  check_rows(a);
  return {a.data,
          dtype,
          a.shape[0],
          static_cast<int32_t>(a.shape[1]),
          static_cast<int32_t>(a.shape[2]),
          a.stride[0],
          a.stride[1]};
}

static_assert(static_cast<int>(Element::kI8) == static_cast<int>(DType::kI8));

}  // namespace flashbsr::api
