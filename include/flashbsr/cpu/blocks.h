// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The micro-kernels of one type of products, by addresses. No variant changes one, and compiling
// them takes longer than all else of a variant: what is compiled at run time borrows the library's.
#pragma once

#include <flashbsr/cpu/in_place.h>

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// With rows of K and V of type T in place.
template <class Op, DType T>
struct RowBlocks {
  decltype(&dot_block<Op, T, 1>) dot[kBlockRows] = {};  ///< by rows - 1
  GemmBlocks<RowsB<Op, T>> outputs = gemm_blocks<Op, true, RowsB<Op, T>>();

  constexpr RowBlocks() {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((dot[I] = &dot_block<Op, T, I + 1>), ...);
    }(std::make_integer_sequence<int, kBlockRows>{});
  }
};

template <class Op, DType... T>
struct BlocksOfTypes : RowBlocks<Op, T>... {
  GemmBlocks<PackedB<Op>> logits = gemm_blocks<Op, false, PackedB<Op>>();
  GemmBlocks<PackedB<Op>> outputs = gemm_blocks<Op, true, PackedB<Op>>();

  template <DType U>
  FLASHBSR_FN const RowBlocks<Op, U>& in_place() const {
    return *this;
  }
};

/// The types are those of with_row_type().
template <class Op>
using Blocks =
    std::conditional_t<Op::kPerWord == 1,
                       BlocksOfTypes<Op, DType::kF32, DType::kBF16, DType::kF16, DType::kI8>,
                       BlocksOfTypes<Op, DType::kBF16, DType::kI8, DType::kI4, DType::kE2M1>>;

/// Naming it compiles them.
template <class Op>
inline constexpr Blocks<Op> kBlocks{};

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
