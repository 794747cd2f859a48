// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Whether codes are written once as 16 bits, in a pass before attention over these, or read as
// they are by every tile. Host code. By lengths that the host knows, so that a batch has one
// answer.
#pragma once

#include <vector>

#include <flashbsr/core/plan.h>
#include <flashbsr/plan/limits.h>

namespace flashbsr {

/// K and V of a token of a KV head, and what the device reads and writes in a second.
struct DequantizePass {
  int64_t tokens = 0;  ///< of all pages that the batch names
  int32_t code_bytes = 0;
  int32_t value_bytes = 0;
  double bytes_per_second = 4.55e12;
  bool keeps_codes = false;  ///< of keys
};

/// A launch and its end, 3 us, and the bytes at 0.85 of the rate, the share that the copies of
/// appends reach. With it 4 x 512 on 8192 was predicted at 0.84 of bf16 on an H100, and took 0.88.
/// Where keys stay codes, whose factors are written beside them, at 0.7: int4 took 88 us of the 67
/// that it would be, int8 91 of 78 (an H100).
inline double dequantize_us(const DequantizePass& pass, int32_t heads) {
  const double bytes = static_cast<double>(pass.tokens) * heads *
                       (static_cast<double>(pass.code_bytes) + pass.value_bytes);
  return 3.0 + bytes / ((pass.keeps_codes ? 0.7e-6 : 0.85e-6) * pass.bytes_per_second);
}

/// What all workers take for the tiles of the requests, were they dealt evenly. Of keys that
/// causality and windows hide a tile has none: 4 x 512 queries with a window of 128 on 8192 tokens
/// would be worth a pass over all of them otherwise.
inline double attention_us(const DeviceLimits& limits, const Shape& task,
                           const std::vector<Request>& requests) {
  const Shape shape = task.with_heads_of_item(limits.heads_of_item);
  const int64_t group = shape.num_qo_heads / shape.num_kv_heads;
  const int64_t tile_tokens = max_of<int64_t>(limits.tile_rows / group, 1);
  double units = 0;
  for (const Request& r : requests) {
    for (int64_t token = 0; token < r.q_len; token += tile_tokens) {
      const int64_t end = min_of<int64_t>(token + tile_tokens, r.q_len);
      int64_t keys = r.kv_len;
      if (shape.causal) keys = max_of<int64_t>(keys - (r.q_len - end), 0);
      if (shape.window_left >= 0) {
        keys = min_of<int64_t>(keys, int64_t{shape.window_left} + end - token);
      }
      const int64_t rows = (end - token) * group;
      units += static_cast<double>(keys) * static_cast<double>(detail::kv_weight(limits, rows)) *
               static_cast<double>(ceil_div<int64_t>(rows, limits.tile_rows));
    }
  }
  return units * shape.num_kv_heads /
         (static_cast<double>(limits.num_workers) * limits.units_per_us);
}

}  // namespace flashbsr
