// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The ring of one streaming warp: it loads for itself, so no barrier of the block is in the loop.
// A stage is kKvTile tokens of K and V; warp w takes the stages w, w + kWarps, ... of each item.
// Page ids come by asynchronous copies too, two stages ahead of the rows that they name, so that no
// register waits for them.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/scales.h>
#include <flashbsr/ptx/cp_async.h>
#include <flashbsr/ptx/mbarrier.h>

namespace flashbsr {

template <class Traits>
class DecodeRing {
 public:
  /// `staged`: the barrier that completes when the items of a turn are in shared memory.
  FLASHBSR_DEVICE DecodeRing(const KernelArgs& args, const DecodeItem* items, uint32_t ring,
                             DecodeRows<Traits>& rows, uint32_t staged, int warp, int lane)
      : args_(args),
        items_(items),
        ring_(ring),
        rows_(rows),
        staged_(staged),
        warp_(warp),
        lane_(lane) {
    policy_ = ptx::evict_first_policy();
    k_inside_ = is_inside(args.params.k, lane % kAcross);
    v_inside_ = is_inside(args.params.v, lane % kAcross);
  }

  /// Where this warp's first stage of an item begins.
  FLASHBSR_DEVICE int32_t first_position(const DecodeItem& item) const {
    return item.kv_begin + warp_ * Traits::kKvTile;
  }

  /// Starts turn `turn` of `count` items, of which `known` are in shared memory already. Looks page
  /// ids up, copies nothing. `prefetches`: asks L2 for the first stage, a hint that is allowed
  /// while a kernel before still writes.
  FLASHBSR_DEVICE void begin(int count, int known, int turn, bool prefetches) {
    count_ = count;
    known_ = known;
    turn_ = turn;
    stage_ = 0;
    current_.item = -1;
    next_item(current_);
    look_up(current_, 0);
    // Where the second stage is of the same item, both look-ups are under way together.
    ahead_ = current_;
    const bool longer =
        current_.item < count_ && ahead_.position + kStep < items_[ahead_.item].kv_end;
    if (longer) {
      ahead_.position += kStep;
      look_up(ahead_, 1);
    }
    wait_for_pages();
    if (prefetches) prefetch();
    if (!longer) {
      advance(ahead_);
      look_up(ahead_, 1);
      wait_for_pages();
    }
    advance(ahead_);
  }

  /// Issues the copies of the next stage's K and closes their group, which is empty after the last.
  FLASHBSR_DEVICE void produce_keys() {
    __syncwarp();  // nobody reads the offsets of the stage before any more
    if (current_.item < count_) {
      if constexpr (Traits::kTokenScales) {
        note_and_copy_key_scales();
      } else {
        note();
      }
      __syncwarp();
      copy_tile(true);
      look_up(ahead_, stage_ & 1);
    }
    ptx::cp_async_commit();
  }

  /// The same for its V; then goes on to the stage after it.
  FLASHBSR_DEVICE void produce_values() {
    __syncwarp();
    if (current_.item < count_) {
      if constexpr (Traits::kTokenScales) copy_value_scales();
      copy_tile(false);
      advance(current_);
      advance(ahead_);
      ++stage_;
    }
    ptx::cp_async_commit();
    write_slot_ = write_slot_ + 1 == Traits::kStages ? 0 : write_slot_ + 1;
  }

  /// Waits for the oldest K tile and gives its address. It is handed back by produce_keys().
  FLASHBSR_DEVICE uint32_t wait_for_keys() {
    ptx::cp_async_wait<2 * Traits::kStages - 1>();  // with it came the pages of two stages later
    settle_scales(true);
    __syncwarp();
    return ring_ + read_slot_ * Traits::kStageBytes;
  }

  /// Scales of the oldest tile's rows, [kStageRows][kScaleWords]: of K until produce_keys(), of V
  /// until produce_values().
  FLASHBSR_DEVICE const float* key_scales() const { return rows_.k_scales[read_slot_][0]; }
  /// Asked for before wait_for_values(), and read after it.
  FLASHBSR_DEVICE const float* value_scales() const { return rows_.v_scales[read_slot_][0]; }

  /// Waits for the V tile that belongs to it. It is handed back by produce_values().
  FLASHBSR_DEVICE uint32_t wait_for_values(const DecodeItem&, int32_t, bool) {
    ptx::cp_async_wait<2 * Traits::kStages - 1>();
    settle_scales(false);
    __syncwarp();
    const uint32_t tile = ring_ + read_slot_ * Traits::kStageBytes + kValues;
    read_slot_ = read_slot_ + 1 == Traits::kStages ? 0 : read_slot_ + 1;
    return tile;
  }

