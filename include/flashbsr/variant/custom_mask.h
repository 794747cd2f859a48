// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A bit per (query token, KV position), row-major per request, little-endian within a byte; each
// request starts at a byte. A set bit keeps the logit.
#pragma once

#include <flashbsr/variant/variant.h>

namespace flashbsr {

struct CustomMask {
  const uint8_t* bits = nullptr;  ///< null: off

  FLASHBSR_FN bool active() const { return bits != nullptr; }

  template <class M>
  FLASHBSR_FN typename M::Bool keep(const LogitsAt<M>& at) const {
    const int64_t first = static_cast<int64_t>(at.q_token) * at.request->kv_len + at.kv_first;
    return M::test_bits(bits + at.request->mask_offset(), first, at.lanes);
  }
};

}  // namespace flashbsr
