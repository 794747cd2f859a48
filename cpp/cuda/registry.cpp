// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "registry.h"

#include <string_view>

#include <flashbsr/core/error.h>

namespace flashbsr::cuda {

namespace {

bool same(const char* a, const char* b) { return std::string_view(a) == b; }

/// Numbers first: an op that is launched asks all 219 rows, 0.4 us in place of 1.7.
bool matches(const KernelRow& row, const KernelQuery& q) {
  return row.rows == q.rows && (row.head_dim == 0) == (q.head_dim == 0) &&
         row.head_dim >= q.head_dim && row.head_dim_vo >= q.head_dim_vo &&
         same(row.family, q.family) && same(row.kv, q.kv) && same(row.variant, q.variant);
}

/// How far a row is from what was asked; the family weighs most, then what changes results.
int distance(const KernelRow& row, const KernelQuery& q, int cc) {
  return 32 * !same(row.family, q.family) + 16 * !same(row.kv, q.kv) +
         8 * !same(row.variant, q.variant) +
         4 * (row.head_dim < q.head_dim || row.head_dim_vo < q.head_dim_vo) +
         2 * (row.rows != q.rows) + !row.runs_on(cc);
}

std::string describe(const KernelQuery& q, int cc) {
  std::string text = q.family;
  if (q.head_dim) text += ", head_dim " + std::to_string(q.head_dim);
  if (q.head_dim_vo != q.head_dim) text += " and " + std::to_string(q.head_dim_vo) + " of v";
  if (!same(q.kv, "-")) text += ", KV " + std::string(q.kv);
  if (q.rows) text += ", " + std::to_string(q.rows) + " rows";
  if (!same(q.variant, "-")) text += ", variant " + std::string(q.variant);
  return text + " on sm_" + std::to_string(cc);
}

}  // namespace

bool KernelRow::runs_on(int cc) const {
  if (exact) return cc == arch;
  for (const int target : sass) {
    if (target && target / 10 == cc / 10 && target <= cc) return true;
  }
  return ptx && ptx <= cc;
}

std::string KernelRow::targets() const {
  std::string text;
  for (const int target : sass) {
    if (!target) continue;
    text += (text.empty() ? "sm_" : " sm_") + std::to_string(target) + (exact ? "a" : "");
  }
  if (ptx) text += " compute_" + std::to_string(ptx);
  return text;
}

const KernelRow* try_find(const KernelQuery& query, int cc) {
  const KernelRow* best = nullptr;
  for (const KernelRow& row : kernel_rows()) {
    if (!matches(row, query) || !row.runs_on(cc)) continue;
    if (!best || row.head_dim < best->head_dim ||
        (row.head_dim == best->head_dim && row.arch > best->arch)) {
      best = &row;
    }
  }
  return best;
}

const KernelRow& find(const KernelQuery& query, int cc) {
  if (const KernelRow* row = try_find(query, cc)) return *row;
  const KernelRow* nearest = nullptr;
  for (const KernelRow& row : kernel_rows()) {
    if (!nearest || distance(row, query, cc) < distance(*nearest, query, cc)) nearest = &row;
  }
  const std::string near =
      nearest ? ", such as " + std::string(nearest->name) + " (" + nearest->targets() + ")" : "";
  throw Error(ErrorCode::kUnsupported, "kernel", describe(query, cc),
              "a kernel of this build" + near +
                  "; 'flashbsr info' lists them. backend=\"cpu\" runs every layout and variant, "
                  "and a row in cpp/instances.txt adds a kernel");
}

const char* kv_name(DType type) {
  switch (type) {
    case DType::kF16: return "f16";
    case DType::kBF16: return "bf16";
    case DType::kE4M3: return "e4m3";
    case DType::kE5M2: return "e5m2";
    case DType::kI8: return "i8";
    case DType::kI4: return "i4";
    case DType::kE2M1: return "e2m1";
    default: return "-";
  }
}

}  // namespace flashbsr::cuda
