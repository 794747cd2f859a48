// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Where a thread's share of a tile comes from and goes to: rows of Q, and tiles of K and V from
// ragged or paged storage, in chunks of 16 bytes. Rows that are not the item's and columns past the
// head dim are filled with zeros, so that nothing found there reaches an output.
//
// The address of each row of K and V is worked out once, by one thread, a tile ahead of the copies,
// and noted in shared memory; the page ids behind it are looked up a tile ahead of that, into
// shared memory too: the main loop has no registers to spare.
#pragma once

#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/ptx/convert.h>
#include <flashbsr/ptx/cp_async.h>
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
  static constexpr bool kShort = kTileRows < kDown;  ///< threads with later rows copy nothing
  static constexpr int kRowsEach = kShort ? 1 : kTileRows / kDown;
  static constexpr int kChunksEach = kChunks / kAcross;
  static_assert((kShort || kTileRows % kDown == 0) && kDown % Swizzle<kRowBytes>::kPeriod == 0);

  FLASHBSR_DEVICE static int32_t row(uint32_t thread) { return thread / kAcross; }
  FLASHBSR_DEVICE static int32_t chunk(uint32_t thread) { return thread % kAcross; }
  /// Offset of chunk (row + kDown * i, chunk + kAcross * j) from that of (row, chunk).
  FLASHBSR_DEVICE static constexpr uint32_t step(int i, int j) {
    return i * kDown * kRowBytes + j * kAcross * 16;
  }
};

/// The thread's share of the item's rows of Q: copy(offset in the tile, source, whether to copy or
/// to write zeros). Rows past row_count become zeros.
template <class Traits, class Copy>
FLASHBSR_DEVICE void visit_queries(const KernelArgs& args, const WorkItem& item,
                                   const Request& request, int32_t thread, const Copy& copy) {
  constexpr int kRowBytes = Traits::kHeadDim * 2;
  using Shape = CopyShape<Traits::kThreads, Traits::kRows, kRowBytes>;
  const RaggedView& q = args.params.q;
  const int32_t row = Shape::row(thread), chunk = Shape::chunk(thread);
  if (Shape::kShort && row >= Traits::kRows) return;
  const uint32_t dst = Swizzle<kRowBytes>::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < Shape::kRowsEach; ++i) {
    const int32_t r = row + i * Shape::kDown;
    const bool inside = r < item.row_count;
    const int32_t packed = item.row_begin + (inside ? r : 0);
    const int32_t token = args.group.quotient(packed);
    const int32_t head = item.kv_head * static_cast<int32_t>(args.group.divisor) +
                         args.group.remainder(packed, token);
    const char* src = q.row(query_row(request, token, args.q_rows), head);
#pragma unroll
    for (int j = 0; j < Shape::kChunksEach; ++j) {
      const int32_t c = chunk + j * Shape::kAcross;
      copy(dst + Shape::step(i, j), src + c * 16, inside && c * 8 < q.dim);
    }
  }
}

/// "Copy", known when compiling.
struct Inside {
  FLASHBSR_DEVICE constexpr operator bool() const { return true; }
};

/// Tiles of K and V of one item. Per tile: look_up, a tile later note, behind a barrier the copies.
/// Of two tiles each, by `slot`: 0 or 1 in turn.
template <class Traits>
class KvLoader {
  static constexpr int kSize = dtype_size(Traits::kKv);
  static constexpr int kRowBytes = Traits::kRowBytes;
  static constexpr int kTokens = Traits::kKvTile;
  /// Addresses of a tile: K's rows, then V's, then those of their scales.
  static constexpr int kNotes = Traits::kSources * kTokens;
  static constexpr int kSlots = Traits::kPageSlots;
  static constexpr int kValueRowBytes = Traits::kValueRowBytes;
  using Shape = CopyShape<Traits::kThreads, kTokens, kRowBytes>;
  using ValueShape = CopyShape<Traits::kThreads, kTokens, kValueRowBytes>;
  static_assert(kTokens <= Traits::kThreads);

 public:
  static constexpr int kChunks = Shape::kRowsEach * Shape::kChunksEach;  ///< of a thread
  static constexpr int kRows = Shape::kRowsEach;                         ///< of a thread
  static constexpr int kValueRows = ValueShape::kRowsEach;

  FLASHBSR_DEVICE KvLoader(const BlockState& state, int32_t thread)
      : rows_(state.kv_rows),
        token_scales_(state.token_scales),
        sources_(state.sources),
        pages_(state.pages),
        thread_(thread),
        offset_(Swizzle<kRowBytes>::offset(Shape::row(thread), Shape::chunk(thread))) {}

