// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "dequantize.h"

#include <flashbsr/core/math.h>
#include <flashbsr/core/quantize.h>

#include "ops.h"

namespace flashbsr::cuda {

namespace {

/// Kernels may look at page ids of a tile that ends behind the last one.
constexpr int64_t kIdSlack = 256;

/// Bytes of K's factors of a token and head.
int64_t factor_bytes(DType codes) { return codes == DType::kE2M1 ? 0 : 8; }

/// Heads of a token follow one another: the order of most caches, so that both sides of the pass
/// are long runs.
PagedView dense_view(const PagedView& codes, DType type, int64_t pages, char*& data) {
  const int64_t row = int64_t{codes.heads} * codes.dim;
  const PagedView view{.data = data,
                       .dtype = type,
                       .pages = pages,
                       .page_size = codes.page_size,
                       .heads = codes.heads,
                       .dim = codes.dim,
                       .stride_page = codes.page_size * row,
                       .stride_token = row,
                       .stride_head = codes.dim};
  data += pages * view.stride_page * dtype_size(type);
  return view;
}

/// Factors of K's logits. Those of a head lie by tokens, so that a tile's follow one another.
PagedView factor_view(const PagedView& codes, int64_t pages, char*& data) {
  const int64_t tokens = pages * codes.page_size;
  const PagedView view{.data = data,
                       .dtype = DType::kF32,
                       .pages = pages,
                       .page_size = codes.page_size,
                       .heads = codes.heads,
                       .dim = 1,
                       .stride_page = codes.page_size,
                       .stride_token = 1,
                       .stride_head = tokens};
  data += 4 * tokens * codes.heads;
  return view;
}

ops::DequantizeRows rows_of(const PagedView& codes, const PagedView& scales, const PagedView& out) {
  const int32_t pieces = codes.dim / ops::kCodePiece;
  ops::DequantizeRows rows{.codes = codes,
                           .scales = scales,
                           .out = out,
                           .units = pieces / 2 * codes.heads,
                           .row_units = FastDiv(static_cast<uint32_t>(pieces / 2)),
                           .group_pieces = FastDiv(static_cast<uint32_t>(pieces / scales.dim))};
  while (1 << rows.lanes_log2 < min_of(rows.units, ops::kThreads)) ++rows.lanes_log2;
  return rows;
}

/// As cpp/instances.txt has it.
const char* codes_name(DType codes) {
  return codes == DType::kI8     ? "i8"
         : codes == DType::kE4M3 ? "e4m3"
         : codes == DType::kI4   ? "i4"
                                 : "e2m1";
}

/// Of a block: as many as its threads take at once.
int32_t block_tokens_log2(const ops::DequantizeRows& k, const ops::DequantizeRows& v) {
  int32_t log2 = 0;
  while (2 << log2 <= ops::kThreads * ops::kTokensInFlight) ++log2;
  return log2 - max_of(k.lanes_log2, v.lanes_log2);
}

/// Tokens of the requests that the pass is for, those of few packed rows left out.
struct WideTokens {
  int64_t tokens = 0;
  int32_t requests = 0;
};

WideTokens wide_tokens(const api::AttentionOptions& o, const api::Batch& batch,
                       int32_t narrow_rows) {
  if (narrow_rows == 0) return {batch.kv_slots, static_cast<int32_t>(batch.lengths->size())};
  const int64_t group = o.shape.num_qo_heads / o.shape.num_kv_heads;
  WideTokens wide;
  for (const Request& r : *batch.lengths) {
    if (r.q_len * group <= narrow_rows) continue;
    wide.tokens += round_up<int64_t>(r.kv_len, max_of<int64_t>(batch.page_run, 1));
    ++wide.requests;
  }
  return wide;
}

/// Under a capacity, and where splits are fixed, the kernel must not depend on lengths.
bool may_pass(const api::AttentionOptions& o, const Need& need, const api::Batch& batch) {
  return batch.scaled && !o.latent && batch.v == batch.kv && batch.lengths && !batch.per_head &&
         need.mixed_rows == 0 && !o.capacity.fixed() && !need.rotates && !need.places &&
         !need.variant && !need.sigmoid;
}

}  // namespace

std::optional<Need> dense_need(const api::AttentionOptions& o, const Need& need,
                               const api::Batch& batch, const CodeScales& scales,
                               int32_t narrow_rows) {
  const int32_t dims = o.head_dim_qk + o.head_dim_vo;
  if (!may_pass(o, need, batch)) return std::nullopt;
  const WideTokens wide = wide_tokens(o, batch, narrow_rows);
  if (narrow_rows > 0 && wide.requests > ops::kDenseRequests) return std::nullopt;
  const bool paged = batch.page_run > 0;  // otherwise rows stay where they are
  const int64_t bytes =
      (paged ? wide.tokens : batch.kv_slots) * 2 * dims + batch.kv_slots * factor_bytes(batch.kv);
  if (bytes * o.shape.num_kv_heads > o.dequantize_bytes) return std::nullopt;
  Need dense = need;
  dense.kv = dense.v = batch.q;
  dense.half_scales = false;
  if (batch.kv == DType::kE2M1) {
    dense.scaled = false;
    return dense;
  }
  const bool known = batch.kv == DType::kI8 || batch.kv == DType::kE4M3 || batch.kv == DType::kI4;
  const bool whole = o.head_dim_qk % kNvfp4Group == 0 && o.head_dim_vo % kNvfp4Group == 0;
  if (!known || !whole || need.hooks() || scales.fine()) return std::nullopt;
  dense.halves = scales.halves(batch.kv);
  return dense;
}

bool CodeScales::serve(const Params& p, int head_dim) {
  if (p.k.dtype == DType::kE2M1) return true;
  const bool halves = p.k_scales.dim > 1;
  if (halves && (p.k_scales.dim > 2 || p.k.dim != head_dim)) {
    fine_ = true;
    return false;
  }
  if (p.k.dtype != DType::kI4 || rows_ != halves || (halves_seen_ && !halves)) return true;
  rows_ = !halves;
  halves_seen_ = halves;
  return false;
}

DequantizePass dense_pass(const api::AttentionOptions& o, const api::Batch& batch, double bandwidth,
                          int32_t narrow_rows) {
  const int32_t dims = o.head_dim_qk + o.head_dim_vo;
  const auto bytes = [&](int32_t dim) { return static_cast<int32_t>(row_bytes(batch.kv, dim)); };
  // Scales: of 16 for NVFP4, of 64 or of a row for the others.
  const int32_t scales = batch.kv == DType::kE2M1 ? dims / kNvfp4Group : 8;
  DequantizePass pass{.tokens = wide_tokens(o, batch, narrow_rows).tokens,
                      .code_bytes = bytes(o.head_dim_qk) + bytes(o.head_dim_vo) + scales,
                      .value_bytes = static_cast<int32_t>(2 * dims + factor_bytes(batch.kv))};
  if (bandwidth > 0) pass.bytes_per_second = 0.95 * bandwidth;
  return pass;
}

void DensePages::write(KernelArgs& args, const PlanView& plan, CUstream stream) {
  Params& p = args.params;
  const PlanHeader& header = plan.header();
  const bool values = p.k.dtype == DType::kE2M1;
  const int64_t pages = args.kv_indices ? header.num_kv_indices : header.num_kv_rows;
  ops::DequantizePagesArgs pass{.requests = args.requests,
                                .kv_indices = args.kv_indices,
                                .page_size = args.page_size,
                                .num_requests = header.num_requests};
  int64_t written = pages;
  int32_t longest = header.max_kv_len;
  if (header.num_narrow_workers > 0) {
    pass.named = true;
    pass.num_requests = longest = 0;
    int32_t page = 0;
    for (int32_t i = 0; i < header.num_requests; ++i) {
      const Request r = counted(header, plan.requests()[i]);
      if (int64_t{r.q_len} * header.group_size <= header.narrow_rows) continue;
      pass.some[pass.num_requests++] = {i, args.kv_indices ? page : r.kv_begin};
      page += ceil_div(r.kv_len, header.page_size);
      longest = max_of(longest, r.kv_len);
    }
    if (args.kv_indices) written = page;
  }
  const int64_t of_pages = int64_t{p.k.page_size} * p.k.heads;
  {
    const RelaxedCapture relaxed;
    values_.fit(of_pages * (written * 2 * (p.k.dim + p.v.dim) + pages * factor_bytes(p.k.dtype)));
    ids_.fit(4 * pages + kIdSlack);
  }
  char* data = values_.data();
  pass.k = rows_of(p.k, p.k_scales, dense_view(p.k, p.q.dtype, written, data));
  pass.v =
      rows_of(p.v, p.v_scales, dense_view(p.v, values ? p.q.dtype : DType::kBF16, written, data));
  if (!values) {
    pass.k.a = factor_view(p.k, pages, data);
    pass.k.b = factor_view(p.k, pages, data);
  }
  pass.page_ids = reinterpret_cast<int32_t*>(ids_.data());
  pass.tokens_log2 = block_tokens_log2(pass.k, pass.v);
  pass.parts = max_of(ceil_div(longest, 1 << pass.tokens_log2), 1);
  launch_op("dequantize_pages", {.device = device_, .stream = stream},
            {.blocks = int64_t{pass.parts} * pass.num_requests,
             .blocks_per_sm = 20,
             .kv = codes_name(p.k.dtype)},
            pass);
  p.k = pass.k.out;
  p.v = pass.v.out;
  p.k_scales = pass.k.a;
  p.v_scales = pass.k.b;
  if (args.kv_indices) args.kv_indices = pass.page_ids;
}

}  // namespace flashbsr::cuda
