// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The ring of a warp that streams packed codes of two KV heads, filled by TMA: a lane asks for 16
// tokens' K, V and scales of both heads by four instructions, where packed_loader.h has ten copies
// and the addresses of each lane. Where boxes are is looked up for up to 32 stages of an item at
// once, a stage per lane, and a batch ahead; it is noted in shared memory, since there are no
// registers for it.
#pragma once

#include <flashbsr/kernel/decode/epilogue.h>
#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/mbarrier.h>
#include <flashbsr/ptx/shared.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/ptx/tma.h>

namespace flashbsr {

template <class Traits>
class PairRing {
 public:
  FLASHBSR_DEVICE PairRing(const PairArgs& args, const DecodeShared<Traits>& shared, int warp,
                           int lane)
      : args_(args),
        shared_(shared),
        rows_(shared.rows(warp)),
        warp_(warp),
        lane_(lane),
        lane_row_(ptx::not_ahead(shared.ring(warp) + lane_offset(lane))) {}

  /// One thread, before the warps begin.
  FLASHBSR_DEVICE static void init_barriers(DecodeRows<Traits>& rows) {
#pragma unroll
    for (uint64_t& full : rows.full) ptx::mbarrier_init(ptx::shared_address(&full), 1);
    ptx::fence_mbarrier_init();
  }

  /// Stages begin where boxes of pages do: before the item, perhaps.
  FLASHBSR_DEVICE int32_t first_position(const DecodeItem& item) const {
    const int32_t align = args_.base.kv_indices ? Traits::kKvTile : 1;
    return (item.kv_begin & -align) + warp_ * Traits::kKvTile;
  }

  /// As DecodeRing::begin.
  FLASHBSR_DEVICE void begin(int, int, int turn, bool prefetches) {
    turn_ = turn;
    next_item_ = -1;
    next_item();
    look_up();
    next_batch();
    if (!prefetches || left_ == 0 || !ptx::elect_one()) return;
    const PairBox box = next_box();
    ptx::tma_prefetch(args_.k, box.codes, box.token, box.page, 0);
    ptx::tma_prefetch(args_.v, box.codes, box.token, box.page, 0);
  }

  /// Both are copied when V has been multiplied.
  FLASHBSR_DEVICE void produce_keys() {}

  FLASHBSR_DEVICE void produce_values() {
    __syncwarp();  // all have read what lay there
    if (left_ > 0) {
      copy();
      if (--left_ == 0) next_batch();
    }
    state_ ^= 1;
  }

  FLASHBSR_DEVICE uint32_t wait_for_keys() {
    ptx::mbarrier_wait<Traits::kArch>(full(), state_ >> 1 & 1);
    state_ ^= (state_ & 1) << 1;
    return lane_row_ + slot() * Traits::kStageBytes;
  }
  /// @param cut  some tokens may not be the item's: their scales become zeros as their weights are,
  ///             since 0 x NaN is NaN
  FLASHBSR_DEVICE uint32_t wait_for_values(const DecodeItem& item, int32_t position, bool cut) {
    if (cut) clean(item.kv_begin - position, item.kv_end - position);
    return lane_row_ + slot() * Traits::kStageBytes + kValues;
  }

  /// [tokens][heads][kScaleWords], of the stage that is read.
  FLASHBSR_DEVICE const float* key_scales() const { return rows_.k_scales[slot()][0]; }
  FLASHBSR_DEVICE const float* value_scales() const { return rows_.v_scales[slot()][0]; }

 private:
  static constexpr int kTokenBytes = Traits::kTokenBytes;
  static constexpr int kScaleBytes = Traits::kHeads * Traits::kScaleWords * 4;  // of a token
  static constexpr int kValues = Traits::kKvTile * kTokenBytes;                 // where V is
  static constexpr int kStep = Traits::kWarps * Traits::kKvTile;
  static constexpr int32_t kMostStages = 32;  // of a batch
  static_assert(Traits::kStages == 2 && Traits::kKvTile == 16 && kScaleBytes == 16);

  /// Of the row and the chunk that a lane gives to ldmatrix first.
  FLASHBSR_DEVICE static uint32_t lane_offset(int lane) {
    return decode_tile_offset<Traits>(lane & 15, lane >> 4);
  }
  FLASHBSR_DEVICE int slot() const { return state_ & 1; }
  FLASHBSR_DEVICE uint32_t full() const { return ptx::shared_address(&rows_.full[slot()]); }

