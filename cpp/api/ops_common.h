// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the functions around attention share: where a call runs, and index arrays on either side.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "../cuda/backend.h"
#include "../cuda/ops.h"
#include "array.h"

namespace flashbsr::api {

/// Whether calls on a device check index values too, at the price of a copy and a wait.
inline bool checking() {
  const char* value = std::getenv("FLASHBSR_CHECK");
  return value && *value && std::string(value) != "0";
}

/// The place of the first array, which all have to share.
inline Place common_place(std::initializer_list<const Array*> arrays) {
  const Array& first = **arrays.begin();
  for (const Array* a : arrays) {
    if (!a || a->place == first.place) continue;
    check_place(*a, first.place, (std::string(first.name) + " is there").c_str());
  }
  if (first.place.cuda && !cuda::why_unavailable().empty()) {
    throw Error(ErrorCode::kDevice, first.name, "an array in " + place_text(first.place),
                "one in host memory: " + cuda::why_unavailable());
  }
  return first.place;
}

inline Indices device_indices(const IndexView& v) { return {v.data, v.size, v.wide}; }

/// An index array whose values the host reads, wherever it is.
class HostIndices {
 public:
  HostIndices(const Array& a, void* stream) : view_(indices(a)) {
    if (!a.place.cuda) return;
    copy_ = cuda::download(device_indices(view_), {a.place.device, stream});
    view_ = IndexView(copy_.data(), view_.size);
  }
  HostIndices(const HostIndices&) = delete;
  HostIndices& operator=(const HostIndices&) = delete;
  const IndexView& view() const { return view_; }

 private:
  std::vector<int64_t> copy_;
  IndexView view_;
};

/// The number of requests of an indptr whose values have not been looked at.
inline int64_t requests_of(const char* name, const IndexView& indptr) {
  return indptr.size < 1 ? flashbsr::detail::check_indptr(name, indptr) : indptr.size - 1;
}

inline int32_t* int32_out(const Array& a, int64_t size) {
  check_element(a, {Element::kI32});
  check_shape(a, {size});
  check_contiguous(a);
  return static_cast<int32_t*>(a.data);
}

}  // namespace flashbsr::api
