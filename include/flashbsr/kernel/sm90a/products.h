// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A consumer warpgroup's products: the descriptors of what they read, the instructions, and the
// turns in which warpgroups issue them, so that the softmax of one runs under the products of the
// others (ping-pong; FlashAttention-3, Shah et al., 2024).
#pragma once

#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/wgmma.h>

namespace flashbsr::sm90a {

template <class Traits>
class Products {
 public:
  static constexpr int kWeightSteps = Traits::kKvTile * dtype_size(Traits::kWeightType) / 32;
  /// Steps that the tensor cores have while S of K's first half takes its scales: 200 cycles.
  static constexpr int kFirstSteps = Traits::kKeyHalves ? 3 : kWeightSteps;
  using Weights = uint32_t[kWeightSteps][4];

  /// Descriptors of a step's operands, worked out before its waits.
  struct Operands {
    uint64_t query, key, value;
  };

  /// @param group  the warpgroup's number among the consumers, uniform
  FLASHBSR_DEVICE Products(const Shared<Traits>& shared, int32_t group)
      : group_(group),
        query_base_(ptx::matrix_descriptor(shared.queries + group * 64 * 128, 1024, 16)),
        key_base_(ptx::matrix_descriptor(shared.keys, 1024, 16)),
        value_base_(ptx::matrix_descriptor(
            shared.values, 1024, Traits::kTransposesValues ? 16 : Traits::kKvTile * 128)) {
    // The last warpgroup opens the first one's turn.
    if (kTakesTurns && group == Traits::kConsumers - 1) ptx::named_barrier_arrive(kTurn, 256);
  }

  /// Of the buffers of these stages.
  FLASHBSR_DEVICE Operands operands(int32_t query, int32_t key, int32_t value) const {
    using ptx::descriptor_step;
    return {query_base_ + query * descriptor_step(Traits::kQueryBytes),
            key_base_ + key * descriptor_step(Traits::kKeyBytes),
            value_base_ + value * descriptor_step(Traits::kValueBytes)};
  }

  /// S = Q K^T. Where Q is two matrices they follow each other in its lines.
  /// @tparam kHalf  where K has halves, which of them: the second adds to S
  template <int kHalf = 0, int kCount>
  FLASHBSR_DEVICE void multiply_keys(float (&s)[kCount], const Operands& at) const {
    constexpr int kSteps = Traits::kHeadDimQk * dtype_size(Traits::kType) / 32;
    constexpr int kAll = kSteps * (Traits::kSplitsQueries ? 2 : 1);
    constexpr int kCountOf = Traits::kKeyHalves ? kAll / 2 : kAll;
#pragma unroll
    for (int i = kHalf * kCountOf; i < (kHalf + 1) * kCountOf; ++i) {
      const int k = i % kSteps;
      ptx::wgmma_shared<Traits::kType>(
          s, at.query + ptx::descriptor_step(i / 4 * Traits::kRows * 128 + i % 4 * 32),
          at.key + ptx::descriptor_step(k / 4 * Traits::kKvTile * 128 + k % 4 * 32), i > 0);
    }
    ptx::wgmma_commit();
  }

  /// O += P V, or a sum of its own for this tile, of all dims or of as many as `o` has.
  /// @tparam kBegin, kEnd  of the steps along the tile's tokens
  template <int kBegin = 0, int kEnd = kWeightSteps, int kCount>
  FLASHBSR_DEVICE void multiply_values(float (&o)[kCount], const Weights& p, uint64_t value,
                                       bool adds) const {
#pragma unroll
    for (int k = kBegin; k < kEnd; ++k) {
      ptx::wgmma_registers<Traits::kWeightType>(
          o, p[k], value + ptx::descriptor_step(k * kValueStep), adds || k > 0);
    }
    ptx::wgmma_commit();
  }

  FLASHBSR_DEVICE void take_turn() const {
    if constexpr (kTakesTurns) ptx::named_barrier_sync(kTurn + group_, 256);
  }
  FLASHBSR_DEVICE void give_turn() const {
    const int32_t next = group_ == Traits::kConsumers - 1 ? 0 : group_ + 1;
    if constexpr (kTakesTurns) ptx::named_barrier_arrive(kTurn + next, 256);
  }

 private:
  static constexpr int kTurn = 1;  ///< named barrier of the first warpgroup's turn
  /// With products of e4m3 groups drift apart, which is as fast.
  static constexpr bool kTakesTurns = !Traits::kTransposesValues;
  /// Bytes of V from one product's depth to the next: rows, or parts of transposed ones.
  static constexpr int kValueStep = Traits::kTransposesValues ? 32 : 16 * 128;

  const int32_t group_;
  uint64_t query_base_, key_base_, value_base_;
};

}  // namespace flashbsr::sm90a