  /// To this warp's first stage of the next item that has one.
  FLASHBSR_DEVICE void next_item() {
    while (++next_item_ < count()) {
      // The first of all is there from the beginning. Of others there is no register that says so.
      if (next_item_ + turn_ > 0) ptx::mbarrier_wait<Traits::kArch>(shared_.staged(), turn_ & 1);
      next_position_ = first_position(item());
      if (next_position_ < item().kv_end) return;
    }
  }

  /// Of the turn. Asked for anew: there is no register for it.
  FLASHBSR_DEVICE int count() const {
    return min_of(*shared_.length() - turn_ * Traits::kItems, Traits::kItems);
  }
  /// Of the batch behind this one.
  FLASHBSR_DEVICE const DecodeItem& item() const { return shared_.items()[next_item_]; }
  /// Its stages.
  FLASHBSR_DEVICE int32_t next_count() const {
    return min_of(ceil_div(item().kv_end - next_position_, kStep), kMostStages);
  }

  /// Notes where this lane's stage of the batch behind this one is. The last lane that has one has
  /// the first stage.
  FLASHBSR_DEVICE void look_up() {
    if (next_item_ >= count()) return;
    const DecodeItem& item = this->item();
    const int32_t number = next_count() - 1 - lane_;
    if (number < 0) return;
    const int32_t position = next_position_ + number * kStep;
    PairBox& box = rows_.boxes[~state_ >> 2 & 1][lane_];
    box.codes = item.kv_head * kTokenBytes;
    box.scales = item.kv_head * kScaleBytes;
    if (!args_.base.kv_indices) {
      box.token = item.kv_table + position;
      box.page = 0;
      return;
    }
    const int32_t page = args_.base.page_size.quotient(position);
    box.token = args_.base.page_size.remainder(position, page);
    ptx::cp_async_4(ptx::shared_address(&box.page), args_.base.kv_indices + item.kv_table + page);
  }

  /// On to the batch that was looked up; looks up the one behind it.
  FLASHBSR_DEVICE void next_batch() {
    if (next_item_ >= count()) return;
    ptx::cp_async_wait_all();
    __syncwarp();
    state_ ^= 4;
    left_ = next_count();
    next_position_ += left_ * kStep;
    if (next_position_ >= item().kv_end) next_item();
    look_up();
  }

  FLASHBSR_DEVICE PairBox next_box() const { return rows_.boxes[state_ >> 2][left_ - 1]; }

  FLASHBSR_DEVICE void copy() const {
    if (!ptx::elect_one()) return;
    const PairBox box = next_box();
    constexpr uint32_t kBytes = 2 * Traits::kKvTile * (kTokenBytes + kScaleBytes);
    const uint32_t barrier = full();
    // Worked out anew from the lane's place: the register that would keep it is spilled.
    const uint32_t tile = lane_row_ - lane_offset(lane_) + slot() * Traits::kStageBytes;
    ptx::mbarrier_expect_bytes(barrier, kBytes);
    ptx::tma_load(tile, args_.k, barrier, box.codes, box.token, box.page, 0);
    ptx::tma_load(tile + kValues, args_.v, barrier, box.codes, box.token, box.page, 0);
    ptx::tma_load(ptx::shared_address(key_scales()), args_.k_scales, barrier, box.scales, box.token,
                  box.page, 0);
    ptx::tma_load(ptx::shared_address(value_scales()), args_.v_scales, barrier, box.scales,
                  box.token, box.page, 0);
  }

  /// Scales of the values of tokens [0, head) and [owned, kKvTile).
  FLASHBSR_DEVICE void clean(int32_t head, int32_t owned) const {
    if (lane_ < Traits::kKvTile && (lane_ < head || lane_ >= owned)) {
      ptx::zero_shared(ptx::shared_address(value_scales()) + kScaleBytes * lane_);
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }

  const PairArgs& args_;
  const DecodeShared<Traits> shared_;
  DecodeRows<Traits>& rows_;
  int warp_;
  int lane_;
  uint32_t lane_row_;  // in the ring's first place
  int turn_ = 0;
  // Bits: the place of the stage that is read, where the next one goes, too; the parity of its
  // barrier; which of two notes is the batch's.
  uint32_t state_ = 0;
  int32_t left_ = 0;   // stages of the batch
  int next_item_ = 0;  // of the batch behind it
  int32_t next_position_ = 0;
};

}  // namespace flashbsr
