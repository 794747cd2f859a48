// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From a warpgroup's registers to the output, or to the partial state of a split tile.
//
// A warp whose 16 rows exist puts them where its rows of Q were and lets the copy engine write
// them: between two items instructions are on the way. Others store from registers: after a
// transpose inside each quad a lane has 16 bytes of a row, and every 32-byte sector is written
// whole.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/kernel/sm90a/mainloop.h>
#include <flashbsr/ptx/mma.h>

namespace flashbsr::sm90a {

inline constexpr int kRowsBarrier = 4;  ///< named barrier of the first warpgroup's stores

namespace detail {

/// Lane l of a quad has x[i] = element l of chunk i; afterwards element i of chunk l.
FLASHBSR_DEVICE void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? x[0] : x[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? x[2] : x[3], 1);
  const uint32_t a0 = odd ? a : x[0], a1 = odd ? x[1] : a;
  const uint32_t b0 = odd ? b : x[2], b1 = odd ? x[3] : b;
  const uint32_t c0 = __shfl_xor_sync(0xffffffffu, high ? a0 : b0, 2);
  const uint32_t c1 = __shfl_xor_sync(0xffffffffu, high ? a1 : b1, 2);
  x[0] = high ? c0 : a0;
  x[1] = high ? c1 : a1;
  x[2] = high ? b0 : c0;
  x[3] = high ? b1 : c1;
}

/// A thread's two rows of an item.
struct RowPair {
  char* out[2];  ///< null: there is no such row
  float factor[2];
};

/// Stores them in 16-bit elements. Both types are one piece of code: shuffles are most of it.
template <int kCount>
FLASHBSR_DEVICE void store_halves(const RowPair& rows, DType type, int32_t dim,
                                  const float (&o)[kCount]) {
  const int32_t lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kCount / 16; ++g) {  // 32 dims
    const int32_t d = 32 * g + 8 * lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * g + i) + 2 * h;
        const float low = o[at] * rows.factor[h], high = o[at + 1] * rows.factor[h];
        const uint32_t brain = ptx::pack2<DType::kBF16>(low, high),
                       half = ptx::pack2<DType::kF16>(low, high);
        x[i] = type == DType::kBF16 ? brain : half;
      }
      transpose_quad(x);
      if (rows.out[h] && d < dim) {
        *reinterpret_cast<uint4*>(rows.out[h] + 2 * d) = {x[0], x[1], x[2], x[3]};
      }
    }
  }
}

/// The same in e4m3: of 64 dims lane l of a quad has 16.
template <int kCount>
FLASHBSR_DEVICE void store_bytes(const RowPair& rows, int32_t dim, const float (&o)[kCount]) {
  const int32_t lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kCount / 32; ++g) {
    const int32_t d = 64 * g + 16 * lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // two dims of chunk 2i, two of the next one
        const int at = 32 * g + 8 * i + 2 * h;
        const float f = rows.factor[h];
        x[i] = ptx::pack4_e4m3(o[at] * f, o[at + 1] * f, o[at + 4] * f, o[at + 5] * f);
      }
      transpose_quad(x);
      uint2* const out = reinterpret_cast<uint2*>(rows.out[h] + d);
      if (rows.out[h] && d < dim) {
        out[0] = {ptx::permute_bytes(x[0], x[1], 0x5410), ptx::permute_bytes(x[2], x[3], 0x5410)};
      }
      if (rows.out[h] && d + 8 < dim) {
        out[1] = {ptx::permute_bytes(x[0], x[1], 0x7632), ptx::permute_bytes(x[2], x[3], 0x7632)};
      }
    }
  }
}

/// The same in fp32, without the transpose: a quad's 32 bytes are a sector.
template <int kCount>
FLASHBSR_DEVICE void store_floats(const RowPair& rows, int32_t dim, const float (&o)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int32_t d = 8 * i + static_cast<int32_t>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x[2] = {o[4 * i + 2 * h] * rows.factor[h], o[4 * i + 2 * h + 1] * rows.factor[h]};
      if (rows.out[h]) store_sized<4>(rows.out[h], DType::kF32, d, dim, x);
    }
  }
}

/// Where a warp's 16 rows of O lie in shared memory: as its rows of Q did, [64 dims][row].
struct PlacedRows {
  uint32_t base;  ///< of the first row
  int32_t first;  ///< within the item
};

