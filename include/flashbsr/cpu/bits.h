// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Boolean arrays to bits.
#pragma once

#include <cstdint>

namespace flashbsr::cpu {

/// Packs n booleans (non-zero is true) into ceil(n / 8) bytes; missing bits of the last byte are 0.
/// Little: element 8 i + j is bit j of byte i. Otherwise it is bit 7 - j, as numpy.packbits has it.
inline void pack_bits(const uint8_t* in, int64_t n, uint8_t* out, bool little) {
  for (int64_t i = 0; i < n; i += 8) {
    const int64_t live = n - i < 8 ? n - i : 8;
    unsigned byte = 0;
    for (int64_t j = 0; j < live; ++j) {
      byte |= static_cast<unsigned>(in[i + j] != 0) << (little ? j : 7 - j);
    }
    out[i / 8] = static_cast<uint8_t>(byte);
  }
}

}  // namespace flashbsr::cpu
