// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The ring of one streaming warp: it loads for itself, so no barrier of the block is in the loop.
// A stage is kKvTile tokens of K and V; warp w takes the stages w, w + kWarps, ... of each item.
// Page ids are looked up two stages ahead of the copies that need them.
#pragma once

#include <flashbsr/core/launch.h>
#include <flashbsr/kernel/decode/traits.h>
#include <flashbsr/ptx/cp_async.h>

namespace flashbsr {

/// Where 16-byte chunk `chunk` of token `row` lies in a tile of shared memory: rows of 128 bytes
/// (64 for the shortest), chunks exchanged so that ldmatrix meets every bank once.
template <class Traits>
FLASHBSR_DEVICE uint32_t decode_tile_offset(int row, int chunk) {
  if constexpr (Traits::kRowBytes >= 128) {
    return (chunk >> 3) * (Traits::kKvTile * 128) + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  } else {
    return row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
  }
}

template <class Traits>
class DecodeRing {
 public:
  FLASHBSR_DEVICE DecodeRing(const KernelArgs& args, const DecodeItem* items, uint32_t ring,
                             int warp, int lane)
      : args_(args), items_(items), ring_(ring), warp_(warp), lane_(lane) {
    policy_ = ptx::evict_first_policy();
  }

  /// Starts over with `count` items in shared memory. Looks page ids up, copies nothing.
  FLASHBSR_DEVICE void begin(int count) {
    count_ = count;
    current_.item = next_.item = -1;
    next_item(current_);
    look_up(current_, pages_);
    next_ = current_;
    advance(next_);
    look_up(next_, next_pages_);
  }

  /// Asks L2 for the first stage: a hint, allowed while a kernel before still writes.
  FLASHBSR_DEVICE void prefetch() {
    if (current_.item >= count_) return;
    const int head = items_[current_.item].kv_head;
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      if (pages_[i].page < 0) continue;
      if (lane_ + 32 * i >= Traits::kKvTile) continue;
      const char* k = row(args_.params.k, pages_[i], head);
      const char* v = row(args_.params.v, pages_[i], head);
      for (int byte = 0; byte < Traits::kRowBytes; byte += 128) {
        ptx::prefetch_l2(k + byte);
        ptx::prefetch_l2(v + byte);
      }
    }
  }

  /// Issues the copies of the next stage and closes their group, which is empty after the last.
  FLASHBSR_DEVICE void produce() {
    if (current_.item < count_) {
      copy_stage();
      current_ = next_;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) pages_[i] = next_pages_[i];
      advance(next_);
      look_up(next_, next_pages_);
    }
    ptx::cp_async_commit();
    write_slot_ = write_slot_ + 1 == Traits::kStages ? 0 : write_slot_ + 1;
  }

  /// Waits for the oldest stage; its K tile's address, V follows at kKvTile * kRowBytes.
  FLASHBSR_DEVICE uint32_t wait() {
    ptx::cp_async_wait<Traits::kStages - 1>();
    __syncwarp();
    return ring_ + read_slot_ * Traits::kStageBytes;
  }

  /// Hands the stage back and loads the next one into its place.
  FLASHBSR_DEVICE void release() {
    __syncwarp();
    read_slot_ = read_slot_ + 1 == Traits::kStages ? 0 : read_slot_ + 1;
    produce();
  }

 private:
  static constexpr int kChunks = Traits::kRowBytes / 16;  // of a row
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr int kPasses = Traits::kKvTile / kRowsAtOnce;
  static constexpr int kLooks = max_of(1, Traits::kKvTile / 32);  // tokens looked up by a lane

  struct Cursor {
    int item;
    int32_t position;  // first token of the stage
  };
  struct Place {
    int32_t page;  // -1: past the end
    int32_t token;
  };

  /// To this warp's first stage of the next item that has one.
  FLASHBSR_DEVICE void next_item(Cursor& c) {
    while (++c.item < count_) {
      c.position = items_[c.item].kv_begin + warp_ * Traits::kKvTile;
      if (c.position < items_[c.item].kv_end) return;
    }
  }

  FLASHBSR_DEVICE void advance(Cursor& c) {
    if (c.item >= count_) return;
    c.position += Traits::kWarps * Traits::kKvTile;
    if (c.position >= items_[c.item].kv_end) next_item(c);
  }

  FLASHBSR_DEVICE void look_up(const Cursor& c, Place (&places)[kLooks]) {
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      places[i] = {-1, 0};
      if (c.item >= count_) continue;
      const DecodeItem& item = items_[c.item];
      const int32_t position = c.position + lane_ + 32 * i;
      if (position >= item.kv_end) continue;
      if (args_.kv_indices) {
        const int32_t page = args_.page_size.quotient(position);
        places[i] = {__ldg(args_.kv_indices + item.kv_table + page),
                     args_.page_size.remainder(position, page)};
      } else {
        places[i] = {item.kv_table + position, 0};
      }
    }
  }

  FLASHBSR_DEVICE static const char* row(const PagedView& view, Place place, int head) {
    return static_cast<const char*>(view.data) +
           (place.page * view.stride_page + place.token * view.stride_token +
            head * view.stride_head) *
               dtype_size(Traits::kKv);
  }

  /// Of 16 bytes at `chunk`, those inside a row of `dim` elements.
  FLASHBSR_DEVICE static uint32_t valid_bytes(int chunk, int dim) {
    return max_of(0, min_of(16, dim * dtype_size(Traits::kKv) - chunk * 16));
  }

  FLASHBSR_DEVICE void copy_stage() {
    const PagedView& k = args_.params.k;
    const PagedView& v = args_.params.v;
    const int head = items_[current_.item].kv_head;
    const int chunk = lane_ % kChunks, first = lane_ / kChunks;
    const uint32_t k_bytes = valid_bytes(chunk, k.dim), v_bytes = valid_bytes(chunk, v.dim);
    const uint32_t stage = ring_ + write_slot_ * Traits::kStageBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = first + pass * kRowsAtOnce;
      const Place& mine = pages_[pass * kRowsAtOnce / 32];
      const Place place{__shfl_sync(~0u, mine.page, at % 32),
                        __shfl_sync(~0u, mine.token, at % 32)};
      const bool inside = place.page >= 0;
      // No address beyond the array is formed: what is not copied points at its beginning.
      const char* k_row =
          inside && k_bytes ? row(k, place, head) + chunk * 16 : static_cast<const char*>(k.data);
      const char* v_row =
          inside && v_bytes ? row(v, place, head) + chunk * 16 : static_cast<const char*>(v.data);
      const uint32_t to = stage + decode_tile_offset<Traits>(at, chunk);
      ptx::cp_async_16(to, k_row, inside ? k_bytes : 0, policy_);
      ptx::cp_async_16(to + Traits::kKvTile * Traits::kRowBytes, v_row, inside ? v_bytes : 0,
                       policy_);
    }
  }

  const KernelArgs& args_;
  const DecodeItem* items_;
  uint32_t ring_;
  int warp_;
  int lane_;
  int count_ = 0;
  int write_slot_ = 0;
  int read_slot_ = 0;
  uint64_t policy_;
  Cursor current_;
  Cursor next_;
  Place pages_[kLooks];
  Place next_pages_[kLooks];
};

}  // namespace flashbsr
