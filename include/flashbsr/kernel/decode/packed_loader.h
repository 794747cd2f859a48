// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The ring of a warp that streams packed codes. K and V of a stage and their scales are copied
// together, so that where a token lies is worked out once for all four. That takes more time than
// the bytes do, most of it waiting: what is needed is read at the beginning, and there are few
// branches.
#pragma once

#include <flashbsr/kernel/decode/loader.h>

namespace flashbsr {

template <class Traits>
class PackedRing : public DecodeRing<Traits> {
  using Base = DecodeRing<Traits>;
  using Base::ahead_, Base::args_, Base::count_, Base::current_, Base::items_, Base::lane_,
      Base::ring_, Base::rows_;

 public:
  using Base::Base;

  /// As DecodeRing's, with pages of as many stages as there are.
  FLASHBSR_DEVICE void begin(int count, int known, int turn, bool prefetches) {
    count_ = count;
    Base::known_ = known;
    Base::turn_ = turn;
    current_.item = -1;
    go_on();
    ahead_ = current_;
    int stage = 0;
    // Of the item that is known all look-ups are under way together.
    while (stage < kStages && ahead_.item == current_.item && ahead_.item < count_) {
      Base::look_up(ahead_, stage_of(stage++));
      ahead_.position += Base::kStep;
      if (ahead_.position >= items_[ahead_.item].kv_end) break;
    }
    Base::wait_for_pages();
    if (prefetches) Base::prefetch();
    if (ahead_.item < count_ && ahead_.position >= items_[ahead_.item].kv_end) {
      Base::next_item(ahead_);
    }
    if (stage == kStages) return;
    for (; stage < kStages; ++stage) {
      Base::look_up(ahead_, stage_of(stage));
      Base::advance(ahead_);
    }
    Base::wait_for_pages();
  }

  /// Both are copied when V has been multiplied.
  FLASHBSR_DEVICE void produce_keys() {}

  FLASHBSR_DEVICE void produce_values() {
    __syncwarp();  // nobody reads this place, nor the offsets of the stage before, any more
    if (current_.item < count_) copy_stage();
    ptx::cp_async_commit();
    slot_ = slot_ + 1 == Traits::kStages ? 0 : slot_ + 1;
  }

  FLASHBSR_DEVICE uint32_t wait_for_keys() {
    ptx::cp_async_wait<Traits::kStages - 1>();  // with it came the pages of two stages later
    __syncwarp();
    return tile();
  }
  FLASHBSR_DEVICE uint32_t wait_for_values(const DecodeItem&, int32_t, bool) const {
    return tile() + Base::kValues;
  }

  FLASHBSR_DEVICE const float* key_scales() const { return rows_.k_scales[slot_][0]; }
  FLASHBSR_DEVICE const float* value_scales() const { return rows_.v_scales[slot_][0]; }

 private:
  static constexpr int kLooks = Base::kLooks, kStages = Traits::kStages;
  static_assert(Traits::kTogether && Base::kColumns == 1 && Traits::kKvTile % 32 == 0);

  FLASHBSR_DEVICE int stage_of(int ahead) const {
    return slot_ + ahead < kStages ? slot_ + ahead : slot_ + ahead - kStages;
  }
  FLASHBSR_DEVICE uint32_t tile() const { return ring_ + slot_ * Traits::kStageBytes; }

