// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "hopper_args.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>

#include <flashbsr/core/error.h>
#include <flashbsr/core/math.h>

#include "api.h"
#include "choice.h"

namespace flashbsr::cuda {

namespace {

/// Narrow items have stages of so many tokens, or a multiple.
constexpr int64_t kNarrowBoxTokens = 16;
/// Boxes of fewer tokens are too many, a tile has 32 at most, or slower than to gather: 676 TFLOP/s
/// for pages of 4 in place of 691 (4 x 4096, head dim 128), 709 for pages of 5 in place of 690.
/// Where producer warps have other work and one is left for boxes, or two to gather, 4 pay: under
/// RoPE 375 in place of 239, for 16-bit Q over float8 512 in place of 385.
constexpr int64_t kLeastBoxTokens = 5, kLeastBoxTokensPrepared = 4;
constexpr int kLineBytes = 128;  ///< the widest row of a box in 128-byte swizzle

CUtensorMapDataType data_type(DType t) {
  switch (t) {
    case DType::kF16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

int64_t line_of(DType type) { return kLineBytes / dtype_size(type); }

/// Q or O: boxes of whole query tokens, `rows` packed rows or as many as are whole.
const TensorMap* rows_map(MapCache& cache, const RaggedView& a, int64_t kv_heads, int64_t rows) {
  const int64_t group = a.heads / kv_heads, heads = min_of(group, rows);
  return cache.find(a.data, a.dtype,
                    {{a.dim, 1, line_of(a.dtype)},
                     {group, a.stride_head, heads},
                     {a.tokens, a.stride_token, rows / heads},
                     {kv_heads, group * a.stride_head, 1}});
}

/// K or V: boxes of `tokens` tokens of one head. Ragged KV is one page of all tokens.
const TensorMap* cache_map(MapCache& cache, const PagedView& a, bool paged, int64_t tokens) {
  const MapDim dims{a.dim, 1, line_of(a.dtype)}, heads{a.heads, a.stride_head, 1};
  if (!paged) {
    return cache.find(a.data, a.dtype, {dims, {a.pages, a.stride_page, tokens}, heads, {1, 0, 1}});
  }
  return cache.find(
      a.data, a.dtype,
      {dims, {a.page_size, a.stride_token, tokens}, heads, {a.pages, a.stride_page, 1}});
}

/// K and V in boxes; null: they do not serve.
struct KvMaps {
  int64_t box = 0;
  const TensorMap* k = nullptr;
  const TensorMap* v = nullptr;
};

/// What comes beside K: V, or where V is a part of K, the rest of K.
const PagedView& second(const Params& p, const KernelRow& row) {
  return is_latent(row) ? p.k_tail : p.v;
}

KvMaps kv_maps(const Params& p, const KernelRow& row, const PlanHeader& header, bool rotates,
               HopperMaps& maps) {
  const PagedView &k = p.k, &v = second(p, row);
  const bool paged = header.flags & kPlanPaged;
  const int64_t run = paged ? page_run(header.page_size, header.num_kv_tokens) : 0;
  const int64_t box = kv_box(row, run, rotates);
  if (box == 0) return {};
  return {box, cache_map(maps.k, k, paged, box), cache_map(maps.v, v, paged, box)};
}

/// K, V and their scales in boxes of two heads and 16 tokens.
struct PairMaps {
  const TensorMap* k = nullptr;
  const TensorMap* v = nullptr;
  const TensorMap* k_scales = nullptr;
  const TensorMap* v_scales = nullptr;

  bool all() const { return k && v && k_scales && v_scales; }
};

/// @param row_bytes  of a head, and from one to the next
const TensorMap* pair_map(MapCache& cache, const PagedView& a, int64_t row_bytes, bool paged,
                          int64_t tokens) {
  const int64_t size = dtype_size(a.dtype);
  if (a.stride_head * size != row_bytes) return nullptr;
  const MapDim heads{a.heads * row_bytes, 1, 2 * row_bytes}, none{1, 0, 1};
  if (!paged) {
    return cache.find(a.data, DType::kI8,
                      {heads, {a.pages, a.stride_page * size, tokens}, none, none});
  }
  return cache.find(a.data, DType::kI8,
                    {heads,
                     {a.page_size, a.stride_token * size, tokens},
                     {a.pages, a.stride_page * size, 1},
                     none});
}

PairMaps pair_maps(const Params& p, const KernelRow& row, const PlanHeader& header,
                   HopperMaps& maps) {
  constexpr int64_t kScaleBytes = 8;  // of a head: a box has 16 bytes of a token at least
  const bool paged = header.flags & kPlanPaged;
  const auto of = [&](const PagedView& scales) { return scales.dim * dtype_size(scales.dtype); };
  if (of(p.k_scales) != kScaleBytes || of(p.v_scales) != kScaleBytes) return {};
  const int64_t bytes = row_bytes(p.k.dtype, row.head_dim), tokens = row.shape.kv_tile;
  return {pair_map(maps.k, p.k, bytes, paged, tokens), pair_map(maps.v, p.v, bytes, paged, tokens),
          pair_map(maps.k_scales, p.k_scales, kScaleBytes, paged, tokens),
          pair_map(maps.v_scales, p.v_scales, kScaleBytes, paged, tokens)};
}

/// Bytes from one page, or token of a page, to the next; of one there is no next.
int64_t step_of(const PagedView& a, int64_t stride, int64_t extent) {
  return extent > 1 ? stride * dtype_size(a.dtype) : 0;
}
int64_t page_step(const PagedView& a) { return step_of(a, a.stride_page, a.pages); }
int64_t token_step(const PagedView& a) { return step_of(a, a.stride_token, a.page_size); }

GatherSteps gather_steps(const PagedView& a, int64_t unit, const char* name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t page = page_step(a) / unit, token = token_step(a) / unit;
  if (std::abs(page) * (a.pages - 1) + std::abs(token) * (a.page_size - 1) > kMost) {
    throw Error(ErrorCode::kUnsupported, name,
                "rows more than 2^31 x " + std::to_string(unit) + " bytes apart",
                "strides that are multiples of a larger power of two; backend='fa2' takes any");
  }
  return {static_cast<int32_t>(page), static_cast<int32_t>(token)};
}

/// How rows of K and V are found one by one.
void set_gather(HopperArgs& args, const KernelRow& row) {
  const PagedView &k = args.base.params.k, &v = second(args.base.params, row);
  const int64_t all = page_step(k) | token_step(k) | page_step(v) | token_step(v);
  const int64_t unit = all ? min_of(all & -all, int64_t{1} << 20) : 16;  // divides all of them
  args.key_steps = gather_steps(k, unit, "k");
  args.value_steps = gather_steps(v, unit, "v");
  args.gather_unit = static_cast<int32_t>(unit);
}

}  // namespace

int64_t kv_box(const KernelRow& row, int64_t run, bool rotates) {
  int64_t box = run ? std::gcd<int64_t>(run, row.shape.kv_tile) : row.shape.kv_tile;
  if (takes_pair_boxes(row)) return box == row.shape.kv_tile ? box : 0;
  if (is_mixed(row)) box = std::gcd<int64_t>(box, kNarrowBoxTokens);
  // The types of Q and of K and V, where they are not the same.
  const bool widens = std::string_view(row.kv).find('x') != std::string_view::npos;
  const int64_t least =
      is_mixed(row) || widens || rotates ? kLeastBoxTokensPrepared : kLeastBoxTokens;
  return box >= least ? box : 0;
}

bool may_box(const KernelRow& row, const api::Batch& batch, const api::AttentionOptions& options) {
  if (takes_pair_boxes(row) && options.hnd) return false;  // heads lie apart
  return kv_box(row, batch.page_run) > 0;
}

bool takes_boxes(const Params& params, const KernelRow& row, const PlanHeader& header,
                 HopperMaps& maps) {
  if (takes_pair_boxes(row)) return pair_maps(params, row, header, maps).all();
  const KvMaps found = kv_maps(params, row, header, false, maps);
  return found.k && found.v;
}

const TensorMap* MapCache::find(const void* data, DType type, const MapDim (&dims)[kRank]) {
  if (known_ && data == data_ && type == type_ && std::equal(dims, dims + kRank, dims_)) {
    return taken_ ? &map_ : nullptr;
  }
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  cuuint64_t extents[kRank], strides[kRank - 1];
  cuuint32_t boxes[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    extents[i] = static_cast<cuuint64_t>(max_of<int64_t>(dims[i].extent, 1));
    boxes[i] = static_cast<cuuint32_t>(dims[i].box);
    steps[i] = 1;
    if (i == 0) continue;
    // The stride of a dimension of one element is never used, but has to look like one.
    const int64_t bytes = dims[i].extent > 1 ? dims[i].stride * dtype_size(type) : kLineBytes;
    strides[i - 1] = static_cast<cuuint64_t>(bytes);
  }
  const int64_t line = dims[0].box * dtype_size(type);
  taken_ =
      api().tensor_map_encode_tiled(
          reinterpret_cast<CUtensorMap*>(&map_), data_type(type), kRank, const_cast<void*>(data),
          extents, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
          line == kLineBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
          CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  data_ = data;
  type_ = type;
  std::copy(dims, dims + kRank, dims_);
  known_ = true;
  return taken_ ? &map_ : nullptr;
}

HopperArgs hopper_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header,
                       HopperMaps& maps) {
  const Params& p = base.params;
  const int64_t group = header.group_size;
  HopperArgs args;
  args.base = base;

  const int64_t heads = min_of<int64_t>(group, row.rows);  // of a group, in a tile
  const int64_t tokens = row.rows / heads;
  const TensorMap* q = rows_map(maps.q, p.q, header.num_kv_heads, heads * tokens);
  // The rows of requests that share KV may lie anywhere; a captured run may be replayed for them.
  const TensorMap* q_token =
      header.max_q_rows > 0 ? rows_map(maps.q_token, p.q, header.num_kv_heads, heads) : q;
  if (!q || !q_token) {
    throw Error(ErrorCode::kUnsupported, "q", "strides that the copy engine of sm_90 cannot follow",
                "positive strides below 2^40 bytes; backend='fa2' takes any");
  }
  args.q = *q;
  args.q_token = *q_token;
  args.query_tokens = static_cast<int32_t>(tokens);
  const int64_t row_bytes =
      round_up<int64_t>(row.head_dim * dtype_size(p.q.dtype), kLineBytes);  // boxes are padded
  args.query_bytes = static_cast<int32_t>(row_bytes * heads * tokens);
  if (16 % group == 0 && dtype_size(p.out.dtype) == 2) {
    const TensorMap* out = rows_map(maps.out, p.out, header.num_kv_heads, 16);
    args.store_boxes = out != nullptr;
    if (out) args.out = *out;
  }

  args.cluster = max_of(header.cluster_parts, 1);
  const bool rotates = row.copies == KvCopies::kEither && p.rope.fine;
  const KvMaps kv =
      row.copies == KvCopies::kRows ? KvMaps{} : kv_maps(p, row, header, rotates, maps);
  if (kv.k && kv.v) {
    args.k = *kv.k;
    args.v = *kv.v;
    args.path = header.flags & kPlanPaged ? KvPath::kPaged : KvPath::kRagged;
    args.box_tokens = static_cast<int32_t>(kv.box);
    return args;
  }
  set_gather(args, row);
  return args;
}

PairArgs pair_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header,
                   HopperMaps& maps) {
  const PairMaps found = pair_maps(base.params, row, header, maps);
  PairArgs args;
  args.base = base;
  args.k = *found.k;
  args.v = *found.v;
  args.k_scales = *found.k_scales;
  args.v_scales = *found.v_scales;
  return args;
}

}  // namespace flashbsr::cuda
