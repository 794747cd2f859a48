// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "dequantize.h"

#include <flashbsr/core/math.h>

#include "ops.h"

namespace flashbsr::cuda {

namespace {

/// Kernels may look at page ids of a tile that ends behind the last one.
constexpr int64_t kIdSlack = 256;

/// Heads of a token follow one another: the order of most caches, so that both sides of the pass
/// are long runs.
PagedView dense_view(const PagedView& codes, DType type, int64_t pages, char* data) {
  const int64_t row = int64_t{codes.heads} * codes.dim;
  return {.data = data,
          .dtype = type,
          .pages = pages,
          .page_size = codes.page_size,
          .heads = codes.heads,
          .dim = codes.dim,
          .stride_page = codes.page_size * row,
          .stride_token = row,
          .stride_head = codes.dim};
}

ops::DequantizeRows rows_of(const PagedView& codes, const PagedView& scales, const PagedView& out) {
  const uint32_t groups = static_cast<uint32_t>(codes.dim / ops::kCodeGroup);
  return {.codes = codes,
          .scales = scales,
          .out = out,
          .groups = FastDiv(groups * static_cast<uint32_t>(codes.heads)),
          .row_groups = FastDiv(groups)};
}

}  // namespace

void DensePages::write(KernelArgs& args, const PlanHeader& header, CUstream stream) {
  Params& p = args.params;
  const int64_t pages = args.kv_indices ? header.num_kv_indices : header.num_kv_rows;
  const int64_t tokens = pages * p.k.page_size;
  {
    const RelaxedCapture relaxed;
    values_.fit(dense_bytes(tokens, p.k.heads, p.k.dim + p.v.dim));
    ids_.fit(4 * pages + kIdSlack);
  }
  const PagedView k = dense_view(p.k, p.q.dtype, pages, values_.data());
  const PagedView v =
      dense_view(p.v, p.q.dtype, pages, values_.data() + dense_bytes(tokens, p.k.heads, p.k.dim));
  int32_t* const ids = reinterpret_cast<int32_t*>(ids_.data());
  const int64_t blocks = ceil_div<int64_t>(header.max_kv_len, ops::kDequantizeTokens);
  launch_op("dequantize_pages", {.device = device_, .stream = stream},
            {.blocks = max_of<int64_t>(blocks * header.num_requests, 1), .blocks_per_sm = 8},
            ops::DequantizePagesArgs{.header = args.header,
                                     .requests = args.requests,
                                     .kv_indices = args.kv_indices,
                                     .page_ids = ids,
                                     .page_size = args.page_size,
                                     .k = rows_of(p.k, p.k_scales, k),
                                     .v = rows_of(p.v, p.v_scales, v)});
  p.k = k;
  p.v = v;
  p.k_scales = p.v_scales = {};
  if (args.kv_indices) args.kv_indices = ids;
}

}  // namespace flashbsr::cuda