  FLASHBSR_DEVICE void copy_stage() {
    const Params& p = args_.params;
    const DecodeItem& item = items_[current_.item];
    const bool more = ahead_.item < count_;
    const DecodeItem& later = items_[more ? ahead_.item : current_.item];
    const int32_t end = item.kv_end, table = item.kv_table;
    const int32_t later_end = more ? later.kv_end : 0, later_table = later.kv_table;
    const bool paged = args_.kv_indices != nullptr;
    const int rows = end - current_.position;  // others are copied from nowhere, as zeros
    const DecodeHead& head = rows_.head;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const int32_t position = current_.position + row;
      const int32_t page = rows_.pages[slot_][row];
      const int32_t token = args_.page_size.remainder(position, args_.page_size.quotient(position));
      const DecodePlace at{static_cast<uint32_t>(paged ? page : table + position),
                           static_cast<uint32_t>(paged ? token : 0), 0};
      rows_.offsets[row] = {head.k + at.in_head(p.k), head.v + at.in_head(p.v)};
      copy_scales(row, head.k_scales + at.in_head(p.k_scales) * Traits::kScaleSize,
                  head.v_scales + at.in_head(p.v_scales) * Traits::kScaleSize, row < rows);
    }
    __syncwarp();
    copy_codes(rows);
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const int32_t position = ahead_.position + row;
      ptx::cp_async_4_when(ptx::shared_address(&rows_.pages[slot_][row]),
                           args_.kv_indices + later_table + args_.page_size.quotient(position),
                           paged && position < later_end);
    }
    current_.position += Base::kStep;
    ahead_.position += Base::kStep;
    if (current_.position < end && ahead_.position < later_end) return;
    if (current_.position >= end) go_on();
    if (more && ahead_.position >= later_end) Base::next_item(ahead_);
  }

  /// Rows of packed codes are whole: no chunk of one lies beyond its dims.
  FLASHBSR_DEVICE void copy_codes(int rows) {
    const int chunk = lane_ % Base::kAcross, first = lane_ / Base::kAcross;
    const uint64_t policy = ptx::evict_first_policy();  // it costs less than to keep it
    DecodeOffsets from[Base::kPasses];
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      from[pass] = rows_.offsets[first + pass * Base::kRowsAtOnce];
    }
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      const int row = first + pass * Base::kRowsAtOnce;
      const uint32_t to = tile() + decode_tile_offset<Traits>(row, chunk);
      ptx::cp_async_16_if(to, address(from[pass].k + 16 * chunk), row < rows, policy);
      ptx::cp_async_16_if(to + Base::kValues, address(from[pass].v + 16 * chunk), row < rows,
                          policy);
    }
  }

  /// Of a token, zeros where not `inside`, so that weights of nothing stay nothing. The usual two
  /// words of a row come at once: each copy of a lane is a line to look up.
  FLASHBSR_DEVICE void copy_scales(int row, int64_t k, int64_t v, bool inside) {
    float (&to_k)[Traits::kScaleWords] = rows_.k_scales[slot_][row];
    float (&to_v)[Traits::kScaleWords] = rows_.v_scales[slot_][row];
    const int k_bytes = args_.params.k_scales.dim * Traits::kScaleSize;
    const int v_bytes = args_.params.v_scales.dim * Traits::kScaleSize;
    if constexpr (Traits::kScaleWords >= 2) {
      if (((k | v) & 7) == 0 && k_bytes == 8 && v_bytes == 8) {
        ptx::cp_async_8_if(ptx::shared_address(&to_k[0]), address(k), inside);
        ptx::cp_async_8_if(ptx::shared_address(&to_v[0]), address(v), inside);
        return;
      }
    }
    copy_packed_scales<Traits>(to_k, address(k), k_bytes, inside);
    copy_packed_scales<Traits>(to_v, address(v), v_bytes, inside);
  }

  /// To this warp's next item, whose head is another one.
  FLASHBSR_DEVICE void go_on() {
    Base::next_item(current_);
    if (current_.item >= count_ || lane_ != 0) return;
    const Params& p = args_.params;
    const DecodePlace at{0, 0, static_cast<uint32_t>(items_[current_.item].kv_head)};
    const auto first = [&](const PagedView& view, int size) {
      return reinterpret_cast<int64_t>(view.data) + at.offset(view) * size;
    };
    rows_.head = {first(p.k, Base::kSize), first(p.v, Base::kSize),
                  first(p.k_scales, Traits::kScaleSize), first(p.v_scales, Traits::kScaleSize)};
  }

  FLASHBSR_DEVICE static const char* address(int64_t at) {
    return reinterpret_cast<const char*>(at);
  }

  int slot_ = 0;  // of the stage that is read, and where the next one goes
};

/// The ring of a warp that streams.
template <class Traits, bool = Traits::kPacked>
struct RingOf {
  using Type = DecodeRing<Traits>;
};
template <class Traits>
struct RingOf<Traits, true> {
  using Type = PackedRing<Traits>;
};

}  // namespace flashbsr