 protected:
  static constexpr int kSize = dtype_size(Traits::kKv);
  static constexpr int kStep = Traits::kWarps * Traits::kKvTile;  // from a stage to the next
  static constexpr int kChunks = Traits::kRowBytes / 16;          // of a row
  static constexpr int kAcross = min_of(kChunks, 32);             // that lanes copy side by side
  static constexpr int kColumns = kChunks / kAcross;              // of a lane, in a row
  static constexpr int kRowsAtOnce = 32 / kAcross;
  static constexpr int kPasses = Traits::kStageRows / kRowsAtOnce;
  static constexpr int kValues = Traits::kStageRows * Traits::kRowBytes;  // where V is in a stage
  static constexpr int kLooks = max_of(1, Traits::kStageRows / 32);  // rows looked up by a lane

  struct Cursor {
    int item;
    int32_t position;  // first token of the stage
  };
  FLASHBSR_DEVICE const char* k_data() const {
    return static_cast<const char*>(args_.params.k.data);
  }
  FLASHBSR_DEVICE const char* v_data() const {
    return static_cast<const char*>(args_.params.v.data);
  }

  FLASHBSR_DEVICE void prefetch() {
    if (current_.item >= count_) return;
    note();
    __syncwarp();
    for (int row = lane_; row < current_rows(); row += 32) {
      const DecodeOffsets at = rows_.offsets[row];
      for (int byte = 0; byte < Traits::kRowBytes; byte += 128) {
        if (byte < bytes_of(args_.params.k)) ptx::prefetch_l2(k_data() + at.k + byte);
        if (byte < bytes_of(args_.params.v)) ptx::prefetch_l2(v_data() + at.v + byte);
      }
    }
    __syncwarp();
  }

  FLASHBSR_DEVICE void wait_for_pages() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  /// To this warp's first stage of the next item that has one.
  FLASHBSR_DEVICE void next_item(Cursor& c) {
    while (++c.item < count_) {
      if (c.item >= known_) {
        ptx::mbarrier_wait<Traits::kArch>(staged_, turn_ & 1);
        known_ = count_;
      }
      c.position = first_position(items_[c.item]);
      if (c.position < items_[c.item].kv_end) return;
    }
  }

  FLASHBSR_DEVICE void advance(Cursor& c) {
    if (c.item >= count_) return;
    c.position += kStep;
    if (c.position >= items_[c.item].kv_end) next_item(c);
  }

  FLASHBSR_DEVICE int current_rows() const {
    return min_of(Traits::kKvTile, items_[current_.item].kv_end - current_.position) *
           Traits::kHeads;
  }
  /// Which token of a stage row `row` is copied from, and which KV head. Heads of a token come one
  /// behind the other, as they lie where pages are in NHD order.
  FLASHBSR_DEVICE static int token_of(int row) { return row / Traits::kHeads; }
  FLASHBSR_DEVICE static int head_of(const DecodeItem& item, int row) {
    return item.kv_head * Traits::kHeads + row % Traits::kHeads;
  }

  /// Starts to copy the page ids of a stage's rows, a row per lane.
  FLASHBSR_DEVICE void look_up(const Cursor& c, int buffer) {
    if (c.item >= count_ || !args_.kv_indices) return;
    const DecodeItem& item = items_[c.item];
    const int32_t* table = args_.kv_indices + item.kv_table;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const int32_t position = c.position + token_of(row);
      if (row < Traits::kStageRows && position < item.kv_end) {
        ptx::cp_async_4(ptx::shared_address(&rows_.pages[buffer][row]),
                        table + args_.page_size.quotient(position));
      }
    }
  }

