// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From a warpgroup's registers to the output, or to the partial state of a split tile. Stores go
// straight from registers: after a transpose inside each quad a lane has 16 bytes of a row, and
// every 32-byte sector is written whole.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/kernel/sm90a/mainloop.h>

namespace flashbsr::sm90a {

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

/// Stores a row of O in 16-bit elements; `half` says which of the thread's two rows.
template <DType kType, int kCount>
FLASHBSR_DEVICE void store_row(char* row, int32_t dim, const float (&o)[kCount], int half,
                               float factor, bool exists) {
  const int32_t lane = threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < kCount / 16; ++g) {  // 32 dims
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * (4 * g + i) + 2 * half;
      x[i] = ptx::pack2<kType>(o[at] * factor, o[at + 1] * factor);
    }
    transpose_quad(x);
    const int32_t d = 32 * g + 8 * lane;
    if (exists && d < dim) *reinterpret_cast<uint4*>(row + 2 * d) = {x[0], x[1], x[2], x[3]};
  }
}

/// The same in fp32, without the transpose: a quad's 32 bytes are a sector.
template <int kCount>
FLASHBSR_DEVICE void store_floats(char* row, int32_t dim, const float (&o)[kCount], int half,
                                  float factor, bool exists) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const int32_t d = 8 * i + static_cast<int32_t>(threadIdx.x) % 4 * 2;
    const float x[2] = {o[4 * i + 2 * half] * factor, o[4 * i + 2 * half + 1] * factor};
    if (exists) store_typed<DType::kF32>(row, d, dim, x);
  }
}

}  // namespace detail

/// Every thread of the warpgroup calls it; `first_row` is that of the thread within the item.
template <class Traits, class Variant>
FLASHBSR_DEVICE void write_rows(const KernelArgs& args, const Tile& tile, int32_t first_row,
                                const Mainloop<Traits, Variant>& loop) {
  const Params& p = args.params;
  const WorkItem& item = tile.item;
  using Loop = Mainloop<Traits, Variant>;
  // Without softmax the weights' shift is all there is to undo.
  constexpr float kUnit = Loop::kShift == 0.0f ? 1.0f : 1.0f / 32768.0f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = loop.sum[h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int32_t r = first_row + 8 * h;
    const bool exists = r < item.row_count;
    const bool leads = exists && threadIdx.x % 4 == 0;
    const float factor = ptx::max(fabsf(loop.scores.factor[h]), 1e-30f);
    const float lse =
        sum == 0.0f ? -infinity() : ptx::log2(sum) + loop.top[h] * factor - Loop::kShift;
    if (item.slot < 0) {
      const RowName row(args, item, r);
      RowEnd end = end_row<Variant::use_softmax>(p, row.q_head, item.kv_head, sum, lse);
      if constexpr (!Variant::use_softmax) end.factor *= kUnit;
      const int64_t token = static_cast<int64_t>(tile.request.q_begin) + row.token;
      char* out = p.out.row(token, row.q_head);
      with_output_dtype(p.out.dtype, [&]<DType kType>() {
        if constexpr (kType == DType::kF32) {
          detail::store_floats(out, p.v.dim, loop.o, h, end.factor, exists);
        } else {
          detail::store_row<kType>(out, p.v.dim, loop.o, h, end.factor, exists);
        }
      });
      if (leads) write_lse(p, token, row.q_head, end.lse);
    } else {
      float scale = kUnit;
      if constexpr (Variant::use_softmax) scale = sum == 0.0f ? 0.0f : ptx::reciprocal(sum);
      const int32_t tile_rows = args.header->tile_rows;
      char* out = reinterpret_cast<char*>(partial_out_row(p, tile_rows, item.slot, r));
      detail::store_floats(out, p.v.dim, loop.o, h, scale, exists);
      if (leads) *partial_lse(p, tile_rows, item.slot, r) = Variant::use_softmax ? lse : 0.0f;
    }
  }
}

}  // namespace flashbsr::sm90a
