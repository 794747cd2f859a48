// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Tensor maps of the fake driver. It refuses what the documentation of cuTensorMapEncodeTiled does,
// and writes the array's shape into the map as plain words; a launch then looks whether the maps
// that a kernel got lead to the same rows as its views.
#pragma once

#include <cuda.h>

#include <string>
#include <utility>

#include <flashbsr/core/launch.h>

namespace fake {

constexpr int kRank = 4;
constexpr uint64_t kTensorMapMagic = 0x70614d726f736e54;  // "TnsorMap" in memory

/// What encode() writes.
struct EncodedMap {
  uint64_t magic;
  uint64_t address;
  uint64_t extent[kRank];
  uint64_t stride[kRank];  ///< bytes
  uint16_t box[kRank];
  uint8_t type, swizzle, fill, rest[37];

  /// Address of an element. Outside of the array there is none.
  const char* at(uint64_t x, uint64_t y, uint64_t z, uint64_t w) const {
    const uint64_t place[kRank] = {x, y, z, w};
    uint64_t sum = address;
    for (int i = 0; i < kRank; ++i) {
      if (place[i] >= extent[i]) return nullptr;
      sum += place[i] * stride[i];
    }
    return reinterpret_cast<const char*>(sum);
  }
};
static_assert(sizeof(EncodedMap) == sizeof(CUtensorMap));

inline uint64_t element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    default: return 0;
  }
}

/// The limits of an array and of a box. Whole lines are swizzled. Interleaved layouts and other
/// swizzles are not used here.
inline bool encode(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* address,
                   const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                   const cuuint32_t* steps, CUtensorMapInterleave interleave,
                   CUtensorMapSwizzle swizzle, CUtensorMapFloatOOBfill fill) {
  const uint64_t bytes = element_bytes(type), at = reinterpret_cast<uint64_t>(address);
  bool ok = rank == kRank && bytes != 0 && reinterpret_cast<uint64_t>(map) % 64 == 0 &&
            address != nullptr && at % 16 == 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
            swizzle ==
                (box[0] * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE) &&
            box[0] * bytes <= 128 && box[0] * bytes % 16 == 0 &&
            fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  for (int i = 0; ok && i < kRank; ++i) {
    ok = extents[i] >= 1 && extents[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 &&
         steps[i] >= 1 && steps[i] <= 8;
    if (i > 0) ok = ok && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
  }
  if (!ok) return false;
  EncodedMap& out = *reinterpret_cast<EncodedMap*>(map);
  out = {.magic = kTensorMapMagic, .address = at};
  for (int i = 0; i < kRank; ++i) {
    out.extent[i] = extents[i];
    out.stride[i] = i == 0 ? bytes : strides[i - 1];
    out.box[i] = static_cast<uint16_t>(box[i]);
  }
  out.type = static_cast<uint8_t>(type);
  out.swizzle = static_cast<uint8_t>(swizzle);
  out.fill = static_cast<uint8_t>(fill);
  return true;
}

inline const EncodedMap& read(const flashbsr::TensorMap& map) {
  return reinterpret_cast<const EncodedMap&>(map);
}

/// Whether the map of K or V leads to the view's rows: at the ends of every dimension.
inline bool leads_to(const flashbsr::TensorMap& encoded, const flashbsr::PagedView& view,
                     flashbsr::KvPath path, int box_tokens) {
  const EncodedMap& map = read(encoded);
  if (map.magic != kTensorMapMagic || map.box[1] != box_tokens || map.box[2] * map.box[3] != 1 ||
      map.extent[0] != static_cast<uint64_t>(view.dim)) {
    return false;
  }
  const bool paged = path == flashbsr::KvPath::kPaged;
  for (const int64_t page : {int64_t{0}, view.pages - 1}) {
    for (const int slot : {0, view.page_size - 1}) {
      for (const int head : {0, view.heads - 1}) {
        const auto [y, w] =
            paged ? std::pair<int64_t, int64_t>{slot, page} : std::pair<int64_t, int64_t>{page, 0};
        const char* found = map.at(0, static_cast<uint64_t>(y), static_cast<uint64_t>(head),
                                   static_cast<uint64_t>(w));
        if (found != view.row(page, slot, head)) return false;
      }
    }
  }
  return true;
}

/// The same of Q, whose heads are a dimension within a KV head's group and one of groups.
inline bool leads_to(const flashbsr::TensorMap& encoded, const flashbsr::RaggedView& view,
                     int group) {
  const EncodedMap& map = read(encoded);
  if (map.magic != kTensorMapMagic || map.extent[0] != static_cast<uint64_t>(view.dim)) {
    return false;
  }
  for (const int64_t token : {int64_t{0}, view.tokens - 1}) {
    for (const int head : {0, group - 1, view.heads - group, view.heads - 1}) {
      const char* found = map.at(0, static_cast<uint64_t>(head % group),
                                 static_cast<uint64_t>(token), static_cast<uint64_t>(head / group));
      if (found != view.row(token, head)) return false;
    }
  }
  return true;
}

/// What the launch of a Hopper kernel must hold.
inline bool consistent(const flashbsr::HopperArgs& args) {
  const flashbsr::KernelArgs& base = args.base;
  const flashbsr::Params& p = base.params;
  if (!leads_to(args.q, p.q, static_cast<int>(base.group.divisor))) return false;
  if (args.path == flashbsr::KvPath::kGather) return true;
  if ((args.path == flashbsr::KvPath::kPaged) != (base.kv_indices != nullptr)) return false;
  return leads_to(args.k, p.k, args.path, args.box_tokens) &&
         leads_to(args.v, p.k_tail.dim ? p.k_tail : p.v, args.path, args.box_tokens);
}

/// Whether a map of two heads' rows of bytes leads to the view's rows.
inline bool leads_to_pairs(const flashbsr::TensorMap& encoded, const flashbsr::PagedView& view,
                           int64_t row_bytes, bool paged) {
  const EncodedMap& map = read(encoded);
  if (map.magic != kTensorMapMagic || map.box[0] != 2 * row_bytes ||
      map.extent[0] != static_cast<uint64_t>(view.heads * row_bytes) ||
      map.box[1] * map.box[2] * map.box[3] != 16) {
    return false;
  }
  for (const int64_t page : {int64_t{0}, view.pages - 1}) {
    for (const int slot : {0, view.page_size - 1}) {
      for (const int head : {0, view.heads - 1}) {
        const char* found = map.at(static_cast<uint64_t>(head * row_bytes),
                                   static_cast<uint64_t>(paged ? slot : page),
                                   static_cast<uint64_t>(paged ? page : 0), 0);
        if (found != view.row(page, slot, head)) return false;
      }
    }
  }
  return true;
}

/// What the launch of decode_pairs must hold; of others nothing.
inline bool pairs_consistent(const std::string& name, const void* launched) {
  if (!name.starts_with("decode_pairs_sm90")) return true;
  const auto& args = *static_cast<const flashbsr::PairArgs*>(launched);
  const flashbsr::Params& p = args.base.params;
  const bool paged = args.base.kv_indices != nullptr;
  return leads_to_pairs(args.k, p.k, p.k.dim / 2, paged) &&
         leads_to_pairs(args.v, p.v, p.v.dim / 2, paged) &&
         leads_to_pairs(args.k_scales, p.k_scales, 8, paged) &&
         leads_to_pairs(args.v_scales, p.v_scales, 8, paged);
}

}  // namespace fake
