// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The ring of one streaming warp of narrow items, filled by TMA. It asks for 16 rows of 128 bytes
// with one instruction, where decode/loader.h has four and the rows' addresses: three warps cannot
// issue that fast enough (513 us for a mixed batch, 410 so). The boxes are those of the wide items,
// of 4, 8 or 16 tokens, and a tile in shared memory looks as the decode kernel's.
//
// What it reads is the first to leave L2, where wide items have theirs: 319 us instead of 344.
//
// A streaming warp is late for its own instructions, not for memory: pages are looked up for many
// stages of an item at once, a box per lane, and a batch ahead.
#pragma once

#include <flashbsr/kernel/decode/epilogue.h>
#include <flashbsr/kernel/sm90a/shared.h>
#include <flashbsr/ptx/shared.h>

namespace flashbsr::sm90a {

template <class Traits>
class BoxRing {
 public:
  FLASHBSR_DEVICE BoxRing(const HopperArgs& args, const DecodeShared<Traits>& shared, int warp,
                          int lane)
      : args_(args),
        items_(shared.items()),
        ring_(shared.ring(warp)),
        barriers_(shared.ring_barriers(warp)),
        staged_(shared.staged()),
        warp_(warp),
        lane_(lane) {}

  /// One thread, before the warps begin.
  FLASHBSR_DEVICE static void init_barriers(const DecodeShared<Traits>& shared) {
#pragma unroll
    for (int i = 0; i < kBarriers; ++i) ptx::mbarrier_init(shared.ring_barriers(0) + 8 * i, 1);
  }
  /// One thread, when all warps are done.
  FLASHBSR_DEVICE static void invalidate_barriers(const DecodeShared<Traits>& shared) {
#pragma unroll
    for (int i = 0; i < kBarriers; ++i) ptx::mbarrier_invalidate(shared.ring_barriers(0) + 8 * i);
  }

  /// Tiles begin where boxes of pages do: before the item, perhaps.
  FLASHBSR_DEVICE int32_t first_position(const DecodeItem& item) const {
    const int32_t align = args_.path == KvPath::kPaged ? args_.box_tokens : 1;  // a power of 2
    return (item.kv_begin & -align) + warp_ * Traits::kKvTile;
  }

  /// As DecodeRing::begin. Nothing is prefetched.
  FLASHBSR_DEVICE void begin(int count, int known, int turn, bool) {
    count_ = count;
    known_ = known;
    turn_ = turn;
    next_.item = -1;
    next_item();
    next_source_ = look_up();
    next_batch();
  }

  /// Asks for the next stage's K; nothing after the last.
  FLASHBSR_DEVICE void produce_keys() {
    __syncwarp();  // all have read what lay there
    if (left_ > 0) copy(args_.k, 0);
  }

  /// The same for its V; then goes on to the stage after it.
  FLASHBSR_DEVICE void produce_values() {
    __syncwarp();
    if (left_ > 0) {
      box_ = copy(args_.v, 1);
      if (--left_ == 0) next_batch();
    }
    write_slot_ = write_slot_ + 1 == Traits::kStages ? 0 : write_slot_ + 1;
  }

  /// Waits for the oldest K tile and gives its address. It is handed back by produce_keys().
  FLASHBSR_DEVICE uint32_t wait_for_keys() {
    ptx::mbarrier_wait<kArch>(barrier(read_slot_, 0), parity_);
    return tile(read_slot_, 0);
  }

  /// Waits for the V tile that belongs to it, which begins at `position`, and zeroes its rows that
  /// are not the item's: their weights are 0, but 0 x NaN is NaN. `cut`: there may be some. It is
  /// handed back by produce_values().
  FLASHBSR_DEVICE uint32_t wait_for_values(const DecodeItem& item, int32_t position, bool cut) {
    ptx::mbarrier_wait<kArch>(barrier(read_slot_, 1), parity_);
    const uint32_t values = tile(read_slot_, 1);
    if (cut) clean(values, item.kv_begin - position, item.kv_end - position);
    if (++read_slot_ == Traits::kStages) {
      read_slot_ = 0;
      parity_ ^= 1;
    }
    return values;
  }

 private:
  static constexpr int kBarriers = Traits::kWarps * 2 * Traits::kStages;
  static constexpr int kTileBytes = Traits::kKvTile * Traits::kRowBytes;
  static constexpr int kColumns = Traits::kRowBytes / 128;
  static constexpr int kColumnDims = 128 / dtype_size(Traits::kKv);
  static constexpr int kStep = Traits::kWarps * Traits::kKvTile;
  static constexpr int32_t kOutside = 0x7fffffff;  ///< no page: zeros

