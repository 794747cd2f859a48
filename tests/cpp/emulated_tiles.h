// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Intel's tile instructions in plain C++, so that code for them is tested on any AVX-512 machine:
// eight tiles of 16 rows of 64 bytes. To be included before what uses them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

inline int8_t tiles[8][16][64];

inline void load(int tile, const void* base, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(tiles[tile][row], static_cast<const char*>(base) + row * stride, 64);
  }
}

inline void store(int tile, void* base, int64_t stride) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tiles[tile][row], 64);
  }
}

/// Four products of signed bytes to each sum, as Intel's manual has TDPBSSD.
inline void dot(int c, int a, int b) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      int32_t sum;
      std::memcpy(&sum, &tiles[c][row][column * 4], 4);
      for (int k = 0; k < 64; ++k) {
        sum += tiles[a][row][k] * tiles[b][k / 4][column * 4 + k % 4];
      }
      std::memcpy(&tiles[c][row][column * 4], &sum, 4);
    }
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) static_cast<void>(std::memset(emulated::tiles[tile], 0, 1024))
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store(tile, base, stride)
#define _tile_dpbssd(c, a, b) emulated::dot(c, a, b)
