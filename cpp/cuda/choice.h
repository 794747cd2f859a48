// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Which attention kernel serves a computation on a device.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <flashbsr/core/dtype.h>

#include "api/backend.h"
#include "api/options.h"
#include "driver.h"
#include "registry.h"

namespace flashbsr::cuda {

/// What decides about the kernel.
struct Need {
  int head_dim_qk = 0;
  int head_dim_vo = 0;
  DType q = DType::kF16;
  DType kv = DType::kF16;  ///< of K
  DType v = DType::kF16;
  bool soft_cap = false;
  bool alibi = false;
  bool rotates = false;      ///< RoPE inside attention: not by every kernel
  bool masked = false;       ///< by a custom mask
  bool scaled = false;       ///< K and V are codes with scales of every token and head
  bool half_scales = false;  ///< these are float16
  bool halves = false;       ///< a pass has widened the codes, and K's may be two of a row
  bool pairs = false;        ///< two KV heads may be read together, and their rows are one tile's
  bool latent = false;       ///< V is a part of K
  bool places = false;       ///< an encoding asks where the keys of a share are
  bool sigmoid = false;      ///< instead of softmax, or another activation of the caller's
  double rows = 1;           ///< packed rows of a request, on average
  int group = 1;             ///< query heads of a KV head
  api::Family family = api::Family::kAuto;
  const std::string* variant = nullptr;  ///< name of the caller's own; null: built in
  bool row_hooks = false;                ///< which has hooks of whole rows
  bool gathers = false;                  ///< K and V that TMA cannot copy
  bool fast_sums = false;                ///< of float8 products, where they truncate
  int tile_rows = 0;                     ///< > 0: of this height or not at all, and of the build
  int mixed_rows = 0;                    ///< > 0: of wide tiles, beside requests of few rows
  std::shared_ptr<api::KernelProvider> provider;  ///< null: the rows of the build are all there is

  /// More than plain attention.
  bool hooks() const { return soft_cap || alibi || rotates || masked; }
  bool operator==(const Need&) const = default;
};

/// Decode of packed codes, two KV heads at once: in boxes, and where TMA does not copy them.
inline constexpr std::string_view kPairsFamily = "decode_pairs";
inline constexpr std::string_view kPairsGatherFamily = "decode_pairs_gather";

/// What a batch needs, as far as options and batch say it.
/// @param q     type of queries
/// @param rows  packed rows of a request, on average
Need need_of(const api::AttentionOptions& options, const api::Batch& batch, DType q, double rows);

/// Most packed rows of a narrow item (plan/mixture.h).
inline constexpr int kNarrowRows = 8;

/// Whether a tile holds the rows of two KV heads of packed codes, `rows` of each on average, and
/// they are read faster together (docs/kernels/decode.md). Scales of every head, beside those of
/// tokens, such kernels do not know.
bool pay_together(const api::AttentionOptions& options, const api::Batch& batch, double rows,
                  int sms);

/// The kernel that choose_kernel would give; null where there is none. For a mixed batch one of
/// family "mixed" only.
const KernelRow* try_choose_kernel(const Need& need, const DeviceInfo& device);

/// The kernel whose row tile wastes least: the smallest that holds the rows, otherwise the largest
/// there is. Longer requests are cut into tiles, so every choice is correct. What no row of the
/// build does, a caller's variant or a combination that cpp/instances.txt leaves out, is left to
/// the provider. Throws Error(kUnsupported), naming the nearest kernel, where there is none.
const KernelRow& choose_kernel(const Need& need, const DeviceInfo& device);

/// Throws where a kernel does not rotate rows as they are.
void check_rotation(const api::AttentionOptions& options, const KernelRow& row, api::Place place);

inline bool is_decode(const KernelRow& row) { return row.family[0] == 'd'; }
/// KV heads of an item.
inline int heads_of_item(const KernelRow& row) {
  return std::string_view(row.family).starts_with(kPairsFamily) ? 2 : 1;
}
/// Boxes of K, V and scales of two heads.
inline bool takes_pair_boxes(const KernelRow& row) { return row.family == kPairsFamily; }
inline bool is_mixed(const KernelRow& row) { return row.family[0] == 'm'; }
/// Of sm_90a, or from sm_80 on.
inline bool is_latent(const KernelRow& row) { return row.family[0] == 'l'; }
inline bool is_hopper(const KernelRow& row) {
  return row.family[0] == 'h' || is_mixed(row) || (is_latent(row) && row.exact);
}

/// Most packed rows of an item: as many as the kernel holds. Hopper's copies of Q take whole query
/// tokens, or whole tiles of one.
inline int item_rows(const KernelRow& row, int group) {
  return is_hopper(row) && group < row.rows ? row.rows / group * group : row.rows;
}

}  // namespace flashbsr::cuda
