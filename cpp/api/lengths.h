// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The arrays that a plan of bounds is resolved from, in host memory or on the device.
#pragma once

#include <optional>

#include <flashbsr/core/lengths.h>

#include "array.h"

namespace flashbsr::api {

/// Pages come as a table or in CSR form.
struct LengthArrays {
  Array kv_lens;
  std::optional<Array> block_tables;           ///< [batch, max_pages]; of heads one more before it
  std::optional<Array> kv_indptr, kv_indices;  ///< [requests + 1], [nnz]
  std::optional<Array> qo_indptr;              ///< [batch + 1]
  std::optional<Array> q_positions;            ///< [batch], of a placed plan

  /// Those that are given.
  template <class Visit>
  void each(const Visit& visit) const {
    visit(kv_lens);
    for (const auto* a : {&block_tables, &kv_indptr, &kv_indices, &qo_indptr, &q_positions}) {
      if (*a) visit(**a);
    }
  }
};

/// The same, checked. An array of `host` is to be copied first.
struct LengthViews {
  struct View {
    Indices Lengths::* field;
    bool host;
  };
  Lengths lengths;
  View views[5];
  int count = 0;

  bool on_host(Indices Lengths::* field) const {
    for (int i = 0; i < count; ++i) {
      if (views[i].field == field) return views[i].host;
    }
    return false;
  }
};

/// Checks shapes and types against the plan; `place`: where it computes.
LengthViews length_views(const LengthArrays& arrays, const PlanHeader& plan, Place place);

}  // namespace flashbsr::api
