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

bool encode(TensorMap& map, void* data, DType type, const Dim (&dims)[kRank]) {
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
  return api().tensor_map_encode_tiled(
             reinterpret_cast<CUtensorMap*>(&map), data_type(type), kRank, data, extents, strides,
             boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// K or V: boxes of `tokens` tokens of one head. Ragged KV is one page of all tokens.
bool encode_cache(TensorMap& map, const PagedView& v, bool paged, int64_t tokens) {
  const int64_t line = kLineBytes / dtype_size(v.dtype);
  const Dim heads{v.heads, v.stride_head, 1};
  if (paged) {
    return encode(map, v.data, v.dtype,
                  {{v.dim, 1, line},
                   {v.page_size, v.stride_token, tokens},
                   heads,
                   {v.pages, v.stride_page, 1}});
  }
  return encode(map, v.data, v.dtype,
                {{v.dim, 1, line}, {v.pages, v.stride_page, tokens}, heads, {1, 0, 1}});
}

}  // namespace

HopperArgs hopper_args(const KernelArgs& base, const KernelRow& row, const PlanHeader& header) {
  const Params& p = base.params;
  const bool paged = base.kv_indices != nullptr;
  const int64_t group = header.group_size, kv_tile = row.shape.kv_tile;
  HopperArgs args;
  args.base = base;

  const int64_t group_box = min_of<int64_t>(group, row.rows);
  const int64_t token_box = row.rows / group_box;
  const int64_t line = kLineBytes / dtype_size(p.q.dtype);
  args.query_bytes =
      static_cast<int32_t>(round_up<int64_t>(row.head_dim, line) / line * kLineBytes * group_box * token_box);
  if (!encode(args.q, p.q.data, p.q.dtype,
              {{p.q.dim, 1, line},
               {group, p.q.stride_head, group_box},
               {p.q.tokens, p.q.stride_token, token_box},
               {header.num_kv_heads, group * p.q.stride_head, 1}})) {
    throw Error(ErrorCode::kUnsupported, "q",
                "strides that the copy engine of sm_90 cannot follow",
                "positive strides below 2^40 bytes; backend='fa2' takes any");
  }

  const int64_t box = paged ? std::gcd<int64_t>(header.page_size, kv_tile) : kv_tile;
  if (box % 8 == 0 && encode_cache(args.k, p.k, paged, box) &&
      encode_cache(args.v, p.v, paged, box)) {
    args.path = paged ? KvPath::kPaged : KvPath::kRagged;
    args.box_tokens = static_cast<int32_t>(box);
  }
  return args;
}

}  // namespace flashbsr::cuda
