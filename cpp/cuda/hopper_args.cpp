// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "hopper_args.h"

#include <numeric>

#include <flashbsr/core/error.h>
#include <flashbsr/core/math.h>

#include "api.h"

namespace flashbsr::cuda {

namespace {

/// One dimension of an array, and what a box takes of it.
struct Dim {
  int64_t extent;
  int64_t stride;  ///< elements; ignored for the innermost
  int64_t box;
};

constexpr int kRank = 4;
constexpr int kLineBytes = 128;  ///< the widest row of a box in 128-byte swizzle

CUtensorMapDataType data_type(DType t) {
  switch (t) {
    case DType::kF16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

template <class View>
bool encode(TensorMap& map, const View& view, const Dim (&dims)[kRank]) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  const DType type = view.dtype;
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
  return api().tensor_map_encode_tiled(
             reinterpret_cast<CUtensorMap*>(&map), data_type(type), kRank, view.data, extents,
             strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

int64_t line_of(DType type) { return kLineBytes / dtype_size(type); }

/// Q or O: boxes of whole query tokens, `rows` packed rows or as many as are whole.
bool encode_rows(TensorMap& map, const RaggedView& a, int64_t kv_heads, int64_t rows) {
  const int64_t group = a.heads / kv_heads, heads = min_of(group, rows);
  return encode(map, a,
                {{a.dim, 1, line_of(a.dtype)},
                 {group, a.stride_head, heads},
                 {a.tokens, a.stride_token, rows / heads},
                 {kv_heads, group * a.stride_head, 1}});
}

/// K or V: boxes of `tokens` tokens of one head. Ragged KV is one page of all tokens.
bool encode_cache(TensorMap& map, const PagedView& a, bool paged, int64_t tokens) {
  const Dim dims{a.dim, 1, line_of(a.dtype)}, heads{a.heads, a.stride_head, 1};
  if (!paged) return encode(map, a, {dims, {a.pages, a.stride_page, tokens}, heads, {1, 0, 1}});
  return encode(map, a,
                {dims, {a.page_size, a.stride_token, tokens}, heads, {a.pages, a.stride_page, 1}});
}

}  // namespace

HopperArgs hopper_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header) {
  const Params& p = base.params;
  const int64_t group = header.group_size, kv_tile = row.shape.kv_tile;
  HopperArgs args;
  args.base = base;

  if (!encode_rows(args.q, p.q, header.num_kv_heads, row.rows)) {
    throw Error(ErrorCode::kUnsupported, "q", "strides that the copy engine of sm_90 cannot follow",
                "positive strides below 2^40 bytes; backend='fa2' takes any");
  }
  const int64_t rows =
      row.rows / min_of<int64_t>(group, row.rows) * min_of<int64_t>(group, row.rows);
  const int64_t row_bytes =
      round_up<int64_t>(row.head_dim * dtype_size(p.q.dtype), kLineBytes);  // boxes are padded
  args.query_bytes = static_cast<int32_t>(row_bytes * rows);
  args.store_boxes = 16 % group == 0 && dtype_size(p.out.dtype) == 2 &&
                     encode_rows(args.out, p.out, header.num_kv_heads, 16);

  const bool paged = base.kv_indices != nullptr;
  const int64_t box = paged ? std::gcd<int64_t>(header.page_size, kv_tile) : kv_tile;
  if (box % 8 == 0 && encode_cache(args.k, p.k, paged, box) &&
      encode_cache(args.v, p.v, paged, box)) {
    args.path = paged ? KvPath::kPaged : KvPath::kRagged;
    args.box_tokens = static_cast<int32_t>(box);
  }
  return args;
}

}  // namespace flashbsr::cuda
