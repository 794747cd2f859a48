// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Which request a row of a ragged array belongs to.
#pragma once

#include <flashbsr/kernel/ops/args.h>

namespace flashbsr::ops {

/// The last request whose rows start at or before `row`: a binary search, a thread per row, so that
/// one long request costs as much as many short ones.
FLASHBSR_DEVICE int64_t request_of(const Indices& indptr, int64_t row) {
  int64_t low = 0, high = indptr.size - 1;
  while (low < high - 1) {
    const int64_t middle = (low + high) / 2;
    if (indptr[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace flashbsr::ops
