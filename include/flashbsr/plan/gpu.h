// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler is told about a kernel on a GPU. Host code; the kernel's traits and the
// device's attributes come in as numbers.
#pragma once

#include <cmath>

#include <flashbsr/plan/limits.h>

namespace flashbsr {

struct GpuKernel {
  int32_t sms = 132;
  int32_t blocks_per_sm = 1;
  int32_t rows = 8;           ///< packed rows of an item
  int32_t kv_tile = 16;       ///< KV tokens of a stage
  int32_t heads_of_item = 1;  ///< KV heads that an item reads
  int32_t box_tokens = 0;     ///< of copies by TMA, which pages cut; 0: whole tiles
  /// K and V of one token of an item's KV heads: (head_dim_qk + head_dim_vo) x size of the type.
  int32_t bytes_per_token = 512;
  int32_t product_bytes = 0;  ///< of what is multiplied, where codes are widened first; 0: the same
  int32_t state_row_bytes = 512;  ///< of a partial state: 4 x head_dim_vo
  double product_time = 1.0;  ///< in that of products of what lies in memory as it is multiplied
  /// What a token takes at least: of decode, however fast the memory is; of prefill on sm_90a,
  /// however few rows there are.
  double token_us = 0;
  double bytes_per_second = 4.55e12;  ///< of the device's memory. Default: what an H200 reads
  ClusterBlocks cluster_blocks{};
};

/// Costs are counted in 2^-12 us: the least KV token there is (16 bytes) is two of them on an H200,
/// and a queue of half a second still fits 31 bits.
inline constexpr int32_t kGpuUnitsPerUs = 4096;

namespace detail {

inline int32_t gpu_units(double us) {
  return max_of(1, static_cast<int32_t>(us * kGpuUnitsPerUs + 0.5));
}

/// Time to stream bytes at a worker's share of the memory: 34.5 GB/s per SM of an H200, so a token
/// of 512 bytes takes 15 ns. Rows do not matter: decode is bound by memory.
inline double gpu_stream_us(const GpuKernel& k, double bytes) {
  return bytes * k.sms * k.blocks_per_sm / k.bytes_per_second * 1e6;
}

/// What products take of a token, in those of 512 bytes.
inline double gpu_products(const GpuKernel& k) {
  return k.product_time * (k.product_bytes > 0 ? k.product_bytes : k.bytes_per_token) / 512;
}

}  // namespace detail

/// Decode: few rows, one block per SM that follows its queue. By 215 plans of random batches on an
/// H200 (tools/plan_model.py) an item costs 0.55 us by itself (its record, Q, the fill of the ring,
/// the epilogue), and merges 1 us and 17 ns for each row of each part. Chunks of 64 tokens still
/// pay when a batch is so small that SMs idle (1 x 1024 tokens: 5.1 us in 16 parts; 4 x 1024: 8.5
/// us split, 9.8 whole).
inline DeviceLimits gpu_decode_limits(const GpuKernel& k) {
  DeviceLimits limits;
  limits.num_workers = k.sms * k.blocks_per_sm;
  limits.tile_rows = k.rows;
  limits.heads_of_item = k.heads_of_item;
  limits.kv_tile = k.kv_tile;
  limits.min_chunk = max_of(64, k.kv_tile);
  limits.cost_per_item = detail::gpu_units(0.55);
  const double token_us = max_of(detail::gpu_stream_us(k, k.bytes_per_token), k.token_us);
  limits.cost_per_kv = detail::gpu_units(token_us);
  limits.cost_per_kv_row = 0;
  limits.price_splits = true;
  // An SM of an H200 can stream 62 GB/s and each of a pair 38, while all have 34.5. An H100's have
  // 24; that they can 48 and 32 fits what decode took there. (52 fitted few SMs as well, but half
  // of them have 43 each: 64 parts of 131072 tokens took 196 us, by that price as long as 128,
  // 174.)
  const double share = std::sqrt(k.bytes_per_second / k.sms / (4.55e12 / 132));
  // What instructions take is no less where others are idle.
  const double least = 1024 * k.token_us / token_us;
  const auto pace = [least](double x) {
    return static_cast<int32_t>(min_of(max_of(x, least), 1024.0));
  };
  limits.pace_alone = pace(570 * std::sqrt(share));
  limits.pace_of_half = pace(900 * share);
  limits.cost_per_shared = detail::gpu_units(2.4);
  // 64 requests of 8064 tokens whose first 8000 are the same (4 KV heads): 146 us, 9.3 ns a token.
  const double again = 9.3e-3 * detail::gpu_products(k);
  limits.pace_again =
      static_cast<int32_t>(1024 * min_of(again / detail::gpu_stream_us(k, k.bytes_per_token), 1.0));
  // 124 requests of 1 to 673 tokens, one KV head: 13.6 us with parts before other items, 10.3
  // whole.
  limits.cost_per_early_part = detail::gpu_units(4.0);
  limits.cost_of_merging = detail::gpu_units(1.0);
  limits.cost_per_merged_row = detail::gpu_units(0.0175);
  limits.cost_of_launch = detail::gpu_units(2.8);
  limits.units_per_us = kGpuUnitsPerUs;
  return limits;
}

/// Prefill: tiles of rows, claimed longest first. A KV token costs a tile's worth of products
/// however many of its rows are real: 22 ns at 64 rows and 512 bytes (head dim 128, 16 bits) for
/// one of two blocks on an SM at 385 TFLOP/s (H200, this kernel family). Few rows or a slow memory
/// make the bytes the limit. An item costs about 1.5 us by itself. Algorithm 1 cuts, at 512 tokens
/// or more: a part of 64 rows writes 32 KB of partial states and somebody reads them again, 128
/// tokens' worth of K and V.
inline DeviceLimits gpu_prefill_limits(const GpuKernel& k) {
  const double product_us = 22e-3 * k.rows / 64 * detail::gpu_products(k) * k.blocks_per_sm / 2;
  DeviceLimits limits;
  limits.num_workers = k.sms * k.blocks_per_sm;
  limits.tile_rows = k.rows;
  limits.kv_tile = k.kv_tile;
  limits.min_chunk = max_of(512, k.kv_tile);
  limits.cost_per_item = detail::gpu_units(1.5);
  limits.cost_per_kv =
      detail::gpu_units(max_of(product_us, detail::gpu_stream_us(k, k.bytes_per_token)));
  limits.cost_per_kv_row = 0;
  limits.by_head = true;
  limits.units_per_us = kGpuUnitsPerUs;
  return limits;
}

/// Prefill on sm_90a: one block per SM, tiles claimed request by request. By 954 plans of random
/// batches on an H200 (tools/plan_model.py; head dim 128, 16 bits, pages of 16): a KV token takes
/// 15.6 ns with 192 packed rows, 12.1 with 128, 8.7 with 64 or fewer, and in tiles of 128 rows 10.9
/// and 7.3; an item 3.9 us, or 3.6. What merges come to goes by rows: partial states of 192 are 98
/// KB, which whoever is last reads by itself.
inline DeviceLimits gpu_hopper_limits(const GpuKernel& k) {
  const bool small = k.rows <= 128 && k.kv_tile >= 112 && k.bytes_per_token <= 512;
  // A step of 128 x 128 has 32 boxes of 16 tokens, which it waits for; ragged it has none. Where V
  // is widened it does not wait for them.
  const bool waits = small && k.product_bytes == 0;
  const double boxes = waits && k.box_tokens * 2 >= k.kv_tile ? 0.92 : 1.0;
  const double of_512 = boxes * detail::gpu_products(k);
  const auto pick = [small](double at_128, double at_192) {
    return detail::gpu_units(small ? at_128 : at_192);
  };
  const double few = (5.2e-3 + 3.46e-3) * of_512, many = (5.2e-3 + 3 * 3.46e-3) * of_512;
  const double row_us = 0.5 * (max_of(many, k.token_us) - max_of(few, k.token_us));
  DeviceLimits limits = gpu_prefill_limits(k);
  limits.min_chunk = max_of(1024, k.kv_tile);
  limits.cost_per_item = pick(3.6, 3.9);
  limits.cost_per_kv = pick(3.75e-3 * of_512, max_of(few, k.token_us) - row_us);
  limits.cost_per_kv_row = pick(3.58e-3 * of_512, row_us);
  limits.cost_row_shift = 6;
  // Tiles of a request read the same K and V from L2: not a worker's share of the memory is the
  // limit, but what the device reads of all, at 0.95 of what the decode kernels do.
  limits.cost_of_reading =
      detail::gpu_units(1024 * k.bytes_per_token / (0.95e-6 * k.bytes_per_second));
  // Half of what an H200's memory takes, on an H100 with two thirds of its rate, too.
  limits.cost_of_rereading =
      detail::gpu_units(0.5 * 1024 * k.bytes_per_token / (0.95e-6 * 4.55e12));
  limits.by_request = true;
  limits.short_tile_first = true;
  limits.price_splits = true;
  limits.memory_bound = false;
  // Partial states of 192 rows are 98 KB, which take 2.8 us at a worker's share of an H200's memory
  // and 4.1 of an H100's; there a part takes 6.5 more than its work. In tiles of 128 rows the last
  // part of every queue takes no more.
  limits.cost_of_states =
      detail::gpu_units((small ? 1.8e6 : 1.6e6) * 1024 * k.state_row_bytes / k.bytes_per_second);
  limits.hidden_states = small ? k.rows * limits.num_workers : 0;
  limits.cost_per_shared = detail::gpu_units(5.0);
  limits.cost_per_merged_row = pick(8.0e-3, 6.0e-3);
  limits.cost_of_merging = pick(1.45, 0.0);
  limits.cost_of_launch = pick(1.45, 0.65);
  return limits;
}

/// Latent attention on sm_90a: one block per SM, tiles of 64 rows whatever the number of heads. A
/// token takes 26 ns of products, an item 6 us (its Q are 73 KB), a part of a split
/// tile 2 us: its state is 131 KB, written and read at 4.5 TB/s. All blocks merge, which takes 4
/// us; within a cluster 3 (H200).
inline DeviceLimits gpu_latent_limits(const GpuKernel& k) {
  DeviceLimits limits = gpu_hopper_limits(k);
  constexpr double product_us = 26e-3;  // of 576 and 512 dims, whatever they are in memory
  limits.min_chunk = 2 * k.kv_tile;
  limits.cost_per_item = detail::gpu_units(6.0);
  limits.cost_per_kv =
      detail::gpu_units(max_of(product_us, detail::gpu_stream_us(k, k.bytes_per_token)));
  limits.cost_per_kv_row = limits.cost_row_shift = 0;
  limits.cost_of_reading = limits.cost_of_rereading = limits.cost_of_states = 0;
  limits.cost_of_launch = limits.cost_per_merged_row = 0;
  limits.cost_per_split = limits.cost_per_shared = detail::gpu_units(2.0);
  limits.cost_of_merging = detail::gpu_units(4.0);
  limits.cost_per_merged_part = detail::gpu_units(0.2);
  limits.cost_per_state = detail::gpu_units(0.06);
  // 1 x 8192 tokens, 128 heads, in 64 parts a tile: 11 us. 3 x 1000 in 8: 4. 4 x 2048 of 16 heads
  // in 16: 2.6.
  limits.cost_of_own_merging = detail::gpu_units(2.0);
  limits.cost_per_own_part = detail::gpu_units(0.05);
  limits.cost_per_own_row = detail::gpu_units(0.05 / 64);
  limits.idle_merge = limits.sliced_merges = true;
  limits.cost_in_cluster = detail::gpu_units(3.0);
  limits.fewer_rows = 16;
  limits.cluster_blocks = k.cluster_blocks;
  return limits;
}

/// Latent attention of few rows on sm_90a: one block per SM, and what the memory gives it, or L2,
/// which 132 SMs ask for the same rows: 21 ns for 1000 bytes. States of 16 rows are a quarter of
/// the above, and what comes before and behind the products takes 6.5 us. Merges of 16 parts in a
/// cluster take 1.5 us more than those of 8 (H200).
inline DeviceLimits gpu_few_latent_limits(const GpuKernel& k) {
  DeviceLimits limits = gpu_latent_limits(k);
  const double product_us = 21e-6 * k.bytes_per_token;
  limits.cost_per_kv =
      detail::gpu_units(max_of(product_us, detail::gpu_stream_us(k, k.bytes_per_token)));
  limits.cost_per_item = detail::gpu_units(6.5);
  limits.cost_per_split = limits.cost_per_shared = detail::gpu_units(0.5);
  limits.cost_of_own_merging = detail::gpu_units(3.0);
  limits.cost_in_cluster = detail::gpu_units(0.5);
  limits.fewer_rows = 0;
  return limits;
}

/// Latent attention on mma.sync, sm_80 and later: a token takes a block of 64 rows 71 ns and one of
/// 32 rows 57 (H200); one of 16 rows, of which two share an SM, what the memory gives. All blocks
/// merge, as above. Items and states of fewer rows are smaller: 1 x 8192 tokens and 128 heads take
/// 28.3 us in tiles of 32 rows, 41.4 in tiles of 64; 16 x 1024 take 40.4 and 36.4.
inline DeviceLimits gpu_latent_mma_limits(const GpuKernel& k) {
  DeviceLimits limits = gpu_latent_limits(k);
  const double product_us = (k.rows > 32 ? 71e-3 : 57e-3) * k.bytes_per_token / 1152;
  limits.cost_per_kv =
      detail::gpu_units(max_of(product_us, detail::gpu_stream_us(k, k.bytes_per_token)));
  limits.cost_per_item = detail::gpu_units(6.0 * k.rows / 64);
  limits.cost_per_split = limits.cost_per_shared = detail::gpu_units(2.0 * k.rows / 64);
  limits.cost_of_own_merging = 0;
  limits.fewer_rows = k.rows > 32 ? 32 : 0;
  limits.cluster_blocks = {};
  return limits;
}

/// Mixed batches on sm_90a: some blocks have wide tiles from the beginning, in others each consumer
/// warpgroup has narrow ones first. The products of the wide ones are the limit there: their K and
/// V come from L2, mostly. A block of narrow workers streams 80 GB/s beside wide ones (H200; 97 is
/// what an SM can) and as large a share of an H100's memory, and more blocks than it takes to read
/// all that the memory gives are of no use.
inline Workers gpu_mixed_limits(const GpuKernel& k, int32_t narrow_rows) {
  constexpr double kBlockShare = 80e9 / 4.55e12;
  Workers workers(gpu_hopper_limits(k));
  // Fitted beside decodes: a row costs a quarter more in tiles of 128.
  const int32_t warpgroups = ceil_div(k.rows, 64);  // whole tokens may be a few rows less
  const double of_192 = warpgroups < 3 ? 1.25 * warpgroups / 3 : 1.0;
  workers.wide.cost_per_kv = detail::gpu_units(16.5e-3 * of_192 * k.bytes_per_token / 512);
  workers.wide.cost_per_kv_row = workers.wide.cost_row_shift = 0;
  workers.wide.cost_per_item = detail::gpu_units(2.5);
  workers.wide.cost_per_split = workers.wide.cost_per_shared = detail::gpu_units(6.0);
  workers.wide.cost_of_launch = detail::gpu_units(3.0);
  workers.wide.cost_of_reading = workers.wide.cost_of_rereading = 0;  // of both kinds, below
  workers.wide.idle_merge = true;
  workers.wide.cost_of_states = 0;
  workers.wide.cost_of_merging = workers.wide.cost_per_merged_row = 0;  // who is idle merges
  // By 130 plans of random batches: 9 us before the first item and behind the last, 3 of them for
  // code beyond 64 KB, and K and V at 0.9 of what decode reads.
  workers.cost_of_both = detail::gpu_units(6.0);
  workers.cost_of_reading =
      detail::gpu_units(1024 * k.bytes_per_token / (0.9e-6 * k.bytes_per_second));
  const int32_t blocks = max_of(min_of(static_cast<int32_t>(1 / kBlockShare), k.sms - 1), 1);
  workers.narrow_per_block = warpgroups;
  GpuKernel narrow = k;
  narrow.sms = blocks * workers.narrow_per_block;
  narrow.bytes_per_second = blocks * kBlockShare * k.bytes_per_second;
  narrow.rows = narrow_rows;
  narrow.kv_tile = 16;
  workers.narrow = gpu_decode_limits(narrow);
  // A worker's rate is its own, whoever else is done.
  workers.narrow.memory_bound = false;
  workers.narrow.cost_per_item = detail::gpu_units(0.5);
  workers.narrow.cost_per_split = detail::gpu_units(2.4);
  workers.narrow.cost_per_merged_part = detail::gpu_units(0.12);
  workers.narrow.cost_of_merging = workers.narrow.cost_per_merged_row = 0;
  workers.narrow.cost_of_launch = detail::gpu_units(1.4);
  workers.wide.tail_rounds = workers.narrow.tail_rounds = 16;
  workers.narrow_rows = narrow_rows;
  return workers;
}

}  // namespace flashbsr
