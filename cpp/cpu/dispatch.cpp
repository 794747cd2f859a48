// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <cstdlib>

#include <flashbsr/core/error.h>
#include <flashbsr/cpu/tile_permission.h>

#include "cpu_features.h"
#include "levels.h"

namespace flashbsr::cpu {

const std::vector<const KernelTable*>& available_tables() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found{&flashbsr_kernels_baseline()};
    [[maybe_unused]] const CpuFeatures has = features_of(read_cpuid());
#if defined(FLASHBSR_HAVE_AVX2)
    if (has.avx2) found.push_back(&flashbsr_kernels_avx2());
#endif
#if defined(FLASHBSR_HAVE_AVX512)
    if (has.avx512) found.push_back(&flashbsr_kernels_avx512());
#endif
#if defined(FLASHBSR_HAVE_AVX512_BF16)
    if (has.avx512_bf16) found.push_back(&flashbsr_kernels_avx512_bf16());
#endif
#if defined(FLASHBSR_HAVE_AVX512_AMX)
    if (has.avx512_amx && may_use_tiles()) found.push_back(&flashbsr_kernels_avx512_amx());
#endif
    return found;
  }();
  return tables;
}

const char* level_flags(const std::string& isa) {
#if defined(FLASHBSR_HAVE_AVX2)
  if (isa == "avx2") return FLASHBSR_FLAGS_AVX2;
#endif
#if defined(FLASHBSR_HAVE_AVX512)
  if (isa == "avx512") return FLASHBSR_FLAGS_AVX512;
#endif
#if defined(FLASHBSR_HAVE_AVX512_BF16)
  if (isa == "avx512_bf16") return FLASHBSR_FLAGS_AVX512_BF16;
#endif
#if defined(FLASHBSR_HAVE_AVX512_AMX)
  if (isa == "avx512_amx") return FLASHBSR_FLAGS_AVX512_AMX;
#endif
  return "";
}

const KernelTable& chosen_table() {
  const auto& tables = available_tables();
  const char* wanted = std::getenv("FLASHBSR_ISA");
  if (!wanted || !*wanted) return *tables.back();
  std::string names;
  for (const KernelTable* t : tables) {
    if (std::string(wanted) == t->isa) return *t;
    names += (names.empty() ? "" : ", ") + std::string(t->isa);
  }
  throw Error(ErrorCode::kValue, "FLASHBSR_ISA", wanted, "one of " + names);
}

}  // namespace flashbsr::cpu
