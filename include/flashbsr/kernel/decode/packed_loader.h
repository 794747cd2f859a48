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
  FLASHBSR_DEVICE PackedRing(const KernelArgs& args, const DecodeItem* items, uint32_t ring,
                             DecodeRows<Traits>& rows, uint32_t staged, int warp, int lane)
      : Base(args, items, ring, rows, staged, warp, lane),
        plain_(is_plain(args.params.k, args.params.k_scales) &&
               is_plain(args.params.v, args.params.v_scales)) {}

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
  /// Of one head a stage is 32 tokens, of which pages of 16 have no run.
  static constexpr bool kRuns = Traits::kHeads == 2;
  static_assert(Traits::kTogether && Base::kColumns == 1 && Traits::kStageRows % 32 == 0);

  FLASHBSR_DEVICE uint32_t tile() const { return ring_ + slot_ * Traits::kStageBytes; }

  /// Where a row is in the stage: head by head, as it is multiplied.
  FLASHBSR_DEVICE static int tile_row(int row) {
    return row % Traits::kHeads * Traits::kKvTile + row / Traits::kHeads;
  }

  FLASHBSR_DEVICE void copy_stage() {
    const DecodeItem& item = items_[current_.item];
    const bool more = ahead_.item < count_;
    const DecodeItem& later = items_[more ? ahead_.item : current_.item];
    const int32_t end = item.kv_end, table = item.kv_table;
    const int32_t later_end = more ? later.kv_end : 0, later_table = later.kv_table;
    const bool paged = args_.kv_indices != nullptr;
    const int32_t first = current_.position;
    const int32_t slot = args_.page_size.remainder(first, args_.page_size.quotient(first));
    // Tokens that follow each other in memory, all of a stage's, take 100 instructions fewer of
    // 900.
    const int32_t room = paged ? static_cast<int32_t>(args_.page_size.divisor) - slot : end - first;
    if (kRuns && plain_ && min_of(room, end - first) >= Traits::kKvTile) {
      copy_run({static_cast<uint32_t>(paged ? rows_.pages[stage_ & 1][0] : table + first),
                static_cast<uint32_t>(paged ? slot : 0), static_cast<uint32_t>(item.kv_head)});
    } else {
      copy_rows(item, paged);
    }
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

  /// A stage whose tokens follow each other from `at` on, whose head is the item's. Nothing is
  /// noted, and no row asks whether it is there.
  FLASHBSR_DEVICE void copy_run(const DecodePlace& at) {
    const Params& p = args_.params;
    constexpr int kTokens = Base::kRowsAtOnce / Traits::kHeads;  // copied at once
    const int chunk = lane_ % Base::kAcross, row = lane_ / Base::kAcross;
    const char* k = row_of(p.k, Base::kSize, at, row) + chunk * 16;
    const char* v = row_of(p.v, Base::kSize, at, row) + chunk * 16;
#pragma unroll
    for (int pass = 0; pass < Base::kPasses; ++pass) {
      const int to_row = tile_row(row) + pass * kTokens;
      const uint32_t to = tile() + decode_tile_offset<Traits>(to_row, chunk);
      ptx::cp_async_16(to, k);
      ptx::cp_async_16(to + Base::kValues, v);
      k += kTokens * static_cast<uint64_t>(static_cast<uint32_t>(p.k.stride_token));
      v += kTokens * static_cast<uint64_t>(static_cast<uint32_t>(p.v.stride_token));
    }
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int of = lane_ + 32 * i, to = tile_row(of);
      ptx::cp_async_8_if(ptx::shared_address(rows_.k_scales[slot_][to]),
                         row_of(p.k_scales, Traits::kScaleSize, at, of), true);
      ptx::cp_async_8_if(ptx::shared_address(rows_.v_scales[slot_][to]),
                         row_of(p.v_scales, Traits::kScaleSize, at, of), true);
    }
  }

  /// Row `row` of the stage that begins at `at`, by strides of 32 bits: an instruction each.
  FLASHBSR_DEVICE static const char* row_of(const PagedView& view, int size, const DecodePlace& at,
                                            int row) {
    const auto times = [](uint32_t n, int64_t stride) {
      return n * static_cast<uint64_t>(static_cast<uint32_t>(stride));
    };
    const uint32_t token = at.token + static_cast<uint32_t>(Base::token_of(row));
    const uint32_t head = at.head * Traits::kHeads + static_cast<uint32_t>(row % Traits::kHeads);
    return static_cast<const char*>(view.data) +
           (times(at.page, view.stride_page) + times(token, view.stride_token) +
            times(head, view.stride_head)) *
               static_cast<uint64_t>(size);
  }

  /// A stage's rows one by one.
  FLASHBSR_DEVICE void copy_rows(const DecodeItem& item, bool paged) {
    const Params& p = args_.params;
    // Others are copied from nowhere, as zeros.
    const int rows = min_of(item.kv_end - current_.position, Traits::kKvTile) * Traits::kHeads;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int row = lane_ + 32 * i;
      const uint32_t head = static_cast<uint32_t>(Base::head_of(item, row));
      const int32_t position = current_.position + Base::token_of(row);
      const int32_t page = rows_.pages[stage_ & 1][row];
      const int32_t token = args_.page_size.remainder(position, args_.page_size.quotient(position));
      const DecodePlace at{static_cast<uint32_t>(paged ? page : item.kv_table + position),
                           static_cast<uint32_t>(paged ? token : 0), head};
      rows_.offsets[row] = {at.offset(p.k) * Base::kSize, at.offset(p.v) * Base::kSize};
      copy_scales(row, at, row < rows);
    }
    __syncwarp();
    copy_codes(rows);
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

  /// Whether copy_run may have a stage: two words of scales in every row, strides of 32 bits.
  FLASHBSR_DEVICE static bool is_plain(const PagedView& view, const PagedView& scales) {
    constexpr int kSize = Traits::kScaleSize;
    const int64_t of_scales = scales.stride_page | scales.stride_token | scales.stride_head;
    const int64_t all = of_scales | view.stride_page | view.stride_token | view.stride_head;
    const uint64_t ends =
        reinterpret_cast<uint64_t>(scales.data) | static_cast<uint64_t>(of_scales * kSize);
    return Traits::kScaleWords >= 2 && scales.dim * kSize == 8 && (ends & 7) == 0 && all >> 32 == 0;
  }

  int slot_ = 0;  // of the stage that is read, and where the next one goes
  bool plain_;
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
