// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// A bit per (query token, KV position), row-major per request, little-endian within a byte; each
// request starts at a byte. A set bit keeps the logit. Rows have the bits of the positions from the
// request's mask_begin on: those before it are kept (0: there are none).
#pragma once

#include <flashbsr/variant/variant.h>

namespace flashbsr {

struct CustomMask {
  const uint8_t* bits = nullptr;  ///< null: off

  FLASHBSR_FN bool active() const { return bits != nullptr; }

  template <class M>
  FLASHBSR_FN typename M::Bool keep(const LogitsAt<M>& at) const {
    const Request& request = *at.request;
    const int32_t kept = request.mask_begin - at.kv_first;  // lanes before the row's first bit
    if (kept >= at.lanes) return M::all();
    return M::test_bits(bits + request.mask_offset(), bit(request, at.q_token, at.kv_first),
                        at.lanes, kept);
  }

  /// Number, within the request's bits, of a row's bit of KV position `position`, which is from
  /// mask_begin on.
  FLASHBSR_FN int64_t bit(const Request& request, int32_t q_token, int32_t position) const {
    return static_cast<int64_t>(q_token) * (request.kv_len - request.mask_begin) +
           (position - request.mask_begin);
  }

  /// Whether all bits of KV positions [begin, end) are set.
  FLASHBSR_FN bool keeps_all(const Request& request, int32_t q_token, int32_t begin,
                             int32_t end) const {
    const uint8_t* at = bits + request.mask_offset();
    begin = max_of(begin, request.mask_begin);
    if (begin >= end) return true;
    int64_t first = bit(request, q_token, begin);
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
