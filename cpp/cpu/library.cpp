// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "library.h"

#include <dlfcn.h>

#include <algorithm>

#include <flashbsr/core/error.h>

#include "dispatch.h"

namespace flashbsr::cpu {

const KernelTable& level_for(Compute compute) {
  const KernelTable* level = nullptr;
  for (const KernelTable* table : available_tables()) {
    if (table->has_bf16_dot == (compute == Compute::kBf16)) level = table;
    if (table == &chosen_table()) break;
  }
  return *level;
}

KernelTable load_table(const std::string& path, const KernelTable& level) {
  using Entry = const KernelTable* (*)();
  // RTLD_LOCAL: every library has the same names.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library ? dlsym(library, "flashbsr_cpu_kernels") : nullptr;
  if (!symbol) {
    const char* why = dlerror();
    throw Error(ErrorCode::kUnsupported, "variant", "a compiled library that does not load",
                std::string("a compiler for this machine (CXX), and a cache folder that is not "
                            "mounted noexec (FLASHBSR_CACHE_DIR); the loader says: ") +
                    (why ? why : "no flashbsr_cpu_kernels()"));
  }
  KernelTable table = *reinterpret_cast<Entry>(symbol)();
  std::copy_n(level.blocks, 2, table.blocks);
  return table;
}

}  // namespace flashbsr::cpu
