// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// What api::Attention asks of a device: limits for the scheduler, memory for the plan, a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <flashbsr/core/launch.h>
#include <flashbsr/core/params.h>
#include <flashbsr/plan/limits.h>
#include <flashbsr/plan/memory.h>

#include "array.h"
#include "lengths.h"

namespace flashbsr::api {

/// What a batch asks of the kernel, apart from the options.
struct Batch {
  int64_t requests = 0;
  int64_t q_tokens = 0;
  bool per_head = false;  ///< every request is of one KV head
  bool decode = false;    ///< no qo_indptr: one query token each
  bool masked = false;
  bool places = false;   ///< an encoding asks where the keys of a share are
  int64_t page_run = 0;  ///< tokens in a row in memory, of every page; 0: ragged KV
  DType q = DType::kF16;
  DType kv = DType::kF16;  ///< of K
  DType v = DType::kF16;
  bool scaled = false;   ///< K and V are codes with scales of every token and head
  int64_t kv_slots = 0;  ///< tokens of the pages that requests name; ragged: rows of K and V
  bool shares = false;   ///< requests share KV: tiles of many rows
  int tile_rows = 0;     ///< > 0: tiles of these, if a kernel of the build has them
  int mixed_rows = 0;    ///< > 0: a kernel for mixed batches, wide tiles of these, if there is one
  bool guessed = false;  ///< the types: the first run may bring others
  /// The requests; null where the kernel must not depend on them (a fixed capacity, fixed splits).
  const std::vector<Request>* lengths = nullptr;
};

/// All that a plan is, in host memory. It stays there until the next plan.
struct HostPlan {
  PlanView plan{};
  const uint8_t* mask = nullptr;  ///< null: none
  int64_t mask_bytes = 0;
  RopeTables rope;
  int64_t rope_positions = 0;     ///< that the tables cover; 0: no RoPE
  int64_t rope_capacity = 0;      ///< that they may have to cover later, as far as is known
  const float* slopes = nullptr;  ///< [H_qo] standard ALiBi slopes; null: no ALiBi
};

/// What of the caller's a plan uses, for as long as something may use the plan.
struct Borrowed {
  char* workspace = nullptr;   ///< memory for partial states; null: none
  std::shared_ptr<void> kept;  ///< the objects that own it, and arrays that a variant has captured
};

struct RunOptions {
  void* stream = nullptr;
  Overlap overlap = Overlap::kNone;
  bool check = false;  ///< validate page ids on the device first
  bool wait = false;   ///< return when the results are there
};

struct ResolveOptions {
  void* stream = nullptr;
  bool check = false;  ///< lengths beyond their bounds are errors; waits for a device
};

/// Measurements of the last run; seconds are 0 where a device does not measure.
struct RunStats {
  double kernel_seconds = 0;
  std::vector<double> busy_seconds;  ///< per thread
  int threads = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  /// Where it computes, and so where the arrays of a run must be.
  virtual Place place() const = 0;
  /// Chooses the kernel for a batch and says what the scheduler must know of it.
  virtual Workers limits(const Batch& batch) = 0;
  /// Where the next plan is to be written. It may outlive this.
  virtual std::shared_ptr<PlanMemory> plan_memory() = 0;
  /// Takes a plan that was made with these limits and written there.
  virtual void take_plan(const HostPlan& plan, const Borrowed& borrowed, void* stream) = 0;
  /// The lengths of a plan of bounds: of all runs from now on, and of a capture's own.
  virtual void resolve(const LengthViews& lengths, const ResolveOptions& options) = 0;
  /// Whether the kernel of the plan is one for these arrays: their types, and how they lie.
  virtual bool serves(const Params& params, void* stream) = 0;
  virtual void run(Params& params, const RunOptions& options) = 0;
  /// Whether CUDA graphs replay over later plans: their launches have the kernel and the memory of
  /// when they were captured.
  virtual bool captured() const = 0;

  virtual std::string kernel_name() const = 0;
  virtual std::string device_name() const = 0;
  /// Bytes per second that the memory's clock and width give; 0: unknown.
  virtual double bandwidth() const = 0;
  virtual RunStats stats() const = 0;
};

template <class LengthList>
void check_lengths(const LengthList& lens, const PlanView& plan) {
  for (int32_t i = 0; i < plan.header().num_requests; ++i) {
    const Request& r = plan.requests()[i];
    const int64_t bound = r.kv_len, length = lens[static_cast<size_t>(i)];
    const int64_t prefix = plan.header().common_prefix;
    const int64_t least = prefix > 0 && r.q_len > 0 && bound > 0 ? prefix + r.q_len : 0;
    if (length >= least && length <= bound) continue;
    throw Error(ErrorCode::kIndexRange, flashbsr::detail::at("kv_lens", i), std::to_string(length),
                "a length in [" + std::to_string(least) + ", " + std::to_string(bound) +
                    "], the common prefix and the bound that were planned");
  }
}

[[noreturn]] inline void lengths_missing(const char* expected) {
  throw Error(ErrorCode::kPlan, "kv_lens", "a plan of Bounds without lengths", expected);
}

/// Points `params` at partial states in `memory`, as partial_bytes counts them.
inline void place_partials(Params& params, const PlanHeader& h, char* memory, int64_t dim_vo) {
  params.partial_out = reinterpret_cast<float*>(memory);
  params.partial_lse = params.partial_out + static_cast<int64_t>(h.max_partial_rows) * dim_vo;
}

}  // namespace flashbsr::api
