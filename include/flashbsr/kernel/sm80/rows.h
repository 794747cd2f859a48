// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What a variant does to whole rows: of Q, K and V in their tiles of shared memory, before they are
// multiplied; of the output in fp32, after everything else. A thread has a row to itself, in local
// memory, so that the variant's function is plain C++ on an array of floats. That costs about as
// much as the products do: a kernel for what nothing else computes, not for speed.
#pragma once

#include <flashbsr/kernel/finish.h>
#include <flashbsr/kernel/sm80/item.h>
#include <flashbsr/tile/swizzle.h>
#include <flashbsr/variant/variant.h>

namespace flashbsr::sm80 {

namespace detail {

/// Row `row` of a 16-bit tile through f(floats). The columns past `dim` stay zeros.
template <class Traits, class F>
FLASHBSR_DEVICE void rewrite_row(char* tile, int32_t row, int32_t dim, const F& f) {
  static_assert(!Traits::kBytes, "float8 has no room for what a variant makes of a row");
  constexpr DType kType = Traits::kCompute;
  using Place = Swizzle<Traits::kHeadDim * 2>;
  float x[Traits::kHeadDim];
#pragma unroll 1
  for (int32_t c = 0; c * 8 < dim; ++c) {
    const uint4 w = *reinterpret_cast<const uint4*>(tile + Place::offset(row, c));
    const uint32_t pair[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[8 * c + 2 * i] = ptx::unpack_low<kType>(pair[i]);
      x[8 * c + 2 * i + 1] = ptx::unpack_high<kType>(pair[i]);
    }
  }
  f(static_cast<float*>(x));
#pragma unroll 1
  for (int32_t c = 0; c * 8 < dim; ++c) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i] = ptx::pack2<kType, Traits::kArch>(x[8 * c + 2 * i], x[8 * c + 2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(tile + Place::offset(row, c)) = {pair[0], pair[1], pair[2], pair[3]};
  }
}

}  // namespace detail

/// Queries of an item, in the tile at `memory`; between barriers.
template <class Traits, class Variant>
FLASHBSR_DEVICE void rewrite_queries(const KernelArgs& args, const Task& task,
                                     const PrefillRow* rows, char* memory, int32_t thread) {
  if constexpr (Variant::transforms_queries) {
    const Variant variant(args.params);
    const Request& request = task.request;
    for (int32_t r = thread; r < task.item.row_count; r += Traits::kThreads) {
      const RowAt at{&request, rows[r].token, request.kv_len - request.q_len + rows[r].token,
                     rows[r].q_head, args.params.q.dim};
      detail::rewrite_row<Traits>(memory, r, at.dim,
                                  [&](float* x) { variant.query_transform(x, at); });
    }
  }
}

/// K, or V, of the tile at KV position `first`, in `tile`; between barriers.
template <class Traits, class Variant, bool kValues>
FLASHBSR_DEVICE void rewrite_tile(const KernelArgs& args, const Task& task, int32_t first,
                                  char* tile, int32_t thread) {
  if constexpr (kValues ? Variant::transforms_values : Variant::transforms_keys) {
    const Variant variant(args.params);
    const int32_t dim = kValues ? args.params.v.dim : args.params.k.dim;
    const int32_t count = min_of(Traits::kKvTile, task.item.kv_end - first);
    for (int32_t r = thread; r < count; r += Traits::kThreads) {
      const RowAt at{&task.request, first + r, first + r, task.item.kv_head, dim};
      detail::rewrite_row<Traits>(tile, r, dim, [&](float* x) {
        if constexpr (kValues) {
          variant.value_transform(x, at);
        } else {
          variant.key_transform(x, at);
        }
      });
    }
  }
}

/// A row of the output on its way, in shared memory. Rows are turned against each other, so that
/// threads that work on one column of different rows meet different banks.
template <class Traits>
struct OutputRow {
  float* row;
  int32_t turn;

  FLASHBSR_DEVICE OutputRow(char* memory, int32_t r)
      : row(reinterpret_cast<float*>(memory) + r * Traits::kHeadDim), turn(r) {
    static_assert(Traits::kRows * Traits::kHeadDim * 4 <= Traits::kKvRowOffset, "tiles hold them");
  }
  FLASHBSR_DEVICE float& operator[](int32_t d) const {
    return row[(d + turn) & (Traits::kHeadDim - 1)];
  }
};

/// Once all rows of an item are in `memory` as OutputRows, normalised and scaled: the variant's
/// function, and the stores. All threads of the block call it.
template <class Traits, class Variant>
FLASHBSR_DEVICE void write_transformed(const KernelArgs& args, const Task& task,
                                       const PrefillRow* rows, char* memory, int32_t thread) {
  const Params& p = args.params;
  const Variant variant(p);
  const Request& request = task.request;
  __syncthreads();
  for (int32_t r = thread; r < task.item.row_count; r += Traits::kThreads) {
    const RowAt at{&request, rows[r].token, request.kv_len - request.q_len + rows[r].token,
                   rows[r].q_head, p.v.dim};
    variant.output_transform(OutputRow<Traits>(memory, r), at);
  }
  __syncthreads();
  const int32_t chunks = p.v.dim / 8;
  for (int32_t unit = thread; unit < task.item.row_count * chunks; unit += Traits::kThreads) {
    const int32_t r = unit / chunks, d = unit % chunks * 8;
    const OutputRow<Traits> row(memory, r);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = row[d + i];
    char* out = p.out.row(static_cast<int64_t>(request.q_begin) + rows[r].token, rows[r].q_head);
    store_values<Traits::kArch>(out, p.out.dtype, d, p.v.dim, x);
  }
}

}  // namespace flashbsr::sm80
