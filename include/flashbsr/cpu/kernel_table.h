// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What one SIMD level offers the engine. The library builds one table per level and picks at run
// time; a header-only user gets the table of the level the own file is compiled for.
#pragma once

#include <flashbsr/core/params.h>

namespace flashbsr::cpu {

/// The type in which the micro-kernel multiplies.
enum class Compute : int32_t { kF32 = 0, kBf16 = 1 };

/// Rows of this many elements have room on the stack.
inline constexpr int kMaxHeadDim = 576;

/// Most items that are computed side by side.
inline constexpr int32_t kMaxBundle = 8;

/// Items of at most this many packed rows read K and V in place, side by side with their
/// neighbours: packing a tile costs as much as about 20 rows of arithmetic on it.
inline constexpr int32_t kFewRows = 16;

struct KernelTable {
  const char* isa;
  bool has_bf16_dot;
  int lanes;

  /// Bytes of scratch one thread needs for items of `rows` packed rows.
  int64_t (*scratch_bytes)(int rows, const Params&);

  /// Micro-kernels (cpu/blocks.h), which no variant changes. [Compute], as `attend`.
  const void* blocks[2];

  /// Runs work items [first, first + count): KV heads of one chunk, count <= kMaxBundle.
  /// [Compute]; null where the level lacks the instruction.
  void (*attend[2])(const Params&, const void* blocks, PlanView, Activation, int32_t first,
                    int32_t count, char* scratch);

  /// Contracts one split tile.
  void (*merge)(const Params&, PlanView, Activation, int32_t merge);
};

}  // namespace flashbsr::cpu
