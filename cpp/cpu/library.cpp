// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "library.h"

#include <dlfcn.h>

#include <flashbsr/core/error.h>

#include "dispatch.h"

namespace flashbsr::cpu {

const char* level_for(Compute compute) {
  const char* level = nullptr;
  for (const KernelTable* table : available_tables()) {
    if (table->has_bf16_dot == (compute == Compute::kBf16)) level = table->isa;
    if (table == &chosen_table()) break;
  }
  return level;
}

const KernelTable& load_table(const std::string& path) {
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
  return *reinterpret_cast<Entry>(symbol)();
}

}  // namespace flashbsr::cpu
