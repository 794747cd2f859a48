// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Merges of few latent rows without global memory, as cluster_merge.h has them for 64: the parts of
// a tile are the items of the blocks of a cluster. 32 KB of O lie ready in the shared memory of
// each, so one barrier is enough: a block reads its share of the dims of all, and their LSEs
// meanwhile.
#pragma once

#include <flashbsr/kernel/sm90a/cluster_merge.h>

namespace flashbsr::sm90a {

/// Where rows of O lie in shared memory, as floats. Of the rows that the four lanes of a quad have
/// at once dims lie 8 apart.
template <class Traits>
struct FewRows {
  uint32_t address;

  FLASHBSR_DEVICE explicit FewRows(const Shared<Traits>& shared)
      : address(shared.queries + Traits::kWeightOffset) {
    static_assert(Traits::kRows * Traits::kHeadDimVo * 4 <= Traits::kAllWeightBytes);
  }
  FLASHBSR_DEVICE uint32_t at(int32_t row, int32_t dim) const {
    return address + 4 * (row * Traits::kHeadDimVo + (dim ^ row / 2 % 4 * 8));
  }
};

/// All consumers, in all blocks of a cluster, each block with its part of one tile; producers come
/// to the first barrier only.
template <class Traits>
class FewMerge {
 public:
  FLASHBSR_DEVICE FewMerge(const HopperArgs& args, const Shared<Traits>& shared, const Tile& tile)
      : args_(args),
        tile_(tile),
        rows_(shared),
        lses_(shared.queries + Traits::kMergeOffset),
        weights_(lses_ + 4 * Traits::kRows) {}

  /// Of a row of this block's part, in base 2; before run().
  FLASHBSR_DEVICE void leave_lse(int32_t row, float lse) const {
    ptx::store_shared(lses_ + 4 * row, float_bits(lse));
  }

  /// @param meet  a barrier of the block's consumers
  template <class Meet>
  FLASHBSR_DEVICE void run(const Meet& meet) const {
    ptx::cluster_sync();
    switch (args_.cluster) {
      case 2: share<2>(meet); break;
      case 4: share<4>(meet); break;
      case 8: share<8>(meet); break;
      default: share<kMost>(meet);
    }
    ptx::cluster_sync();  // nobody's memory goes before it has been read
  }

 private:
  static constexpr int kMost = kMostClusterParts, kThreads = 128 * Traits::kConsumers;
  static_assert(kThreads == Traits::kRows * kMost);

  /// The block's share: rows, of 16 parts one. A warp's vectors are of one row.
  template <int kParts, class Meet>
  FLASHBSR_DEVICE void share(const Meet& meet) const {
    // Of 16 parts pairs, so that every thread has one: with four floats for half of them a merge
    // took 3.5 us, of 8 parts 2.
    constexpr int kWidth = kParts == kMost ? 2 : 4, kRowVectors = Traits::kHeadDimVo / kWidth;
    constexpr int kShare = Traits::kRows * kRowVectors / kParts;
    constexpr int kVectors = kShare / kThreads;  // of a thread
    static_assert(kVectors * kThreads == kShare);
    const int32_t thread = ptx::thread_index() - 128;
    const int32_t first = static_cast<int32_t>(ptx::cluster_rank()) * kShare;
    float x[kVectors][kParts][kWidth];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = first + v * kThreads + thread;
      const uint32_t here = rows_.at(at / kRowVectors, at % kRowVectors * kWidth);
#pragma unroll
      for (int p = 0; p < kParts; ++p) ptx::load_cluster(ptx::cluster_address(here, p), x[v][p]);
    }
    weigh<kParts>(thread, first / kRowVectors);
    meet();
    const Params& p = args_.base.params;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int32_t at = first + v * kThreads + thread, r = at / kRowVectors;
      float sum[kWidth] = {};
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float weight = __uint_as_float(ptx::load_shared(weights_ + 4 * (r * kMost + i)));
#pragma unroll
        for (int k = 0; k < kWidth; ++k) sum[k] += weight * x[v][i][k];
      }
      if (r >= tile_.item.row_count) continue;
      const RowName row(args_.base, tile_.item, r);
      char* const out = p.out.row(token(row), row.q_head);
      store_values<kArch>(out, p.out.dtype, at % kRowVectors * kWidth, p.v.dim, sum);
    }
  }

  /// What each row of each part weighs: a thread for each. The LSEs of the share's rows go out.
  template <int kParts>
  FLASHBSR_DEVICE void weigh(int32_t thread, int32_t first_row) const {
    const Params& p = args_.base.params;
    const int32_t r = thread / kMost, part = thread % kMost;
    const RowName row(args_.base, tile_.item, min_of(r, tile_.item.row_count - 1));
    const WeighedRow<kMost> weighed(p, row.q_head, tile_.item.kv_head, lses_ + 4 * r, kParts);
    ptx::store_shared(weights_ + 4 * (r * kMost + part),
                      float_bits(weighed.weight(weighed.lse[0])));
    const bool own = r >= first_row && r < first_row + Traits::kRows / kParts;
    if (part == 0 && own && r < tile_.item.row_count) {
      write_lse(p, token(row), row.q_head, weighed.end.lse);
    }
  }

  FLASHBSR_DEVICE int64_t token(const RowName& row) const {
    return static_cast<int64_t>(tile_.request.q_begin) + row.token;
  }

  const HopperArgs& args_;
  const Tile& tile_;
  const FewRows<Traits> rows_;
  const uint32_t lses_, weights_;  ///< [kRows], [kRows][kMost]
};

}  // namespace flashbsr::sm90a
