// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Elements of lists that a plan has thousands of.
#pragma once

#include <vector>

namespace flashbsr::detail {

/// A new last element, to be assigned where it lies. What push_back is given lies beside the list
/// with libc++, and is copied in wider words than it was stored in, so that each copy waits for
/// those stores.
template <class T>
T& added(std::vector<T>& to) {
  return to.emplace_back();
}

}  // namespace flashbsr::detail
