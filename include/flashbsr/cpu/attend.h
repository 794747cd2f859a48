// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs work items: the two ways through them, for few rows and for many, and the table of a
// variant.
#pragma once

#include <new>

#include <flashbsr/cpu/attention.h>
#include <flashbsr/cpu/kernel_table.h>

#define FLASHBSR_STRINGIFY_(x) #x
#define FLASHBSR_STRINGIFY(x) FLASHBSR_STRINGIFY_(x)

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Brings one tile's rows of `x` for all the items into L2.
template <class Kernel>
void touch_tile(Kernel* const* kernels, int32_t count, const PagedView& x,
                const char* const* (*rows)(const KvTile&)) {
  const int64_t bytes = row_bytes(x.dtype, x.dim);
  // Where the heads lie side by side in a token's row, one pass covers them all.
  const bool joint = x.stride_head * dtype_size(x.dtype) == bytes;
  for (int32_t i = 0; i < (joint ? 1 : count); ++i) {
    const KvTile& tile = kernels[i]->tile();
    touch_rows(rows(tile), tile.count, joint ? bytes * count : bytes);
  }
}

/// Items of few rows, one chunk's KV heads, tile by tile in lockstep: the heads lie next to each
/// other in a page, so together they read memory in order. Their results do not depend on the
/// company.
template <class Op, class Variant>
void attend_few(const Params& params, const Blocks<Op>& blocks, PlanView plan,
                Activation activation, int32_t first, int32_t count, char* scratch) {
  using Kernel = ItemKernel<Op, Variant>;
  alignas(Kernel) char storage[kMaxBundle][sizeof(Kernel)];
  Kernel* kernels[kMaxBundle];
  for (int32_t i = 0; i < count; ++i) {
    kernels[i] = new (storage[i]) Kernel(params, blocks, plan, activation, first + i, scratch);
    scratch += kernels[i]->scratch_bytes();
    kernels[i]->begin();
  }
  const bool tiles = kernels[0]->integer_keys() || kernels[0]->integer_values();
  if (tiles) begin_tiles();
  for (;;) {
    bool more = false;  // one chunk: all or none
    for (int32_t i = 0; i < count; ++i) more = kernels[i]->next_tile();
    if (!more) break;
    touch_tile(kernels, count, params.k, +[](const KvTile& t) { return &t.k[0]; });
    for (int32_t i = 0; i < count; ++i) kernels[i]->score();
    touch_tile(kernels, count, params.v, +[](const KvTile& t) { return &t.v[0]; });
    for (int32_t i = 0; i < count; ++i) kernels[i]->accumulate();
  }
  if (tiles) end_tiles();
  for (int32_t i = 0; i < count; ++i) kernels[i]->finish();
}

/// Items [first, first + count), KV heads of one chunk. `lent`: Blocks<Op>.
template <class Op, class Variant>
void attend(const Params& params, const void* lent, PlanView plan, Activation activation,
            int32_t first, int32_t count, char* scratch) {
  const Blocks<Op>& blocks = *static_cast<const Blocks<Op>*>(lent);
  if (plan.items()[first].row_count <= kFewRows) {
    attend_few<Op, Variant>(params, blocks, plan, activation, first, count, scratch);
    return;
  }
  for (int32_t i = first; i < first + count; ++i) {
    ItemKernel<Op, Variant> kernel(params, blocks, plan, activation, i, scratch);
    kernel.begin();
    while (kernel.next_tile()) kernel.attend();
    kernel.finish();
  }
}

inline int64_t scratch_bytes(int rows, const Params& p) {
  const int dim_qk = joined_keys<F32Op>(p).dim, dim_vo = p.v.dim;
  int64_t bytes = Scratch<F32Op>(nullptr, rows, dim_qk, dim_vo).bytes;
#if defined(__AVX512BF16__)
  // Mostly half of it, but rows are padded to 32 elements instead of 16.
  bytes = max_of(bytes, Scratch<Bf16Op>(nullptr, rows, dim_qk, dim_vo).bytes);
#endif
  return bytes + joined_bytes(p) + Folding(nullptr, p).bytes +
         IntegerMemory(nullptr, kHasIntegers && rows <= kFewRows ? rows : 0, dim_qk).bytes;
}

/// The table of one variant in one type of products. What is compiled at run time has none of its
/// own micro-kernels: who loads it lends some.
template <class Op, class Variant, bool kOwnBlocks = true>
const KernelTable& variant_table() {
  static constexpr KernelTable kTable = [] {
    KernelTable table{.isa = FLASHBSR_STRINGIFY(FLASHBSR_CPU_ISA),
                      .has_bf16_dot = Op::kPerWord == 2,
                      .lanes = kLanes,
                      .scratch_bytes = &scratch_bytes,
                      .blocks = {},
                      .attend = {},
                      .merge = &merge_tile<Variant>};
    table.attend[Op::kPerWord - 1] = &attend<Op, Variant>;
    if constexpr (kOwnBlocks) table.blocks[Op::kPerWord - 1] = &kBlocks<Op>;
    return table;
  }();
  return kTable;
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
