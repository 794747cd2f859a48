// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One attention computation with fixed options: plan, then run as often as the plan holds. This is
// the only way from an API to a kernel.
#pragma once

#include <mutex>
#include <optional>

#include <flashbsr/cpu/engine.h>
#include <flashbsr/variant/rope.h>

#include "array.h"
#include "cache.h"

namespace flashbsr::api {

struct AttentionOptions {
  Shape shape;
  CacheShape cache;
  int32_t head_dim_qk = 0;
  int32_t head_dim_vo = 0;
  float sm_scale = 1.0f;
  float soft_cap = 0.0f;
  Position position = Position::kNone;
  RopeFrequencies rope;
  Activation activation = Activation::kSoftmax;
  float sigmoid_bias = 0.0f;
  bool lse_base2 = false;
  SplitPolicy split;
  Capacity capacity;
  int32_t num_workers = 0;  ///< 0: the device's default
  int32_t num_threads = 0;  ///< 0: the cores this process may use
};

/// At most one of the two.
struct MaskArrays {
  std::optional<Array> boolean;  ///< bool or uint8, flattened, sum of q_len * kv_len
  std::optional<Array> packed;   ///< uint8, little-endian bits, each request starts at a byte

  bool given() const { return boolean || packed; }
};

/// A scale: one number, or an array with one per head.
struct Scale {
  float number = 1.0f;
  std::optional<Array> per_head;
};

struct RunArrays {
  Array q;
  Array k;  ///< or the stacked cache
  std::optional<Array> v;
  Array out;
  std::optional<Array> lse;
  Scale q_scale, k_scale, v_scale;
  std::optional<Array> sinks;
  std::optional<Array> alibi_slopes;
};

class Attention {
 public:
  explicit Attention(const AttentionOptions& options);

  void plan(const Array* qo_indptr, const Array& kv_indptr, const Array* kv_indices,
            const Array* last_page_len, const Array* kv_lens, const MaskArrays& mask);
  void plan_block_table(const Array* qo_indptr, const Array& block_tables, const Array& kv_lens,
                        const MaskArrays& mask);
  /// `mask` is [blocks, r, c], or the same flattened and packed without gaps.
  void plan_bsr(const Array& indptr, const Array& indices, int64_t m, int64_t n, int64_t r,
                int64_t c, const MaskArrays& mask);

  void run(const RunArrays& arrays);

  /// Memory for partial states of the caller's; null goes back to owned memory.
  void set_workspace(const Array* workspace);
  /// Bytes of partial states: of the capacity where one is fixed, otherwise of the last plan.
  int64_t workspace_size() const;

  bool planned() const { return planned_; }
  /// A copy: plan() writes the same memory again.
  std::vector<int32_t> plan_buffer();
  cpu::RunStats stats();
  const cpu::Engine& engine() const { return engine_; }

 private:
  void finish_plan(bool masked);
  void take_mask(const MaskArrays& mask);
  void take_block_mask(const MaskArrays& mask, int64_t r);
  void place_partials(Params& params);
  Params params_for(const RunArrays& arrays);

  AttentionOptions options_;
  DeviceLimits limits_;
  cpu::Engine engine_;
  Layout layout_;
  Planner planner_;
  RopeTableStorage rope_;
  RopeTables rope_tables_;
  std::vector<uint8_t> mask_;
  std::vector<float> slopes_;
  cpu::AlignedBuffer owned_;
  char* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  bool planned_ = false;
  std::mutex running_;  ///< held by whoever reads or writes the plan
};

}  // namespace flashbsr::api
