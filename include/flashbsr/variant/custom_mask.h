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

  /// Whether all bits of KV positions [begin, end) are set.
  FLASHBSR_FN bool keeps_all(const Request& request, int32_t q_token, int32_t begin,
                             int32_t end) const {
    const uint8_t* at = bits + request.mask_offset();
    int64_t first = static_cast<int64_t>(q_token) * request.kv_len + begin;
    const int64_t last = first + end - begin;
    // Bits of the first byte before the range, and of the last behind it, count as set.
    uint32_t outside = (1u << (first & 7)) - 1;
    for (first &= ~int64_t{7}; first < last; first += 8) {
      if (last - first < 8) outside |= 0xffu << (last - first);
      if (((at[first >> 3] | outside) & 0xff) != 0xff) return false;
      outside = 0;
    }
    return true;
  }
};

}  // namespace flashbsr
