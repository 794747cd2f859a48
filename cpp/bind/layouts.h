// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Layouts from Python: the tuples that `Layout.views` of flashbsr.layout makes.
#pragma once

#include <vector>

#include "../api/layouts.h"
#include "array.h"

namespace flashbsr::bind {

/// Keeps the imported arrays of a layout as long as they are planned.
class LayoutImport {
 public:
  /// `views`: the layout's kind, then its fields in the order of its struct.
  explicit LayoutImport(const nb::tuple& views);

  const api::LayoutArrays& arrays() const { return arrays_; }

 private:
  api::Array take(nb::handle object, const char* name);
  std::optional<api::Array> maybe(nb::handle object, const char* name);

  std::vector<Import> keep_;
  api::LayoutArrays arrays_;
};

}  // namespace flashbsr::bind
