// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of kernels that are not of the build: users' variants, what cpp/instances.txt leaves out,
// and its rare rows. A provider compiles the same templates when such a kernel is first loaded;
// what the host has to know before, the shape, comes from the same Traits (templates.h). For
// sources of cpp/cuda only.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "../api/provider.h"
#include "api.h"
#include "registry.h"
#include "templates.h"

namespace flashbsr::cuda {

/// What happened to a kernel so far. Both are read without a lock on every launch.
struct LoadState {
  std::atomic<CUkernel> kernel{nullptr};
  std::atomic<uint64_t> ready{0};  ///< devices that it is prepared for
};

struct JitKernel {
  api::KernelWish wish;
  std::shared_ptr<api::KernelProvider> provider;
  std::string kv, variant;  ///< what the row's names point to
  KernelRow row{};
  LoadState state;
};

/// What a kernel has to do.
struct JitQuery {
  TemplateQuery shape;
  const char* kv;       ///< as in the table: Q too where the family has one type of Q each
  const char* variant;  ///< "standard"; the provider's name of its own
  bool masked;          ///< by the plan: a variant of the caller's has code for that or not
  KvCopies copies;      ///< Hopper's kernels: one of them
};

/// The row for a device of compute capability `cc`: one for each kernel in a process, whichever
/// attention asks. Nothing is compiled here. Null: no template does that.
const KernelRow* try_jit_row(const JitQuery& query, int cc,
                             const std::shared_ptr<api::KernelProvider>& provider);

/// A row of the table without an image, with one that the provider compiles of the same source.
const KernelRow* rare_row(const KernelRow& row, int cc,
                          const std::shared_ptr<api::KernelProvider>& provider);

}  // namespace flashbsr::cuda
