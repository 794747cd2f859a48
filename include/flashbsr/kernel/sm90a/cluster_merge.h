// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges of latent attention without global memory: the parts of a tile are the items of the blocks
// of a cluster (plans of kPolicyCluster). A block leaves what its part weighs, O times that weight
// where its K were, and adds up its share of what all have left:
//
//   lse -> | weight O | -> | sum of 1 / parts of O -> output
//          cluster barriers
//
// A state of 64 rows of 512 dims is 128 KB. Written to global memory and read again by whoever was
// idle they took 13 of 27 us at 16 x 1024 tokens (H200). docs/kernels/mla.md.
#pragma once

#include <flashbsr/kernel/sm90a/epilogue.h>
#include <flashbsr/ptx/cluster.h>

namespace flashbsr::sm90a {

inline constexpr int kMostClusterParts = 16;

/// A row by its LSEs of all parts, which are at one address in every block. kLanes lanes of a warp
/// have a row, and ask for the LSEs of as many parts each at once, since a way through the cluster
/// takes 200 ns.
template <int kLanes>
struct WeighedRow {
  static constexpr int kEach = kMostClusterParts / kLanes;
  float lse[kEach];  ///< of parts thread % kLanes, and so on
  float from;        ///< what they are compared with
  RowEnd end;        ///< of the row, whose factor is that of weights 2^(lse - from)

  FLASHBSR_DEVICE WeighedRow(const Params& p, int32_t q_head, int32_t kv_head, uint32_t address,
                             uint32_t parts) {
    const int32_t lane = ptx::thread_index() % kLanes;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t part = lane + kLanes * i;
      const bool exists = static_cast<uint32_t>(part) < parts;
      const uint32_t there = ptx::cluster_address(address, exists ? part : 0);
      lse[i] = exists ? ptx::load_cluster(there) : -infinity();
    }
    float top = lse[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) top = ptx::max(top, lse[i]);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      top = ptx::max(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    }
    from = top == -infinity() ? 0.0f : top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += ptx::exp2(lse[i] - from);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    const float all = sum == 0.0f ? -infinity() : top + ptx::log2(sum);
    end = end_row<true>(p, value_scale(p, kv_head), p.sinks ? q_head : 0, sum, all);
  }

  /// What O of the part with the LSE `own` weighs in the output.
  FLASHBSR_DEVICE float weight(float own) const { return end.factor * ptx::exp2(own - from); }
};

/// The block's share of the dims of O, added up over the parts of a tile.
/// @param mine  address of the thread's first four floats in every block
/// @param out   its two rows; null: there is no such row
template <class Traits, int kParts>
FLASHBSR_DEVICE void add_parts(uint32_t mine, char* const (&out)[2], const Params& p,
                               int32_t group) {
  constexpr int kVectors = Traits::kOutputDims / 8, kThreads = 128 * Traits::kConsumers;
  // Vectors whose loads are under way at once: 16 loads, or 18.
  constexpr int kEach = ceil_div(ceil_div(kVectors, kParts), 2);
  const auto rank = static_cast<int32_t>(ptx::cluster_rank());
  const int32_t end = (rank + 1) * kVectors / kParts;
#pragma unroll 1
  for (int32_t first = rank * kVectors / kParts; first < end; first += kEach) {
    float x[kEach][kParts][4];
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      const uint32_t there = mine + min_of(first + v, end - 1) * kThreads * 16;
#pragma unroll
      for (int i = 0; i < kParts; ++i) ptx::load_cluster(ptx::cluster_address(there, i), x[v][i]);
    }
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
#pragma unroll
      for (int i = 1; i < kParts; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) x[v][0][k] += x[v][i][k];
      }
    }
    with_output_size(p.out.dtype, [&]<int kSize>() {
#pragma unroll
      for (int v = 0; v < kEach; ++v) {
        if (kVectors % kParts && first + v >= end) break;
        const int32_t d =
            group * Traits::kOutputDims + 8 * (first + v) + ptx::thread_index() % 4 * 2;
        const float low[2] = {x[v][0][0], x[v][0][1]}, high[2] = {x[v][0][2], x[v][0][3]};
        if (out[0]) store_sized<kSize>(out[0], p.out.dtype, d, p.v.dim, low);
        if (out[1]) store_sized<kSize>(out[1], p.out.dtype, d, p.v.dim, high);
      }
    });
  }
}

/// All threads of both consumer warpgroups, in all blocks of the cluster, each block for its part
/// of one tile; producers come to the first barrier only. `states` is what row_states() says of a
/// part.
template <class Traits, class Loop>
FLASHBSR_DEVICE void merge_in_cluster(const HopperArgs& args, const Shared<Traits>& shared,
                                      const Tile& tile, int32_t group, const Loop& loop,
                                      const RowStates& states) {
  constexpr int kVectors = Traits::kOutputDims / 8;  // of four floats, two of each row
  constexpr int kThreads = 128 * Traits::kConsumers;
  static_assert(kVectors * kThreads * 16 <= Traits::kStages * Traits::kKeyBytes);
  const Params& p = args.base.params;
  const int32_t thread = ptx::thread_index() - 128, first = first_row(0);
  const uint32_t parts = static_cast<uint32_t>(args.cluster);
  const uint32_t lses = shared.queries + Traits::kStateOffset;
  const uint32_t mine = shared.keys + thread * 16;
  if (group == 0 && thread % 4 == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::store_shared(lses + 4 * (first + 8 * h), __float_as_uint(states.lse[h]));
    }
  }
  ptx::cluster_sync();

  RowEnd end[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = first + 8 * h;
    const RowName row(args.base, tile.item, r);
    const WeighedRow<4> weighed(p, row.q_head, tile.item.kv_head, lses + 4 * r, parts);
    end[h] = {weighed.weight(states.lse[h]), weighed.end.lse};
  }
  const float a = end[0].factor * states.factor[0], b = end[1].factor * states.factor[1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    ptx::store_shared(mine + v * kThreads * 16, loop.o[4 * v] * a, loop.o[4 * v + 1] * a,
                      loop.o[4 * v + 2] * b, loop.o[4 * v + 3] * b);
  }
  ptx::cluster_sync();

  char* out[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = first + 8 * h;
    const RowName row(args.base, tile.item, r);
    const int64_t token = static_cast<int64_t>(tile.request.q_begin) + row.token;
    out[h] = r < tile.item.row_count ? p.out.row(token, row.q_head) : nullptr;
    if (ptx::cluster_rank() == 0 && group == 0 && thread % 4 == 0 && out[h]) {
      write_lse(p, token, row.q_head, end[h].lse);
    }
  }
  const auto add = [&]<int kParts>() { add_parts<Traits, kParts>(mine, out, p, group); };
  switch (parts) {
    case 2: add.template operator()<2>(); break;
    case 4: add.template operator()<4>(); break;
    case 8: add.template operator()<8>(); break;
    case 16: add.template operator()<16>(); break;
    default:  // consumers beside wideners have no registers for these
      if constexpr (Traits::kWideners == 0) {
        if (parts == 3) add.template operator()<3>();
        if (parts == 6) add.template operator()<6>();
      }
  }
  ptx::cluster_sync();  // nobody's memory goes before it has been read
}

}  // namespace flashbsr::sm90a