/// O of a warp's 16 rows to shared memory, in 16-bit elements.
template <class Traits, DType kType>
FLASHBSR_DEVICE void place_rows(uint32_t base, const float (&factor)[2],
                                const float (&o)[Traits::kHeadDimVo / 2]) {
  const int32_t lane = ptx::thread_index() % 32;
  const int32_t row = lane % 16, high = lane / 16;  // of the lane's address, in 8 dims of 16
#pragma unroll
  for (int k = 0; k < Traits::kHeadDimVo / 16; ++k) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] =
          ptx::pack2<kType>(o[8 * k + 2 * i] * factor[i % 2], o[8 * k + 2 * i + 1] * factor[i % 2]);
    }
    const uint32_t chunk = (2 * k % 8 + high) ^ (row & 7);
    ptx::stmatrix_x4(base + k / 4 * Traits::kRows * 128 + row * 128 + chunk * 16, x);
  }
}

/// All 16 rows to the output, by the copy engine.
template <class Traits>
FLASHBSR_DEVICE void store_box(const HopperArgs& args, const Tile& tile, const PlacedRows& rows) {
  // By shuffles: what is not known to be the same in all lanes is handed to the copy engine in a
  // loop over lanes, of 250 cycles a box.
  const auto uniform = [](int32_t x) { return __shfl_sync(0xffffffffu, x, 0); };
  const int32_t base = uniform(rows.base), packed = uniform(tile.item.row_begin + rows.first);
  const int32_t q_begin = uniform(tile.request.q_begin), kv_head = uniform(tile.item.kv_head);
  const int32_t token = args.base.group.quotient(packed);
  const int32_t head = args.base.group.remainder(packed, token);
  ptx::fence_async_proxy();
  __syncwarp();
  if (ptx::thread_index() % 32 != 0) return;
#pragma unroll
  for (int c = 0; c < Traits::kHeadDimVo / 64; ++c) {
    ptx::tma_store(args.out, base + c * Traits::kRows * 128, c * 64, head, q_begin + token,
                   kv_head);
  }
  ptx::tma_store_commit();
}

/// Those that exist, by the warp, 16 bytes a lane. Lane l knows where row l goes.
template <class Traits>
FLASHBSR_DEVICE void copy_rows(const KernelArgs& args, const Tile& tile, const PlacedRows& rows) {
  constexpr int kChunks = Traits::kHeadDimVo / 8, kStep = 32 / kChunks;
  const Params& p = args.params;
  const int32_t lane = ptx::thread_index() % 32, chunk = lane % kChunks;
  uint64_t mine = 0;
  if (const int32_t r = rows.first + lane; lane < 16 && r < tile.item.row_count) {
    const RowName row(args, tile.item, r);
    mine = reinterpret_cast<uint64_t>(
        p.out.row(static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head));
  }
  const uint32_t column = rows.base + chunk / 8 * Traits::kRows * 128;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; i += kStep) {
    const int32_t r = i + lane / kChunks;
    const uint4 x = ptx::load_shared_16(column + r * 128 + ((chunk ^ r) % 8 << 4));
    char* out = reinterpret_cast<char*>(__shfl_sync(0xffffffffu, mine, r));
    if (out && chunk * 8 < p.v.dim) *reinterpret_cast<uint4*>(out + 16 * chunk) = x;
  }
}

}  // namespace detail

/// Writes the LSE of a thread's two rows, to where the caller wants it or to the partial state.
template <class Traits>
FLASHBSR_DEVICE void write_states(const KernelArgs& args, const Tile& tile, int32_t first_row,
                                  const float (&lse)[2]) {
  const Params& p = args.params;
  const bool split = tile.item.slot >= 0;
  if (threadIdx.x % 4 != 0 || (!split && !p.lse)) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = first_row + 8 * h;
    if (r >= tile.item.row_count) continue;
    if (split) {
      *partial_lse(p, tile.item.slot, r) = lse[h];
    } else {
      const RowName row(args, tile.item, r);
      write_lse(p, static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head, lse[h]);
    }
  }
}

/// Calls f.operator()<type>() for the run-time type of a 16-bit output.
template <class F>
FLASHBSR_DEVICE void with_half_type(DType t, const F& f) {
  if (t == DType::kBF16) {
    f.template operator()<DType::kBF16>();
  } else {
    f.template operator()<DType::kF16>();
  }
}

/// Of a thread's two rows: the LSE, in base 2, and what O is to be multiplied by.
struct RowStates {
  float lse[2];
  float factor[2];
};

