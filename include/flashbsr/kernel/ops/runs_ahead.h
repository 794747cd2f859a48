// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs of 16 elements of one token after another, the next ones under way while a warp works on
// one. An SM of an H200 has to ask for 27 KB at a time to keep its part of the memory busy (4.5
// TB/s, 800 ns). One run of each lane of 24 warps is 24 KB, less what they lose between two; three
// of them in shared memory are 72, and no registers.
#pragma once

#include <flashbsr/kernel/ops/args.h>
#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::ops {

/// Bytes of a run: 16 elements of 16 bits.
struct RunBits {
  uint4 half[2];
};

/// A warp's 32 runs are 64 chunks of 16 bytes, copied by neighbouring lanes where they follow one
/// another. Of eight chunks every other eight are swapped in pairs: lanes read every second chunk,
/// and so each bank once.
template <int kArch>
class RunsAhead {
 public:
  /// @param run    this lane's, of the first of `count` tokens
  /// @param step   bytes from token to token
  FLASHBSR_DEVICE RunsAhead(const char* run, int64_t step, int32_t count) : step_(step) {
    __shared__ __align__(kRingBytes) uint4 rings[kWarps][kRingBytes / 16];
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t address = reinterpret_cast<uint64_t>(run);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      from_[i] = __shfl_sync(~0u, address, 16 * i + lane / 2) + 16 * (lane % 2);
    }
    const uint32_t ring = ptx::shared_address(rings[threadIdx.x / 32]);
    to_ = ring + 16 * (lane ^ (lane >> 3 & 1));
    at_ = ring + 16 * (2 * lane ^ (lane >> 2 & 1));
    // Kept: worked out again for every run they are ten instructions.
    asm volatile("" : "+r"(to_), "+r"(at_));
    __syncwarp();  // all have read what lay there
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ask(i * kSlotBytes, i < count);
  }

  /// That of token `i` of `count`, one after another. All lanes of the warp.
  FLASHBSR_DEVICE RunBits next(int32_t i, int32_t count) {
    ptx::cp_async_wait<kAhead - 1>();
    __syncwarp();  // every lane's have arrived, and every lane has taken the run before
    const uint32_t slot = i % kSlots * kSlotBytes;
    ask((slot - kSlotBytes) % kRingBytes, i + kAhead < count);
    const uint32_t at = at_ + slot;
    return {{ptx::load_shared_16(at), ptx::load_shared_16(at ^ 16)}};
  }

 private:
  static constexpr uint32_t kSlots = 4, kSlotBytes = 1024, kRingBytes = kSlots * kSlotBytes;
  static constexpr int32_t kAhead = kSlots - 1;

  FLASHBSR_DEVICE void ask(uint32_t slot, bool more) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::cp_async_16_if(to_ + slot + 512 * i, reinterpret_cast<const char*>(from_[i]), more);
      from_[i] += step_;
    }
    ptx::cp_async_commit();
  }

  uint64_t from_[2];  ///< this lane's chunks of the next token to be asked for
  const int64_t step_;
  uint32_t to_, at_;  ///< where the lane's chunks, and its run, are in the first slot
};

/// Before sm_80 one run is under way, to registers.
template <int kArch>
  requires(kArch < 80)
class RunsAhead<kArch> {
 public:
  FLASHBSR_DEVICE RunsAhead(const char* run, int64_t step, int32_t count)
      : from_(run), step_(step) {
    ask(count > 0);
  }
  FLASHBSR_DEVICE RunBits next(int32_t i, int32_t count) {
    const RunBits run = run_;
    ask(i + 1 < count);
    return run;
  }

 private:
  FLASHBSR_DEVICE void ask(bool more) {
    if (more) run_ = *reinterpret_cast<const RunBits*>(from_);
    from_ += step_;
  }

  const char* from_;
  const int64_t step_;
  RunBits run_{};
};

}  // namespace flashbsr::ops
