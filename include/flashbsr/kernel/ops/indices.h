// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Index arithmetic around a paged cache, and the check of a plan's page ids (FLASHBSR_CHECK=1).
#pragma once

#include <flashbsr/kernel/ops/search.h>

namespace flashbsr::ops {

FLASHBSR_DEVICE int64_t first_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}
FLASHBSR_DEVICE int64_t index_stride() { return static_cast<int64_t>(gridDim.x) * kThreads; }

FLASHBSR_DEVICE void get_batch_indices_positions(const BatchIndicesArgs& a) {
  const int64_t requests = a.append_indptr.size - 1;
  const int64_t used = a.append_indptr[requests];
  for (int64_t t = first_index(); t < a.nnz; t += index_stride()) {
    int64_t request = -1, position = 0;
    if (t < used && requests > 0) {
      request = request_of(a.append_indptr, t);
      position = a.seq_lens[request] - a.append_indptr[request + 1] + t;
    }
    a.batch_indices[t] = static_cast<int32_t>(request);
    a.positions[t] = static_cast<int32_t>(position);
  }
}

FLASHBSR_DEVICE void get_seq_lens(const SeqLensArgs& a) {
  for (int64_t b = first_index(); b < a.last_page_len.size; b += index_stride()) {
    const int64_t pages = a.kv_indptr[b + 1] - a.kv_indptr[b];
    const int64_t length = pages ? (pages - 1) * a.page_size + a.last_page_len[b] : 0;
    a.seq_lens[b] = static_cast<int32_t>(length);
  }
}

FLASHBSR_DEVICE void check_pages(const CheckPagesArgs& a) {
  const int64_t count = a.header->num_kv_indices;
  for (int64_t i = first_index(); i < count; i += index_stride()) {
    const int32_t page = a.kv_indices[i];
    if (page >= 0 && page < a.pages) continue;
    const uint64_t bad = static_cast<uint64_t>(i) << 32 | static_cast<uint32_t>(page);
    atomicMin(reinterpret_cast<unsigned long long*>(a.first_bad), bad);
  }
}

}  // namespace flashbsr::ops
