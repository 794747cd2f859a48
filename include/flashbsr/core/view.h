// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Strided views of the caller's arrays. Strides are in elements and 64 bits wide; the last
// dimension is always contiguous. Nothing here owns memory.
#pragma once

#include <flashbsr/core/dtype.h>

namespace flashbsr {

/// Ragged rows: q, o [tokens, heads, dim].
struct RaggedView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  int64_t stride_token = 0;
  int64_t stride_head = 0;

  FLASHBSR_FN char* row(int64_t token, int64_t head) const {
    return static_cast<char*>(data) +
           (token * stride_token + head * stride_head) * dtype_size(dtype);
  }
};

/// K or V as pages of tokens: element (page, token, head, d). Ragged KV is the case page_size = 1,
/// where the page is the token, and either stride leads
/// to the next one. NHD, HND, stacked and separate caches differ in strides only.
struct PagedView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t pages = 0;
  int32_t page_size = 1;
  int32_t heads = 0;
  int32_t dim = 0;
  int64_t stride_page = 0;
  int64_t stride_token = 0;
  int64_t stride_head = 0;

  FLASHBSR_FN char* row(int64_t page, int64_t token, int64_t head) const {
    return static_cast<char*>(data) +
           (page * stride_page + token * stride_token + head * stride_head) * dtype_size(dtype);
  }
  /// Bytes from a head's row of token 0 of page 0 to that of another.
  FLASHBSR_FN int64_t row_offset(int64_t page, int64_t token) const {
    return (page * stride_page + token * stride_token) * dtype_size(dtype);
  }
};

}  // namespace flashbsr
