// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "jit.h"

#include <array>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>

namespace flashbsr::cuda {

namespace {

/// Everything that tells two kernels apart; comparing numbers first keeps plan() fast.
using Key =
    std::tuple<int, int, DType, DType, DType, int, int, bool, KvCopies, std::string, std::string>;

/// Of the table's name of an element type.
DType dtype_of(std::string_view name) {
  using enum DType;
  constexpr std::array kTypes = {kF16, kBF16, kE4M3, kE5M2, kI8, kI4, kE2M1};
  for (const DType type : kTypes) {
    if (name == kv_name(type)) return type;
  }
  throw Error(ErrorCode::kUnsupported, "kernel", std::string(name), "a type of cpp/instances.txt");
}

std::unique_ptr<JitKernel> make_kernel(const JitQuery& query, const TemplateRow& found, int cc,
                                       const std::shared_ptr<api::KernelProvider>& provider) {
  const TemplateQuery& q = query.shape;
  // A template of the other families copies in one way.
  const bool gathers = query.copies == KvCopies::kRows && q.family[0] == 'h';
  const bool masked = q.custom && query.masked;
  auto kernel = std::make_unique<JitKernel>();
  kernel->provider = provider;
  kernel->kv = query.kv;
  kernel->variant = query.variant;
  const std::string suffix = found.exact ? "a" : "",
                    arch = "sm" + std::to_string(found.arch) + suffix;
  std::string dims = std::to_string(found.head_dim);
  if (found.head_dim_vo != found.head_dim) dims += "x" + std::to_string(found.head_dim_vo);
  api::KernelWish& wish = kernel->wish;
  wish = {.name = std::string(q.family) + "_" + arch + "_d" + dims + "_" + kernel->kv + "_r" +
                  std::to_string(q.rows) + "_" + kernel->variant + (masked ? "_masked" : "") +
                  (gathers ? "_gather" : ""),
          .family = q.family,
          .arch = arch,
          .target = "sm_" + std::to_string(cc) + suffix,
          .head_dim = found.head_dim,
          .head_dim_vo = found.head_dim_vo,
          .q = q.q,
          .kv = q.kv,
          .v = q.v,
          .rows = q.rows,
          .variant = masked     ? "custom_masked"
                     : q.custom ? "custom"
                                : query.variant,
          .copies = gathers ? KvCopies::kRows : KvCopies::kBoxes};
  kernel->row = {.name = wish.name.c_str(),
                 .family = wish.family.c_str(),
                 .arch = found.arch,
                 .exact = found.exact,
                 .head_dim = found.head_dim,
                 .head_dim_vo = found.head_dim_vo,
                 .kv = kernel->kv.c_str(),
                 .rows = q.rows,
                 .variant = kernel->variant.c_str(),
                 .image = nullptr,
                 .image_end = nullptr,
                 .shape = found.shape,
                 .sass = {cc},
                 .ptx = 0,
                 .jit = kernel.get(),
                 .copies = query.copies};
  return kernel;
}

}  // namespace

const KernelRow* try_jit_row(const JitQuery& query, int cc,
                             const std::shared_ptr<api::KernelProvider>& provider) {
  const std::optional<TemplateRow> found = find_template(query.shape, cc);
  if (!found) return nullptr;
  // Never freed: kernels stay loaded until the process ends, when Python, which the providers
  // belong to, may be gone.
  static std::mutex mutex;
  static auto& kernels = *new std::map<Key, std::unique_ptr<JitKernel>>;
  const TemplateQuery& q = query.shape;
  const Key key{
      found->head_dim,          found->head_dim_vo, q.q,      q.kv,         q.v, q.rows, cc,
      q.custom && query.masked, query.copies,       q.family, query.variant};
  const std::lock_guard lock(mutex);
  std::unique_ptr<JitKernel>& kernel = kernels[key];
  if (!kernel) kernel = make_kernel(query, *found, cc, provider);
  return &kernel->row;
}

const KernelRow* rare_row(const KernelRow& row, int cc,
                          const std::shared_ptr<api::KernelProvider>& provider) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::pair<const KernelRow*, int>, JitKernel>;
  const std::lock_guard lock(mutex);
  JitKernel& kernel = kernels[{&row, cc}];
  if (kernel.provider) return &kernel.row;
  kernel.provider = provider;
  const std::string suffix = row.exact ? "a" : "";
  // As cmake/instances.cmake fills in the template.
  const std::string_view types = row.kv;
  const size_t both = types.find('x');
  const DType kv = dtype_of(both == types.npos ? types : types.substr(both + 1));
  kernel.wish = {.name = row.name,
                 .family = row.family,
                 .arch = "sm" + std::to_string(row.arch) + suffix,
                 .target = "sm_" + std::to_string(cc) + suffix,
                 .head_dim = row.head_dim,
                 .head_dim_vo = row.head_dim_vo,
                 .q = both == types.npos ? kv : dtype_of(types.substr(0, both)),
                 .kv = kv,
                 .v = kv,
                 .rows = row.rows,
                 .variant = row.variant,
                 .copies = KvCopies::kEither};
  kernel.row = row;
  kernel.row.jit = &kernel;
  return &kernel.row;
}

}  // namespace flashbsr::cuda
