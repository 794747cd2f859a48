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
};

/// A launch and its end, 3 us, codes at the rate of reads, and values at 0.72 of it: on an H200
/// zeros are written at 3.27 TB/s. 4 x 8192 tokens of 8 heads of 128 took 54 to 56 us with int8
/// (56.7 without the launch), 53 to 56 with int4 and 51 to 58 with NVFP4 (49); 8192 tokens 15.5
/// (14.2).
inline double dequantize_us(const DequantizePass& pass, int32_t heads) {
  const double bytes = pass.code_bytes + pass.value_bytes / 0.72;
  return 3.0 + static_cast<double>(pass.tokens) * heads * bytes / (1e-6 * pass.bytes_per_second);
}

/// What all workers take for the tiles of the requests, were they dealt evenly. Of keys that
/// causality and windows hide a tile has none: 4 x 512 queries with a window of 128 on 8192 tokens
/// would be worth a pass over all of them otherwise.
/// @param narrow_rows  requests of so many packed rows at most are others' work
inline double attention_us(const DeviceLimits& limits, const Shape& task,
                           const std::vector<Request>& requests, int64_t narrow_rows) {
  const Shape shape = task.with_heads_of_item(limits.heads_of_item);
  const int64_t group = shape.num_qo_heads / shape.num_kv_heads;
  const int64_t tile_tokens = max_of<int64_t>(limits.tile_rows / group, 1);
  double units = 0;
  for (const Request& r : requests) {
    if (r.q_len * group <= narrow_rows) continue;
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
