// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include <flashbsr/cpu/hadamard.h>

#include "ops.h"
#include "ops_common.h"

namespace flashbsr::api {

void hadamard(const Array& x, const Array& out, void* stream) {
  const Place place = common_place({&x, &out});
  const RaggedView in = ragged_view(x), to = ragged_view(out);
  check_shape(out, {in.tokens, in.heads, in.dim});
  check_element(out, {x.element});
  check_no_overlap(out);
  const int order = cpu::Hadamard::order_of(in.dim);
  if (!order || (place.cuda && in.dim > ops::kMaxHadamardDim)) {
    throw Error(ErrorCode::kUnsupported, x.name, "head dim " + std::to_string(in.dim),
                "a power of two, or 12 or 20 times one" +
                    (place.cuda ? ", up to " + std::to_string(ops::kMaxHadamardDim) + " on a GPU"
                                : std::string()));
  }
  if (place.cuda) {
    return cuda::hadamard({.in = in,
                           .out = to,
                           .scale = 1.0f / std::sqrt(static_cast<float>(in.dim)),
                           .order = order},
                          {place.device, stream});
  }
  const cpu::Hadamard transform(in.dim);
  std::vector<float> row(static_cast<size_t>(in.dim));
  for (int64_t t = 0; t < in.tokens; ++t) {
    for (int32_t h = 0; h < in.heads; ++h) {
      for (int32_t d = 0; d < in.dim; ++d) {
        row[static_cast<size_t>(d)] = load_as_float(in.row(t, h), d, in.dtype);
      }
      transform(row.data());
      for (int32_t d = 0; d < in.dim; ++d) {
        store_from_float(to.row(t, h), d, to.dtype, row[static_cast<size_t>(d)]);
      }
    }
  }
}

}  // namespace flashbsr::api
