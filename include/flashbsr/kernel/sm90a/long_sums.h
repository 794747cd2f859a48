// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums of O in fp32 in shared memory, beside those of a few tiles that the tensor cores make of
// products of e4m3: they add in 14 bits and truncate, so that what is lost grows with what is
// there. Every few tiles each thread moves its part of O here and begins anew.
//
// A warp's sums lie where its 16 rows of O will be on their way out, so that nobody else's are
// overwritten; a thread has 16 bytes of every 512.
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

template <class Traits>
class LongSums {
 public:
  static constexpr int kCount = Traits::kHeadDimVo / 2;  ///< of a thread
  using Part = float[kCount];

  /// @param group  the warpgroup's number among the consumers
  FLASHBSR_DEVICE LongSums(const Shared<Traits>& shared, int32_t group)
      : group_(group),
        mine_(shared.sums + (group * 4 + ptx::thread_index() / 32 % 4) * 2048 +
              ptx::thread_index() % 32 * 16) {}

  /// Before an item's tiles. The warpgroups move their sums one after the other.
  FLASHBSR_DEVICE void clear() {
    tiles_ = group_ * (Traits::kSummedTiles / Traits::kConsumers);
    moved_ = false;
  }

  /// After the products of a tile.
  FLASHBSR_DEVICE void count(Part& o) {
    if (++tiles_ < Traits::kSummedTiles) return;
    tiles_ = 0;
    add_to(o);
    if (!moved_) {
      // The copy engine may still read rows of the item before.
      if (threadIdx.x % 32 == 0) ptx::tma_store_wait_read();
      __syncwarp();
    }
    moved_ = true;
    each(o, [](uint32_t at, float* x) {
      ptx::store_shared(at, x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = 0.0f;
    });
  }

  /// O += what has been moved.
  FLASHBSR_DEVICE void add_to(Part& o) const {
    if (!moved_) return;
    each(o, [](uint32_t at, float* x) {
      float y[4];
      ptx::load_shared(at, y);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] += y[e];
    });
  }

  /// The sums follow their rows' references, as O does.
  FLASHBSR_DEVICE void rescale(Part& o, const float (&shrink)[2]) const {
    if (!moved_) return;
    each(o, [&](uint32_t at, float*) {
      float y[4];
      ptx::load_shared(at, y);
      ptx::store_shared(at, y[0] * shrink[0], y[1] * shrink[0], y[2] * shrink[1], y[3] * shrink[1]);
    });
  }

 private:
  /// Calls f(address, elements) for every four elements of O.
  template <class F>
  FLASHBSR_DEVICE void each(Part& o, const F& f) const {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      f(mine_ + i / 4 * Traits::kRows * 128 + i % 4 * 512, o + 4 * i);
    }
  }

  const int32_t group_;
  const uint32_t mine_;
  int32_t tiles_ = 0;  ///< that O has the products of
  bool moved_ = false;
};

}  // namespace flashbsr::sm90a
