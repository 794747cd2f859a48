// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

namespace flashbsr::api {

void find_prefixes(PrefixTree& tree, const LayoutArrays& arrays, bool causal) {
  // Kept from call to call: new memory for 131072 ids would be filled with zeros first.
  thread_local LaidOut laid;
  const Shape shape{.causal = causal};
  lay_out(arrays, {}, {std::nullopt, shape}, laid);
  tree.find(laid.layout, shape);
}

}  // namespace flashbsr::api
