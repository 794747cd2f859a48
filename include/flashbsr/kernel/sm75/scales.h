// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Scales of a tile's tokens on Turing, by registers like the tile itself. Those of K meet logits in
// fp32. Those of V meet weights, which become fp16 here: divided by a power of two above the
// largest so far of the item, they leave weights no larger than they were. O counts in that unit
// and is turned to a larger one when it comes, as it is to another maximum.
#pragma once

#include <flashbsr/kernel/sm80/loader.h>
#include <flashbsr/ptx/math.h>

namespace flashbsr::sm75 {

/// Of K and V without any.
template <class Traits, bool kAny = Traits::kTokenScales>
struct TokenScales {
  FLASHBSR_DEVICE TokenScales(char*, const sm80::BlockState&) {}
  FLASHBSR_DEVICE void begin() {}
  FLASHBSR_DEVICE void fetch(const sm80::KvLoader<Traits>&, const Params&, uint32_t, int32_t) {}
  FLASHBSR_DEVICE void store(uint32_t) {}
  template <class Loop>
  FLASHBSR_DEVICE void turn(Loop&, uint32_t) {}
  template <class Loop>
  FLASHBSR_DEVICE void finish(Loop&) const {}
};

/// This thread's scales: thread t those of K of the tile's token t, thread kTokens + t of V.
template <class Traits>
class TokenScales<Traits, true> {
  static constexpr int kTokens = Traits::kKvTile, kWords = Traits::kScaleWords;
  static constexpr bool kInt4 = Traits::kKv == DType::kI4;
  static_assert(kTokens == 32, "V's are those of a warp");

 public:
  FLASHBSR_DEVICE TokenScales(char* memory, const sm80::BlockState& state)
      : scales_(state.token_scales),
        units_(reinterpret_cast<float*>(memory + Traits::kUnitOffset)) {}

  /// At the beginning of an item.
  FLASHBSR_DEVICE void begin() {
    exponent_ = 1;
    applied_ = 0.0f;
  }

  /// Of the tile noted in `slot`, of which `count` tokens are the item's. Others have zeros, so
  /// that weights of nothing stay nothing.
  FLASHBSR_DEVICE void fetch(const sm80::KvLoader<Traits>& loader, const Params& p, uint32_t slot,
                             int32_t count) {
    const int32_t thread = ptx::thread_index();
    if (thread >= 2 * kTokens) return;
    const PagedView& scales = thread < kTokens ? p.k_scales : p.v_scales;
    const char* const from = loader.scales(slot, thread);
    const bool inside = thread % kTokens < count;
    const int32_t bytes = scales.dim * Traits::kScaleSize;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words_[i] = 0;
      if (!inside || 4 * i >= bytes) continue;
      if (!Traits::kPacked && scales.dtype == DType::kF16) {
        const uint32_t half = *reinterpret_cast<const uint16_t*>(from);
        words_[i] = float_bits(ptx::unpack_low<DType::kF16>(half));
      } else {
        words_[i] = *reinterpret_cast<const uint32_t*>(from + 4 * i);
      }
    }
  }

  /// Into shared memory; a barrier follows.
  FLASHBSR_DEVICE void store(uint32_t slot) {
    const int32_t thread = ptx::thread_index();
    if (thread >= 2 * kTokens) return;
    if constexpr (Traits::kHasUnit) {
      if (thread >= kTokens) shrink(slot);
    }
    float* const to = scales_ + (slot * 2 * kTokens + thread) * kWords;
#pragma unroll
    for (int i = 0; i < kWords; ++i) to[i] = bits_float(words_[i]);
  }

  /// Turns O to the unit of the tile in `slot`, before its weights.
  template <class Loop>
  FLASHBSR_DEVICE void turn(Loop& loop, uint32_t slot) {
    if constexpr (Traits::kHasUnit) {
      const float unit = units_[slot];
      if (unit == applied_) return;
      multiply(loop, applied_ / unit);
      applied_ = unit;
    }
  }

  /// Behind the last tile O counts in ones.
  template <class Loop>
  FLASHBSR_DEVICE void finish(Loop& loop) const {
    if constexpr (Traits::kHasUnit) multiply(loop, applied_);
  }

 private:
  /// int4 has its zero point in the last bits of a scale.
  FLASHBSR_DEVICE static float scale_of(uint32_t word) {
    return bits_float(kInt4 ? word & ~15u : word);
  }

  /// All lanes of a warp.
  FLASHBSR_DEVICE void shrink(uint32_t slot) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t size = float_bits(scale_of(words_[i])) & 0x7fffffffu;
      if (size < 0x7f800000u) largest = max_of(largest, size);  // finite
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      largest = max_of(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    exponent_ = max_of(exponent_, min_of((largest >> 23) + 1, 253u));
    const float inverse = bits_float((254u - exponent_) << 23);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t scaled = float_bits(scale_of(words_[i]) * inverse);
      words_[i] = kInt4 ? (scaled & ~15u) | (words_[i] & 15u) : scaled;
    }
    units_[slot] = bits_float(exponent_ << 23);
  }

  template <class Loop>
  FLASHBSR_DEVICE static void multiply(Loop& loop, float factor) {
#pragma unroll
    for (int b = 0; b < Loop::kBands; ++b) {
#pragma unroll
      for (int n = 0; n < Loop::kDimTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) loop.o[b][n][e] *= factor;
      }
    }
  }

  float* const scales_;  ///< of two tiles
  float* const units_;   ///< of two tiles
  uint32_t words_[kWords];
  uint32_t exponent_ = 1;  ///< of the unit, as a float has it; of V's threads
  float applied_ = 0.0f;   ///< the unit that O counts in
};

}  // namespace flashbsr::sm75