/// @param sum  the rows' denominators
template <class Variant, class Loop>
FLASHBSR_DEVICE RowStates row_states(const KernelArgs& args, const Tile& tile, int32_t first_row,
                                     const Loop& loop, const float (&sum)[2]) {
  const Params& p = args.params;
  const WorkItem& item = tile.item;
  // Without softmax the weights' shift is all there is to undo.
  constexpr float kUnit = Loop::kShift == 0.0f ? 1.0f : 1.0f / 32768.0f;
  const bool split = item.slot >= 0;
  const float v_scale = value_scale(p, item.kv_head);
  RowStates row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float unit = ptx::max(fabsf(loop.scores.factor[h]), 1e-30f);
    row.lse[h] =
        sum[h] == 0.0f ? -infinity() : ptx::log2(sum[h]) + loop.top[h] * unit - Loop::kShift;
    if (split) {
      row.factor[h] = sum[h] == 0.0f ? 0.0f : ptx::reciprocal(sum[h]);
    } else {
      const int32_t q_head = p.sinks ? RowName(args, item, first_row + 8 * h).q_head : 0;
      const RowEnd end = end_row<Variant::use_softmax>(p, v_scale, q_head, sum[h], row.lse[h]);
      row.factor[h] = end.factor;
      row.lse[h] = end.lse;
    }
    if constexpr (!Variant::use_softmax) {
      row.factor[h] = split ? kUnit : row.factor[h] * kUnit;
      row.lse[h] = 0.0f;
    }
    if constexpr (Loop::kValueUnit != 1.0f) row.factor[h] *= Loop::kValueUnit;
  }
  return row;
}

/// Every thread of the warpgroup calls it; `first_row` is that of the thread within the item.
template <class Traits, class Variant>
FLASHBSR_DEVICE void write_rows(const HopperArgs& args, const Tile& tile, int32_t first_row,
                                const Mainloop<Traits, Variant>& loop) {
  const Params& p = args.base.params;
  const WorkItem& item = tile.item;
  const bool split = item.slot >= 0;
  // Both rows at once, as far as possible: what follows is a chain of latencies.
  float sum[2] = {loop.sum[0], loop.sum[1]};
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], lanes);
  }
  const RowStates states = row_states<Variant>(args.base, tile, first_row, loop, sum);
  const float (&factor)[2] = states.factor;
  write_states<Traits>(args.base, tile, first_row, states.lse);
  const DType type = split ? DType::kF32 : p.out.dtype;
  const bool halves = type != DType::kF32 && type != DType::kE4M3;
  // An item without KV has no Q: its place may be the next item's.
  if (Traits::kStoreBoxes && halves && tile.count > 0) {
    const int32_t first = first_row - ptx::thread_index() % 32 / 4;
    const detail::PlacedRows rows{loop.queries() + first * 128, first};
    // By a shuffle: where a warp might go two ways, the main loop's descriptors are no longer kept
    // in uniform registers.
    const int32_t whole =
        __shfl_sync(0xffffffffu, args.store_boxes && first + 16 <= item.row_count, 0);
    // The warps of a warpgroup read Q together.
    ptx::named_barrier_sync(kRowsBarrier + first / 64, 128);
    with_half_type(p.out.dtype, [&]<DType kType>() {
      detail::place_rows<Traits, kType>(rows.base, factor, loop.o);
    });
    if (whole) {
      detail::store_box<Traits>(args, tile, rows);
    } else {
      detail::copy_rows<Traits>(args.base, tile, rows);
    }
    return;
  }
  detail::RowPair rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t r = first_row + 8 * h;
    const RowName row(args.base, item, r);
    rows.factor[h] = factor[h];
    rows.out[h] =
        split ? reinterpret_cast<char*>(partial_out_row(p, item.slot, r))
              : p.out.row(static_cast<int64_t>(tile.request.q_begin) + row.token, row.q_head);
    if (r >= item.row_count) rows.out[h] = nullptr;
  }
  if (halves && !Traits::kStoreBoxes) {
    detail::store_halves(rows, p.out.dtype, p.v.dim, loop.o);
  } else if (type == DType::kE4M3) {
    detail::store_bytes(rows, p.v.dim, loop.o);
  } else {
    // Where halves are left they are zeros: half as many floats.
    detail::store_floats(rows, halves ? p.v.dim / 2 : p.v.dim, loop.o);
  }
}

}  // namespace flashbsr::sm90a