  /// Whether a thread has no share of a tile.
  FLASHBSR_DEVICE static bool is_idle(int32_t thread) {
    return Shape::kShort && Shape::row(thread) >= kTokens;
  }

  /// Notes what all rows of the item have in common; a barrier follows.
  FLASHBSR_DEVICE static void describe_sources(const KernelArgs& args, const Task& task,
                                               const BlockState& state, int32_t thread) {
    if (thread >= Traits::kSources) return;
    const Params& p = args.params;
    if (thread < 2) {
      const PagedView& second = Traits::kLatent ? p.k_tail : p.v;
      describe_source(thread == 0 ? p.k : second, kSize, task, state.sources[thread]);
    } else {
      const PagedView& view = thread == 2 ? p.k_scales : p.v_scales;
      describe_source(view, dtype_size(view.dtype), task, state.sources[thread]);
    }
  }

  /// Reads the page ids of the tile at KV position `first`, each thread what it will note. Arrived
  /// behind the next wait for all copies. There need not be such a tile.
  FLASHBSR_DEVICE void look_up(const KernelArgs& args, const Task& task, int32_t first,
                               uint32_t slot) {
    const int32_t thread = ptx::thread_index();
    if (kSlots < Traits::kThreads && thread >= kSlots) return;
    const int32_t page = args.page_size.quotient(position_of(task, first, thread));
    const int32_t* src = args.kv_indices + task.request.kv_begin + page;
    if constexpr (Traits::kArch >= 80) {
      ptx::cp_async_4_when(ptx::shared_address(pages_ + slot * kSlots + thread), src,
                           args.kv_indices != nullptr);
    } else {
      page_ = args.kv_indices ? __ldg(src) : 0;
    }
  }

  /// Addresses that this thread notes.
  struct Found {
    uint64_t address[(kNotes + Traits::kThreads - 1) / Traits::kThreads];
  };

  /// Where the rows of the tile at `first`, looked up in `slot`, are. Ragged KV: the page of a
  /// token is its row.
  FLASHBSR_DEVICE Found find(const KernelArgs& args, const Task& task, int32_t first,
                             uint32_t slot) const {
    const int32_t thread = ptx::thread_index();
    const int32_t position = position_of(task, first, thread);
    const int32_t quotient = args.page_size.quotient(position);
    const int32_t token = args.page_size.remainder(position, quotient);
    int32_t page = task.request.kv_begin + quotient;
    if (args.kv_indices) {
      page = Traits::kArch >= 80 ? pages_[slot * kSlots + thread] : page_;
    }
    Found found;
#pragma unroll
    for (int i = 0; i * Traits::kThreads < kNotes; ++i) {
      const uint32_t n = i * Traits::kThreads + thread;
      const KvSource source = sources_[n / kTokens % Traits::kSources];
      found.address[i] = source.base + static_cast<uint32_t>(page) * source.page_bytes +
                         static_cast<uint32_t>(token) * source.token_bytes;
    }
    return found;
  }
  FLASHBSR_DEVICE void note(const Found& found, uint32_t slot) const {
    const int32_t thread = ptx::thread_index();
#pragma unroll
    for (int i = 0; i * Traits::kThreads < kNotes; ++i) {
      const int32_t n = i * Traits::kThreads + thread;
      if (kNotes < Traits::kThreads && n >= kNotes) break;
      rows_[slot * kNotes + n] = reinterpret_cast<const char*>(found.address[i]);
    }
  }
  FLASHBSR_DEVICE void note(const KernelArgs& args, const Task& task, int32_t first,
                            uint32_t slot) const {
    if (kSlots < Traits::kThreads && ptx::thread_index() >= kSlots) return;
    note(find(args, task, first, slot), slot);
  }

  /// The tile at `first`, noted in `slot`: copy(chunk number, offset in the tile, source, whether
  /// to copy or to write zeros: Inside{} for all of a tile that has none).
  template <class Copy>
  FLASHBSR_DEVICE void visit_keys(const KernelArgs& args, const Task& task, int32_t first,
                                  uint32_t slot, const Copy& copy) const {
    visit<Shape, kRowBytes>(rows_ + slot * kNotes, offset_, args.params.k.dim,
                            task.item.kv_end - first, copy);
  }
  template <class Copy>
  FLASHBSR_DEVICE void visit_values(const KernelArgs& args, const Task& task, int32_t first,
                                    uint32_t slot, const Copy& copy) const {
    visit<ValueShape, kValueRowBytes>(rows_ + slot * kNotes + kTokens, value_offset(),
                                      args.params.v.dim, task.item.kv_end - first, copy);
  }

