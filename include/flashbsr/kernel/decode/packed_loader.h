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
      Base::ring_, Base::rows_, Base::stage_;

 public:
  using Base::Base;

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
  static constexpr int kLooks = Base::kLooks;
  static_assert(Traits::kTogether && Base::kColumns == 1 && Traits::kStageRows % 32 == 0);

  FLASHBSR_DEVICE uint32_t tile() const { return ring_ + slot_ * Traits::kStageBytes; }

  /// Where a row is in the stage: head by head, as it is multiplied.
  FLASHBSR_DEVICE static int tile_row(int row) {
    return row % Traits::kHeads * Traits::kKvTile + row / Traits::kHeads;
  }

  FLASHBSR_DEVICE void copy_stage() {
    const Params& p = args_.params;
    const DecodeItem& item = items_[current_.item];
    const bool more = ahead_.item < count_;
    const DecodeItem& later = items_[more ? ahead_.item : current_.item];
    const int32_t end = item.kv_end, table = item.kv_table;
    const int32_t later_end = more ? later.kv_end : 0, later_table = later.kv_table;
    const bool paged = args_.kv_indices != nullptr;
    // Others are copied from nowhere, as zeros.
    const int rows = min_of(end - current_.position, Traits::kKvTile) * Traits::kHeads;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const uint32_t head = static_cast<uint32_t>(Base::head_of(item, row));
      const int32_t position = current_.position + Base::token_of(row);
      const int32_t page = rows_.pages[stage_ & 1][row];
      const int32_t token = args_.page_size.remainder(position, args_.page_size.quotient(position));
      const DecodePlace at{static_cast<uint32_t>(paged ? page : table + position),
                           static_cast<uint32_t>(paged ? token : 0), head};
      rows_.offsets[row] = {at.offset(p.k) * Base::kSize, at.offset(p.v) * Base::kSize};
      copy_scales(row, at, row < rows);
    }
    __syncwarp();
    copy_codes(rows);
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const int32_t position = ahead_.position + Base::token_of(row);
      ptx::cp_async_4_when(ptx::shared_address(&rows_.pages[stage_ & 1][row]),
                           args_.kv_indices + later_table + args_.page_size.quotient(position),
                           paged && position < later_end);
    }
    ++stage_;
    current_.position += Base::kStep;
    ahead_.position += Base::kStep;
    if (current_.position < end && ahead_.position < later_end) return;
    if (current_.position >= end) Base::next_item(current_);
    if (more && ahead_.position >= later_end) Base::next_item(ahead_);
  }

  /// Rows of packed codes are whole: no chunk of one lies beyond its dims.
  FLASHBSR_DEVICE void copy_codes(int rows) {
    const int chunk = lane_ % Base::kAcross, first = lane_ / Base::kAcross;
    const char *k = Base::k_data() + chunk * 16, *v = Base::v_data() + chunk * 16;
    const uint64_t policy = ptx::evict_first_policy();  // it costs less than to keep it
    DecodeOffsets from[Base::kPasses];
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      from[pass] = rows_.offsets[first + pass * Base::kRowsAtOnce];
    }
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      const int row = first + pass * Base::kRowsAtOnce;
      const uint32_t to = tile() + decode_tile_offset<Traits>(tile_row(row), chunk);
      ptx::cp_async_16_if(to, k + from[pass].k, row < rows, policy);
      ptx::cp_async_16_if(to + Base::kValues, v + from[pass].v, row < rows, policy);
    }
  }

  /// Of a row, zeros where not `inside`, so that weights of nothing stay nothing. The usual two
  /// words of a row come at once: each copy of a lane is a line to look up.
  FLASHBSR_DEVICE void copy_scales(int row, const DecodePlace& at, bool inside) {
    const PagedView& of_k = args_.params.k_scales;
    const PagedView& of_v = args_.params.v_scales;
    float (&to_k)[Traits::kScaleWords] = rows_.k_scales[slot_][tile_row(row)];
    float (&to_v)[Traits::kScaleWords] = rows_.v_scales[slot_][tile_row(row)];
    const int64_t k = at.offset(of_k), v = at.offset(of_v);
    if constexpr (Traits::kScaleWords >= 2) {
      constexpr int kSize = Traits::kScaleSize;
      const char* k_from = static_cast<const char*>(of_k.data) + k * kSize;
      const char* v_from = static_cast<const char*>(of_v.data) + v * kSize;
      const bool aligned =
          ((reinterpret_cast<uint64_t>(k_from) | reinterpret_cast<uint64_t>(v_from)) & 7) == 0;
      if (aligned && of_k.dim * kSize == 8 && of_v.dim * kSize == 8) {
        ptx::cp_async_8_if(ptx::shared_address(&to_k[0]), k_from, inside);
        ptx::cp_async_8_if(ptx::shared_address(&to_v[0]), v_from, inside);
        return;
      }
    }
    copy_packed_scales<Traits>(to_k, of_k, k, inside);
    copy_packed_scales<Traits>(to_v, of_v, v, inside);
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
