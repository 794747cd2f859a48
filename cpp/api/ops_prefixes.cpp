// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "ops.h"

namespace flashbsr::api {

void find_prefixes(PrefixTree& tree, const Array* qo_indptr, const Array& kv_indptr,
                   const Array& kv_indices, const Array& kv_lens, int32_t page_size, bool causal) {
  const IndexView indptr = indices(kv_indptr), pages = indices(kv_indices), lens = indices(kv_lens);
  IndexView qo;
  if (qo_indptr) qo = indices(*qo_indptr);
  // Kept from call to call: new memory for 131072 ids would be filled with zeros first.
  thread_local Layout layout;
  paged_layout(layout, qo_indptr ? &qo : nullptr, indptr, pages, nullptr, &lens, page_size);
  tree.find(layout, Shape{.causal = causal});
}

}  // namespace flashbsr::api