  /// Where the scales of the tile noted in `slot` are: those of K's token `n`, and from kTokens on
  /// of V's.
  FLASHBSR_DEVICE const char* scales(uint32_t slot, int32_t n) const {
    return rows_[slot * kNotes + 2 * kTokens + n];
  }

  /// Copies the scales of the tile noted in `slot`, of which `count` tokens are the item's. Others
  /// are zeros, so that weights of nothing stay nothing.
  FLASHBSR_DEVICE void copy_scales(const Params& p, uint32_t slot, int32_t count) const {
    if constexpr (Traits::kTokenScales) {
      static_assert(2 * kTokens <= Traits::kThreads);
      constexpr int kWords = Traits::kScaleWords;
      const int32_t thread = ptx::thread_index();
      if (2 * kTokens < Traits::kThreads && thread >= 2 * kTokens) return;
      const uint32_t to =
          ptx::shared_address(token_scales_ + (slot * 2 * kTokens + thread) * kWords);
      // No copy has two bytes: of a half the word comes that has it, which never reaches beyond the
      // memory. settle_scales() takes the half.
      const uint64_t from = reinterpret_cast<uint64_t>(scales(slot, thread)) & ~uint64_t{3};
      const int32_t bytes = thread < kTokens ? p.k_scales.dim * Traits::kScaleSize
                                             : p.v_scales.dim * Traits::kValueScaleSize;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (i > 0 && 4 * i >= bytes) break;
        ptx::cp_async_4_if(to + 4 * i, reinterpret_cast<const char*>(from + 4 * i),
                           thread % kTokens < count);
      }
    }
  }

  /// Scales in fp16 that this thread has copied, once they have arrived, become floats; a barrier
  /// follows.
  FLASHBSR_DEVICE void settle_scales(const Params& p, uint32_t slot) const {
    if constexpr (Traits::kTokenScales && !(Traits::kPacked && Traits::kValuePacked)) {
      const int32_t thread = ptx::thread_index();
      if (2 * kTokens < Traits::kThreads && thread >= 2 * kTokens) return;
      if ((thread < kTokens ? p.k_scales : p.v_scales).dtype != DType::kF16) return;
      float& scale = token_scales_[(slot * 2 * kTokens + thread) * Traits::kScaleWords];
      const uint32_t word = float_bits(scale);
      const auto from = reinterpret_cast<uint64_t>(scales(slot, thread));
      scale = from & 2 ? ptx::unpack_high<DType::kF16>(word) : ptx::unpack_low<DType::kF16>(word);
    }
  }

  /// Whole rows of a latent cache, noted as its latents and, in the place of V, its tails.
  template <class Copy>
  FLASHBSR_DEVICE void visit_latents(const Task& task, int32_t first, uint32_t slot,
                                     const Copy& copy) const {
    constexpr int kLatentChunks = Traits::kValueDim * kSize / 16 / Shape::kAcross;
    const int32_t row = Shape::row(thread_), chunk = Shape::chunk(thread_);
    const int32_t count = task.item.kv_end - first;
    const char* const* const rows = rows_ + slot * kNotes + row;
    const auto copy_all = [&](const auto& inside) {
#pragma unroll
      for (int i = 0; i < Shape::kRowsEach; ++i) {
        const char* const latent = rows[i * Shape::kDown] + chunk * 16;
        const char* const tail = rows[kTokens + i * Shape::kDown] + chunk * 16;
#pragma unroll
        for (int j = 0; j < Shape::kChunksEach; ++j) {
          const int k = j - kLatentChunks;
          const char* const src = (k < 0 ? latent : tail) + (k < 0 ? j : k) * Shape::kAcross * 16;
          copy(i * Shape::kChunksEach + j, offset_ + Shape::step(i, j), src, inside(i));
        }
      }
    };
    if (count >= kTokens) {
      copy_all([](int) { return Inside{}; });
    } else {
      copy_all([&](int i) { return row + i * Shape::kDown < count; });
    }
  }

  /// Where this thread's row `i` of a whole tile is: of K, or of V.
  FLASHBSR_DEVICE const char* source(uint32_t slot, bool value, int i) const {
    const char* const* const rows = rows_ + slot * kNotes;
    return value ? source_of<ValueShape>(rows + kTokens, i) : source_of<Shape>(rows, i);
  }
  /// Copies it into the tile at shared address `tile`, if `wanted`.
  FLASHBSR_DEVICE void copy_row(uint32_t tile, bool value, int i, const char* src,
                                bool wanted) const {
    if (value) {
      copy_row_of<ValueShape>(tile + value_offset(), i, src, wanted);
    } else {
      copy_row_of<Shape>(tile + offset_, i, src, wanted);
    }
  }

 private:
  /// In a tile of V, of this thread's first chunk.
  FLASHBSR_DEVICE uint32_t value_offset() const {
    if constexpr (kValueRowBytes == kRowBytes) return offset_;
    return Swizzle<kValueRowBytes>::offset(ValueShape::row(thread_), ValueShape::chunk(thread_));
  }

  template <class Of>
  FLASHBSR_DEVICE const char* source_of(const char* const* rows, int i) const {
    return rows[Of::row(thread_) + i * Of::kDown] + Of::chunk(thread_) * 16;
  }
  template <class Of>
  FLASHBSR_DEVICE void copy_row_of(uint32_t to, int i, const char* src, bool wanted) const {
    if (Of::kShort && Of::row(thread_) >= kTokens) return;
#pragma unroll
    for (int j = 0; j < Of::kChunksEach; ++j) {
      ptx::cp_async_16_when(to + Of::step(i, j), src + j * Of::kAcross * 16, wanted);
    }
  }

  FLASHBSR_DEVICE static void describe_source(const PagedView& view, int size, const Task& task,
                                              KvSource& source) {
    const auto bytes = [&](int64_t stride) { return static_cast<uint64_t>(stride) * size; };
    const uint64_t head = static_cast<uint32_t>(task.item.kv_head);
    source = {reinterpret_cast<uint64_t>(view.data) + head * bytes(view.stride_head),
              bytes(view.stride_page), bytes(view.stride_token)};
  }

  /// Of this thread's token; outside the item that of its nearest, which is not copied.
  FLASHBSR_DEVICE static int32_t position_of(const Task& task, int32_t first, int32_t thread) {
    const int32_t position =
        min_of(first + static_cast<int32_t>(static_cast<uint32_t>(thread) % kTokens),
               task.item.kv_end - 1);
    return max_of(position, task.item.kv_begin);
  }

  /// @param to  in the tile, of this thread's first chunk
  template <class Of, int kBytes, class Copy>
  FLASHBSR_DEVICE void visit(const char* const* rows, uint32_t to, int32_t dim, int32_t count,
                             const Copy& copy) const {
    constexpr int kChunkDims = Traits::kHeadDim / (kBytes / 16);  // of 16 bytes
    const int32_t row = Of::row(thread_), chunk = Of::chunk(thread_);
    if (Of::kShort && row >= kTokens) return;
    rows += row;
    const char* src[Of::kRowsEach];
#pragma unroll
    for (int i = 0; i < Of::kRowsEach; ++i) src[i] = rows[i * Of::kDown] + chunk * 16;
    if (count >= kTokens && dim == Traits::kHeadDim) {
#pragma unroll
      for (int i = 0; i < Of::kRowsEach; ++i) {
#pragma unroll
        for (int j = 0; j < Of::kChunksEach; ++j) {
          copy(i * Of::kChunksEach + j, to + Of::step(i, j), src[i] + j * Of::kAcross * 16,
               Inside{});
        }
      }
    } else {
      const int32_t chunk = Of::chunk(ptx::thread_index());  // anew: nothing of this is kept
#pragma unroll
      for (int i = 0; i < Of::kRowsEach; ++i) {
        const bool inside = row + i * Of::kDown < count;
#pragma unroll
        for (int j = 0; j < Of::kChunksEach; ++j) {
          const bool mine = (chunk + j * Of::kAcross) * kChunkDims < dim;
          copy(i * Of::kChunksEach + j, to + Of::step(i, j), src[i] + j * Of::kAcross * 16,
               inside && mine);
        }
      }
    }
  }

  const char** rows_;
  float* token_scales_;
  const KvSource* sources_;
  int32_t* pages_;
  int32_t thread_;
  uint32_t offset_;  ///< in a tile, of this thread's first chunk
  int32_t page_;     ///< before sm_80: a look-up under way
};

}  // namespace flashbsr::sm80