  /// Stages of one item, of whose boxes each lane knows one.
  struct Batch {
    int item;
    int32_t position;  // first token
  };
  /// Where this lane's box of a batch is.
  struct Source {
    int32_t token;
    int32_t page;
  };

  FLASHBSR_DEVICE uint32_t barrier(int slot, int values) const {
    return barriers_ + 8 * (2 * slot + values);
  }
  FLASHBSR_DEVICE uint32_t tile(int slot, int values) const {
    return ring_ + slot * Traits::kStageBytes + values * kTileBytes;
  }

  /// To this warp's first batch of the next item that has one.
  FLASHBSR_DEVICE void next_item() {
    while (++next_.item < count_) {
      if (next_.item >= known_) {
        ptx::mbarrier_wait<kArch>(staged_, turn_ & 1);
        known_ = count_;
      }
      next_.position = first_position(items_[next_.item]);
      if (next_.position < items_[next_.item].kv_end) return;
    }
  }

  FLASHBSR_DEVICE Source look_up() const {
    if (next_.item >= count_) return {0, kOutside};
    const DecodeItem& item = items_[next_.item];
    const int32_t token = lane_ * args_.box_tokens;  // of this warp's
    const int32_t position =
        next_.position + token / Traits::kKvTile * kStep + token % Traits::kKvTile;
    if (args_.path == KvPath::kRagged) return {item.kv_table + position, 0};
    if (position >= item.kv_end) return {0, kOutside};
    const int32_t page = args_.base.page_size.quotient(position);
    return {args_.base.page_size.remainder(position, page),
            args_.base.kv_indices[item.kv_table + page]};
  }

  /// On to the batch that was looked up; looks up the one behind it.
  FLASHBSR_DEVICE void next_batch() {
    if (next_.item >= count_) return;
    const DecodeItem& item = items_[next_.item];
    const int32_t most = 32 * args_.box_tokens / Traits::kKvTile;
    left_ = min_of(ceil_div(item.kv_end - next_.position, kStep), most);
    box_ = 0;
    head_ = item.kv_head;
    source_ = next_source_;
    next_.position += left_ * kStep;
    if (next_.position >= item.kv_end) next_item();
    next_source_ = look_up();
  }

  /// A stage's K or V; gives the box behind it.
  FLASHBSR_DEVICE int32_t copy(const TensorMap& map, int values) const {
    const uint32_t full = barrier(write_slot_, values);
    if (lane_ == 0) ptx::mbarrier_expect_bytes(full, kTileBytes);
    uint32_t dst = tile(write_slot_, values);
    int32_t box = box_;
    copy_box(map, full, dst, box);
#pragma unroll 1
    for (int32_t row = args_.box_tokens; row < Traits::kKvTile; row += args_.box_tokens) {
      dst += args_.box_tokens * 128;
      copy_box(map, full, dst, ++box);
    }
    return box + 1;
  }

  FLASHBSR_DEVICE void copy_box(const TensorMap& map, uint32_t full, uint32_t dst,
                                int32_t box) const {
    const int32_t head = __shfl_sync(~0u, head_, 0);
    const int32_t token = __shfl_sync(~0u, source_.token, box);
    const int32_t page = __shfl_sync(~0u, source_.page, box);
    if (ptx::elect_one()) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        ptx::tma_load_once(dst + c * Traits::kKvTile * 128, map, full, c * kColumnDims, token, head,
                           page);
      }
    }
  }

  /// Rows [0, head) and [owned, kKvTile).
  FLASHBSR_DEVICE void clean(uint32_t values, int32_t head, int32_t owned) const {
#pragma unroll 1
    for (int32_t i = lane_; i < Traits::kKvTile * 8 * kColumns; i += 32) {
      const int32_t row = i / 8 % Traits::kKvTile;
      if (row < head || row >= owned) ptx::zero_shared(values + 16 * i);
    }
    ptx::fence_async_proxy();
    __syncwarp();
  }

  const HopperArgs& args_;
  const DecodeItem* items_;
  uint32_t ring_;
  uint32_t barriers_;
  uint32_t staged_;
  int warp_;
  int lane_;
  int count_ = 0;
  int known_ = 0;
  int turn_ = 0;
  int write_slot_ = 0;
  int read_slot_ = 0;
  uint32_t parity_ = 0;
  int32_t left_ = 0;  // stages of the batch
  int32_t box_ = 0;   // the next one's first
  int32_t head_ = 0;
  Source source_;  // of the batch
  Batch next_;     // the one behind it
  Source next_source_;
};

}  // namespace flashbsr::sm90a
