// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Instantiates the kernels of the SIMD level this file is compiled for.
#pragma once

#include <new>

#include <flashbsr/cpu/attention.h>
#include <flashbsr/cpu/kernel_table.h>
#include <flashbsr/variant/standard.h>

#define FLASHBSR_STRINGIFY_(x) #x
#define FLASHBSR_STRINGIFY(x) FLASHBSR_STRINGIFY_(x)

namespace flashbsr::cpu {
inline namespace FLASHBSR_CPU_ISA {

/// Items [first, first + count) of one chunk, side by side: its KV heads lie next to each other in a
/// page, so taking turns they read memory in order. Their results do not depend on the company.
template <class Op, class Variant>
void attend(const Params& params, PlanView plan, int32_t first, int32_t count, char* scratch) {
  using Kernel = ItemKernel<Op, Variant>;
  alignas(Kernel) char storage[kMaxBundle][sizeof(Kernel)];
  Kernel* kernels[kMaxBundle];
  for (int32_t i = 0; i < count; ++i) {
    kernels[i] = new (storage[i]) Kernel(params, plan, first + i, scratch);
    scratch += kernels[i]->scratch_bytes();
    kernels[i]->begin();
  }
  const auto each = [&](auto&& turn) {
    for (int32_t i = 0; i < count; ++i) turn(*kernels[i]);
  };
  for (;;) {
    bool more = false;
    each([&](Kernel& k) { more = k.next_tile(); });  // one chunk: all or none
    if (!more) break;
    const int32_t tokens = kernels[0]->tokens();
    for (int g = 0; g < tokens; g += kPackGroup) each([&](Kernel& k) { k.pack_keys(g); });
    for (int g = 0; g < tokens; g += kPackGroup) each([&](Kernel& k) { k.pack_values(g); });
    each([](Kernel& k) { k.attend(); });
  }
  each([](Kernel& k) { k.finish(); });
}

inline int64_t scratch_bytes(int rows, int dim_qk, int dim_vo) {
  // The float form is the larger one: a word holds one element.
  return Scratch<F32Op>(nullptr, rows, dim_qk, dim_vo).bytes;
}

inline const KernelTable& kernel_table() {
  static constexpr KernelTable kTable = {
      .isa = FLASHBSR_STRINGIFY(FLASHBSR_CPU_ISA),
#if defined(__AVX512BF16__)
      .has_bf16_dot = true,
#else
      .has_bf16_dot = false,
#endif
      .lanes = kLanes,
      .scratch_bytes = &scratch_bytes,
      .attend = {{&attend<F32Op, Standard>, &attend<F32Op, Sigmoid>},
#if defined(__AVX512BF16__)
                 {&attend<Bf16Op, Standard>, &attend<Bf16Op, Sigmoid>}},
#else
                 {nullptr, nullptr}},
#endif
      .merge = {&merge_tile<true>, &merge_tile<false>},
  };
  return kTable;
}

}  // namespace FLASHBSR_CPU_ISA
}  // namespace flashbsr::cpu
