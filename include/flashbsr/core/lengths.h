// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a batch that was planned by bounds really has: arrays that the caller fills when it knows,
// on the device too.
#pragma once

#include <flashbsr/core/plan.h>

namespace flashbsr {

/// A 1-D index array, int32 or int64.
struct Indices {
  const void* data = nullptr;
  int64_t size = 0;
  bool wide = false;

  FLASHBSR_FN int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  FLASHBSR_FN bool given() const { return data != nullptr; }
};

struct Lengths {
  Indices kv_lens;      ///< [requests]; what is beyond a request's bound counts as the bound
  Indices qo_indptr;    ///< [requests + 1]; not given: queries as planned
  Indices pages;        ///< page ids
  Indices kv_indptr;    ///< [requests + 1] places in `pages`; not given: rows of a table
  Indices q_positions;  ///< [requests] of first query tokens, of a placed plan
  int64_t row = 0;      ///< of a table: from one request's ids to the next one's
};

}  // namespace flashbsr
