// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Where a thread's share of a tile comes from and goes to: rows of Q, and tiles of K and V from
// ragged or paged storage, in chunks of 16 bytes. Rows that are not the item's and columns past the
// head dim are filled with zeros, so that nothing found there reaches an output.
#pragma once

#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/ptx/sync.h>
#include <flashbsr/tile/swizzle.h>

namespace flashbsr::sm80 {

/// Which 16-byte chunks of a tile a thread copies: chunks chunk + kAcross * j of rows
/// row + kDown * i.
template <int kThreads, int kTileRows, int kRowBytes>
struct CopyShape {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kAcross = kChunks < 8 ? kChunks : 8;  // a whole line of a row per 8 threads
  static constexpr int kDown = kThreads / kAcross;
  static constexpr int kRowsEach = kTileRows / kDown;
  static constexpr int kChunksEach = kChunks / kAcross;
  static_assert(kTileRows % kDown == 0 && kDown % Swizzle<kRowBytes>::kPeriod == 0);

  FLASHBSR_DEVICE static int32_t row(int32_t thread) { return thread / kAcross; }
  FLASHBSR_DEVICE static int32_t chunk(int32_t thread) { return thread % kAcross; }
  /// Offset of chunk (row + kDown * i, chunk + kAcross * j) from that of (row, chunk).
  FLASHBSR_DEVICE static constexpr uint32_t step(int i, int j) {
    return i * kDown * kRowBytes + j * kAcross * 16;
  }
};

/// The thread's share of the item's rows of Q: copy(offset in the tile, source, bytes to copy of
/// 16). Rows past row_count become zeros.
template <class Traits, class Copy>
FLASHBSR_DEVICE void visit_queries(const KernelArgs& args, const WorkItem& item, int32_t q_begin,
                                   int32_t thread, const Copy& copy) {
  constexpr int kRowBytes = Traits::kHeadDim * 2;
  using Shape = CopyShape<Traits::kThreads, Traits::kRows, kRowBytes>;
  const RaggedView& q = args.params.q;
  const int32_t row = Shape::row(thread), chunk = Shape::chunk(thread);
  const uint32_t dst = Swizzle<kRowBytes>::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < Shape::kRowsEach; ++i) {
    const int32_t r = row + i * Shape::kDown;
    const bool inside = r < item.row_count;
    const int32_t packed = item.row_begin + (inside ? r : 0);
    const int32_t token = args.group.quotient(packed);
    const int32_t head = item.kv_head * static_cast<int32_t>(args.group.divisor) +
                         args.group.remainder(packed, token);
    const char* src = q.row(static_cast<int64_t>(q_begin) + token, head);
#pragma unroll
    for (int j = 0; j < Shape::kChunksEach; ++j) {
      const int32_t c = chunk + j * Shape::kAcross;
      copy(dst + Shape::step(i, j), src + c * 16, inside && c * 8 < q.dim ? 16 : 0);
    }
  }
}

/// Tiles of K and V of one item. Page ids are looked up a tile ahead of the copies that need them.
template <class Traits>
class KvLoader {
 public:
  /// Page ids of the tile at KV position `first`. Ragged KV: the page of a token is its row.
  FLASHBSR_DEVICE void find(const KernelArgs& args, const Task& task, int32_t first) {
    const int32_t end = task.item.kv_end, base = task.request.kv_begin;
    const int32_t row = Shape::row(ptx::thread_index());
#pragma unroll
    for (int i = 0; i < Shape::kRowsEach; ++i) {
      const int32_t position = first + row + i * Shape::kDown;
      page_[i] = base + position;
      if (args.kv_indices && position < end) {
        page_[i] = args.kv_indices[base + args.page_size.quotient(position)];
      }
    }
  }

  /// The tile whose pages were found last: copy(chunk number, offset in the tile, source, bytes to
  /// copy of 16).
  template <class Copy>
  FLASHBSR_DEVICE void visit_keys(const KernelArgs& args, const Task& task, int32_t first,
                                  const Copy& copy) const {
    visit(args, args.params.k, task.item, first, copy);
  }
  template <class Copy>
  FLASHBSR_DEVICE void visit_values(const KernelArgs& args, const Task& task, int32_t first,
                                    const Copy& copy) const {
    visit(args, args.params.v, task.item, first, copy);
  }

 private:
  static constexpr int kSize = dtype_size(Traits::kKv);
  static constexpr int kRowBytes = Traits::kHeadDim * kSize;
  using Shape = CopyShape<Traits::kThreads, Traits::kKvTile, kRowBytes>;

 public:
  static constexpr int kChunks = Shape::kRowsEach * Shape::kChunksEach;  ///< of a thread

 private:
  template <class Copy>
  FLASHBSR_DEVICE void visit(const KernelArgs& args, const PagedView& view, const WorkItem& item,
                             int32_t first, const Copy& copy) const {
    const int32_t thread = ptx::thread_index();
    const int32_t row = Shape::row(thread), chunk = Shape::chunk(thread);
    const uint32_t dst = Swizzle<kRowBytes>::offset(row, chunk);
    const char* const base = static_cast<const char*>(view.data) +
                             item.kv_head * (view.stride_head * kSize) + chunk * 16;
    const int32_t end = item.kv_end;
#pragma unroll
    for (int i = 0; i < Shape::kRowsEach; ++i) {
      const int32_t position = first + row + i * Shape::kDown;
      const bool inside = position < end;
      const char* src = base;
      if (inside) {
        src += page_[i] * (view.stride_page * kSize);
        if (args.kv_indices) {
          const int32_t slot =
              args.page_size.remainder(position, args.page_size.quotient(position));
          src += slot * (view.stride_token * kSize);
        }
      }
#pragma unroll
      for (int j = 0; j < Shape::kChunksEach; ++j) {
        const int32_t d = (chunk + j * Shape::kAcross) * (16 / kSize);
        copy(i * Shape::kChunksEach + j, dst + Shape::step(i, j), src + j * Shape::kAcross * 16,
             inside && d < view.dim ? copy_bytes(view.dim - d) : 0);
      }
    }
  }

  /// A float8 row may end in the middle of a chunk.
  FLASHBSR_DEVICE static uint32_t copy_bytes(int32_t left) {
    return kSize == 1 && left < 16 ? left : 16;
  }

  int32_t page_[Shape::kRowsEach];
};

}  // namespace flashbsr::sm80
