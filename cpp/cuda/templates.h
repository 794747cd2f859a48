// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the templates of cpp/kernels could be, beyond the rows of cpp/instances.txt.
#pragma once

#include <optional>

#include "registry.h"

namespace flashbsr::cuda {

struct TemplateQuery {
  const char* family;  ///< "decode", "prefill", "hopper", and of codes with scales "decode_scaled"
                       ///< and the like
  int head_dim = 0;
  int head_dim_vo = 0;
  DType q = DType::kF16;
  DType kv = DType::kF16;  ///< of K
  DType v = DType::kF16;
  int rows = 0;
  bool hooks = false;      ///< more than plain attention
  bool custom = false;     ///< a variant of the caller's
  bool row_hooks = false;  ///< of q, k, v or the output
};

/// A template's parameters and what its Traits say of them.
struct TemplateRow {
  int arch = 0;        ///< instruction set
  bool exact = false;  ///< and no other
  int head_dim = 0;
  int head_dim_vo = 0;
  KernelShape shape;
};

/// The smallest head dims that hold those asked for, in the best instruction set of a device of
/// compute capability `cc`. Empty: no template does that.
std::optional<TemplateRow> find_template(const TemplateQuery& query, int cc);

}  // namespace flashbsr::cuda
