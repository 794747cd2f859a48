// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A call of XLA's in the terms of this engine: arrays, numbers, a stream.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../api/array.h"
#include "ffi.h"

namespace flashbsr::xla {

/// Its operands have the names that the attribute "names" lists, with commas between them.
class Node {
 public:
  Node(const Frame& frame, bool cuda);
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Null: not given.
  const api::Array* find(std::string_view name) const;
  const api::Array& operand(std::string_view name) const;
  std::optional<api::Array> maybe(std::string_view name) const;

  int64_t results() const { return frame_.results.size; }
  api::Array result(int64_t at, const char* name) const;

  /// A number among the attributes; empty: not given.
  std::optional<double> number(std::string_view name) const;
  double number(std::string_view name, double otherwise) const {
    return number(name).value_or(otherwise);
  }

  /// Visits the parts of a text among the attributes, which commas separate.
  template <class Visit>
  void each(std::string_view list, const Visit& visit) const {
    std::string_view left = text(list);
    while (!left.empty()) {
      const size_t end = std::min(left.find(','), left.size());
      visit(left.substr(0, end));
      left.remove_prefix(std::min(end + 1, left.size()));
    }
  }

  bool on_cuda() const { return place_.cuda; }
  /// Its ordinal.
  int32_t device() const;
  void* stream() const { return stream_; }

 private:
  struct Named {
    std::string name;
    api::Array array;
  };

  std::string_view text(std::string_view name) const;
  const void* attribute(std::string_view name, int32_t kind) const;
  api::Array array(const Buffers& from, int64_t at, const char* name) const;

  const Frame& frame_;
  api::Place place_;
  void* stream_ = nullptr;
  std::vector<Named> operands_;
};

}  // namespace flashbsr::xla