  /// Writes down where the rows of the current stage are. Rows past its end are not copied.
  FLASHBSR_DEVICE void note() {
    const PagedView& k = args_.params.k;
    const PagedView& v = args_.params.v;
    const DecodeItem& item = items_[current_.item];
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      if (row >= current_rows()) continue;
      const int64_t head = head_of(item, row);
      const int32_t position = current_.position + token_of(row);
      int64_t page = item.kv_table + position, token = 0;
      if (args_.kv_indices) {
        page = rows_.pages[stage_ & 1][row];
        token = args_.page_size.remainder(position, args_.page_size.quotient(position));
      }
      rows_.offsets[row] = {
          (page * k.stride_page + token * k.stride_token + head * k.stride_head) * kSize,
          (page * v.stride_page + token * v.stride_token + head * v.stride_head) * kSize};
    }
  }

  /// Outside, of the first token.
  FLASHBSR_DEVICE DecodePlace place_of(const DecodeItem& item, int row, bool inside) const {
    const int32_t position = current_.position + row;
    const uint32_t head = static_cast<uint32_t>(item.kv_head);
    if (!inside) return {0, 0, head};
    if (!args_.kv_indices) return {static_cast<uint32_t>(item.kv_table + position), 0, head};
    const int32_t quotient = args_.page_size.quotient(position);
    return {static_cast<uint32_t>(rows_.pages[stage_ & 1][row]),
            static_cast<uint32_t>(args_.page_size.remainder(position, quotient)), head};
  }

  /// note() where tokens have scales: writes down where those of values are too, and copies those
  /// of keys. Scales of tokens past the stage's end are zeros, so that weights of nothing stay
  /// nothing.
  FLASHBSR_DEVICE void note_and_copy_key_scales() {
    const Params& p = args_.params;
    const DecodeItem& item = items_[current_.item];
    const int rows = current_rows();
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      if (row >= Traits::kStageRows) continue;
      const bool inside = row < rows;
      const DecodePlace at = place_of(item, row, inside);
      rows_.offsets[row] = {at.offset(p.k) * kSize, at.offset(p.v) * kSize};
      rows_.v_scale_offsets[row] = at.offset(p.v_scales);
      copy_scales(true, i, at.offset(p.k_scales), inside);
    }
  }

  /// Of this lane's `i`-th token of the stage that is being copied.
  FLASHBSR_DEVICE void copy_scales(bool keys, int i, int64_t offset, bool inside) {
    const PagedView& view = keys ? args_.params.k_scales : args_.params.v_scales;
    auto& stage = keys ? rows_.k_scales[write_slot_] : rows_.v_scales[write_slot_];
    float& to = stage[lane_ + 32 * i][0];
    halves_.copy(to, view, offset, inside, (2 * write_slot_ + !keys) * kLooks + i);
  }

  /// Makes floats of this lane's scales in the stage that has arrived, if they are halves.
  FLASHBSR_DEVICE void settle_scales(bool keys) {
    if constexpr (Traits::kTokenScales) {
      const PagedView& view = keys ? args_.params.k_scales : args_.params.v_scales;
      if (view.dtype != DType::kF16) return;
      auto& stage = keys ? rows_.k_scales[read_slot_] : rows_.v_scales[read_slot_];
#pragma unroll
      for (int i = 0; i < kLooks; ++i) {
        if (lane_ + 32 * i >= Traits::kStageRows) continue;
        halves_.settle(stage[lane_ + 32 * i][0], (2 * read_slot_ + !keys) * kLooks + i);
      }
    }
  }

  FLASHBSR_DEVICE void copy_value_scales() {
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      if (row >= Traits::kStageRows) continue;
      copy_scales(false, i, rows_.v_scale_offsets[row], row < current_rows());
    }
  }

  FLASHBSR_DEVICE static int bytes_of(const PagedView& view) {
    return static_cast<int>(row_bytes(Traits::kKv, view.dim));
  }

  FLASHBSR_DEVICE static bool is_inside(const PagedView& view, int chunk) {
    return chunk * 16 < bytes_of(view);
  }

  FLASHBSR_DEVICE void copy_tile(bool keys) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) copy_column(keys, c);
  }

  FLASHBSR_DEVICE void copy_column(bool keys, int column) {
    const int chunk = lane_ % kAcross + column * kAcross, first = lane_ / kAcross;
    const uint32_t tile = ring_ + write_slot_ * Traits::kStageBytes + (keys ? 0 : kValues);
    const int64_t* at = &rows_.offsets[first].k + (keys ? 0 : 1);
    // Chunks beyond a row's dims are zeros; no address beyond the array is formed for them.
    bool mine = keys ? k_inside_ : v_inside_;
    if (column > 0) mine = is_inside(keys ? args_.params.k : args_.params.v, chunk);
    const char* data = (keys ? k_data() : v_data()) + (mine ? chunk * 16 : 0);
    const int rows = current_rows() - first;
    int64_t offset[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) offset[pass] = at[2 * pass * kRowsAtOnce];
    const bool whole = __all_sync(~0u, mine && rows > (kPasses - 1) * kRowsAtOnce);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t to = tile + decode_tile_offset<Traits>(first + pass * kRowsAtOnce, chunk);
      if (whole) {
        ptx::cp_async_16(to, data + offset[pass], policy_);
      } else {
        ptx::cp_async_16_if(to, data + offset[pass], mine && pass * kRowsAtOnce < rows, policy_);
      }
    }
  }

  const KernelArgs& args_;
  const DecodeItem* items_;
  uint32_t ring_;
  DecodeRows<Traits>& rows_;
  uint32_t staged_;
  int warp_;
  int lane_;
  bool k_inside_;  // this lane's first chunk lies within the rows' dims
  bool v_inside_;
  int count_ = 0;
  int known_ = 0;
  int turn_ = 0;
  int write_slot_ = 0;
  int read_slot_ = 0;
  int stage_ = 0;
  uint64_t policy_;
  HalfScales halves_;
  Cursor current_;  // the next stage to copy
  Cursor ahead_;    // the stage whose pages are looked up next: two after it
};

}  // namespace flashbsr
