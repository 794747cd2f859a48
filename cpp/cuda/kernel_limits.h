// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What the scheduler is told about a kernel on a device. For sources of cpp/cuda only.
#pragma once

#include <algorithm>
#include <string_view>

#include <flashbsr/core/latent_row.h>
#include <flashbsr/plan/gpu.h>

#include "api.h"
#include "choice.h"
#include "hopper_args.h"
#include "launcher.h"

namespace flashbsr::cuda {

/// Bytes per second of a device's memory by its clock and width, two transfers a clock; 0: unknown.
inline double memory_bandwidth(int device) {
  CUdevice handle = 0;
  int khz = 0, bits = 0;
  const bool known = api().device_get(&handle, device) == CUDA_SUCCESS &&
                     api().device_get_attribute(&khz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
                                                handle) == CUDA_SUCCESS &&
                     api().device_get_attribute(&bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
                                                handle) == CUDA_SUCCESS;
  return known ? 2e3 * khz * (bits / 8) : 0;
}

/// Bytes of K and V of a token: as they lie, and of a byte for each number, as products of 16 bits
/// would have them.
struct TokenBytes {
  int32_t stored = 0;
  int32_t multiplied = 0;  ///< 0: the same
  DType codes = DType::kF16;
  bool scaled = false;
};

/// @param scaled  K and V are codes with scales of every token
inline TokenBytes token_bytes(const api::AttentionOptions& o, bool scaled, DType k, DType v) {
  if (o.latent && scaled) return {.stored = PackedLatent::kBytes, .codes = k};
  const int value_dims = o.latent ? 0 : o.head_dim_vo;
  const bool widened = !o.latent && dtype_size(k) == 1;
  return {.stored = static_cast<int32_t>(row_bytes(k, o.head_dim_qk) + row_bytes(v, value_dims)),
          .multiplied = widened ? 2 * (o.head_dim_qk + value_dims) : 0,
          .codes = v == DType::kI4 ? v : k,  // int4 takes longest to widen
          .scaled = scaled};
}

/// Of products, in that of 16 bits (docs/kernels/prefill_scaled.md, sm90a_fp8.md; H100 and H200).
inline double product_time(const KernelRow& row, const TokenBytes& bytes) {
  const std::string_view family(row.family), types(row.kv);
  if (is_hopper(row)) {
    // Of head dim 64 half as many, which take as long as 0.65 of those of 128.
    const double narrow = row.head_dim != 64 ? 1.0 : bytes.multiplied == 0 ? 1.29 : 1.38;
    // Codes that a pass has widened: of halves there are two products of Q and K, one behind the
    // other.
    const double one = row.rows == 128 ? 1.12 : 1.06;
    const double passed = family == "hopper_halves" ? 1.2 : family == "hopper_scaled" ? one : 1.0;
    if (bytes.multiplied == 0) return narrow * passed;
    if (bytes.scaled) {
      const bool keys_too = types != "bf16xe4m3";
      return narrow / (row.rows == 128 ? (keys_too ? 0.65 : 0.683) : keys_too ? 0.7 : 0.725);
    }
    if (family == "hopper_fast") return 0.86;
    if (types == "e4m3") return row.head_dim == 128 ? 0.9 : narrow;
    return narrow / (row.rows == 128 ? 0.82 : 0.85);  // 16-bit Q
  }
  if (bytes.multiplied == 0 || !bytes.scaled) return 1.0;
  // Of mma.sync's 385 TFLOP/s over 16 bits.
  return bytes.codes == DType::kI4 ? 385.0 / 200 : bytes.codes == DType::kE2M1 ? 385.0 / 244 : 1.5;
}

/// Decode of packed codes waits for instructions, not for the memory: an H200's SMs take so long
/// for a token of a head, however many of them are busy (docs/kernels/decode.md). So do tiles of
/// 192 rows for codes with scales, whose two warps widen as much for few rows as for many: 16 x 64
/// queries over 8192 tokens of int8 took 355 us in place of 303, by tiles of 192 and 64 rows.
inline double token_us(const KernelRow& row, const TokenBytes& bytes) {
  if (is_hopper(row) && bytes.scaled && bytes.multiplied > 0 && row.rows == 192) {
    const double of_512 = std::string_view(row.kv) == "bf16xe4m3" ? 17.5e-3 : 20e-3;
    return of_512 * bytes.multiplied / 512;
  }
  if (!is_decode(row) || !is_packed(bytes.codes)) return 0;
  return (bytes.codes == DType::kI4 ? 5.0e-3 : 5.7e-3) * heads_of_item(row);
}

inline Workers limits_of(const KernelRow& row, const DeviceInfo& info, int group, int64_t page_run,
                         const TokenBytes& bytes, double bandwidth,
                         const ClusterBlocks& cluster_blocks) {
  GpuKernel kernel{.sms = info.sm_count,
                   .blocks_per_sm = row.shape.blocks_per_sm,
                   .rows = item_rows(row, group),
                   .kv_tile = row.shape.kv_tile,
                   .heads_of_item = heads_of_item(row),
                   .box_tokens = is_hopper(row) ? static_cast<int32_t>(kv_box(row, page_run)) : 0,
                   .bytes_per_token = bytes.stored * heads_of_item(row),
                   .product_bytes = is_decode(row) && !bytes.scaled ? 0 : bytes.multiplied,
                   .state_row_bytes = 4 * row.head_dim_vo,
                   .product_time = product_time(row, bytes),
                   .token_us = token_us(row, bytes)};
  // What clock and width promise is 5 % more than a kernel reads (H200: 4.8 and 4.55 TB/s).
  if (bandwidth > 0) kernel.bytes_per_second = 0.95 * bandwidth;
  if (is_decode(row)) return gpu_decode_limits(kernel);
  if (is_mixed(row)) return gpu_mixed_limits(kernel, kNarrowRows);
  if (is_latent(row) && !is_hopper(row)) return gpu_latent_mma_limits(kernel);
  if (is_latent(row)) {
    kernel.cluster_blocks = cluster_blocks;
    return row.rows == 16 ? gpu_few_latent_limits(kernel) : gpu_latent_limits(kernel);
  }
  return is_hopper(row) ? gpu_hopper_limits(kernel) : gpu_prefill_limits(kernel);
}

}  // namespace flashbsr::cuda
