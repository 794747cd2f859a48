// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// One attention computation with fixed options: plan, then run as often as the plan holds. This is
// the only way from an API to a kernel.
#pragma once

#include <memory>
#include <mutex>

#include <flashbsr/plan/schedule.h>

#include "backend.h"
#include "layouts.h"

namespace flashbsr::api {

struct RunTypes {
  DType q, k, v, out;
};

struct PlanOptions {
  MaskArrays mask;                   ///< of requests' pairs
  std::optional<Array> q_positions;  ///< [batch] of requests' first query tokens
  bool share = true;                 ///< look for KV that requests share
  void* stream = nullptr;            ///< the copies to a device are made on it
};

/// Shared, so that who runs it may keep it while its owner lets go of it (numbered.h).
class Attention : public std::enable_shared_from_this<Attention> {
 public:
  explicit Attention(const AttentionOptions& options);

  /// Says where to compute, unless that is fixed already; then it must agree. `argument` is what
  /// tells. A plan made for another place is made again by the next run.
  void settle(Place place, const char* argument);
  Place place();

  void plan(const LayoutArrays& arrays, const PlanOptions& options);
  /// The batch that another one is planned for, and its schedule where that is the same.
  void plan(Attention& like, void* stream);

  /// The lengths of a plan of bounds. The arrays live until the next call of this or plan().
  void update(const LengthArrays& arrays, const ResolveOptions& options);

  /// Objects of the caller's that CUDA graphs keep with what they captured.
  void keep(std::shared_ptr<void> kept);

  bool has_provider() const { return options_.provider != nullptr; }
  const std::vector<ExtraOption>& extras() const { return options_.extras; }

  void run(const RunArrays& arrays, const RunOptions& options);
  /// The same after an update() that nothing comes between, of arrays that live until this returns.
  void run(const RunArrays& arrays, const LengthArrays& lengths, const RunOptions& options);

  /// Memory for partial states of the caller's.
  void set_workspace(const Array& workspace);
  /// Memory of its own, but never more than this.
  void set_workspace_bytes(int64_t bytes);
  /// Bytes of partial states: of the capacity where one is fixed, otherwise of the last plan.
  int64_t workspace_size();

  /// A copy: plan() writes the same memory again.
  std::vector<int32_t> plan_buffer();
  RunStats stats();
  /// Of q, KV and out in the last run of this plan; empty before it.
  std::optional<RunTypes> run_types();
  /// Whether CUDA graphs replay over later plans.
  bool captured();
  std::string kernel_name();
  std::string device_name();
  double bandwidth();

 private:
  void settle_locked(Place place, const char* argument);
  void update_locked(const LengthArrays& arrays, const ResolveOptions& options);
  void run_locked(const RunArrays& arrays, const RunOptions& options);
  void forget_plan();
  /// The computation's shape, of the batch that is laid out.
  Shape shape() const;
  bool may_share() const;
  void find_shared();
  bool has_schedule_of(const Attention& like);
  /// Limits and what is shared, with the kernel for both.
  void choose_kernel(const Shape& shape);
  bool is_mixed(const Batch& batch, bool shares) const;
  void check_mixed() const;
  int mixed_rows() const;
  void schedule(void* stream);
  void schedule_again(void* stream);
  void hand_over(void* stream);
  void resolve(const ResolveOptions& options);
  bool has_tile_rows(int32_t rows) const;
  void check_tile_rows();
  void choose_cut(const Shape& shape);
  Workers limits_for(const Batch& batch);
  Batch batch() const;
  int64_t needed_bytes();
  void set_bytes(int64_t bytes);
  void check_workspace(int64_t needed) const;
  void check_positions(int64_t furthest) const;
  void check_placement() const;
  int64_t furthest_position() const;
  void check_bounds() const;

  AttentionOptions options_;
  std::unique_ptr<Backend> backend_;
  /// What fixed the backend's place: an option or an argument. Empty: nothing yet, the place is a
  /// guess that the first array on a device corrects.
  std::string settled_by_;

  std::optional<LengthArrays> lengths_;  ///< of the last update of this plan

  // The batch stays, so that the plan can be made again for another place or kernel. Page ids that
  // the caller has are borrowed while plan() runs, and from the plan that was written behind it.
  LaidOut laid_;
  DType q_dtype_;
  DType kv_dtype_, v_dtype_;
  bool kv_scaled_;               ///< by scales of every token and head
  bool types_seen_ = false;      ///< a run brought them
  bool tile_rows_open_ = false;  ///< by the types that were guessed there are no tiles as asked for

  PrefixTree prefixes_;
  Sharing sharing_;  ///< of the last plan
  Sharing trial_;
  Sharer sharer_;

  Planner planners_[2];
  Planner* planner_ = &planners_[0];  ///< of the last plan
  Planner* other_planner_ = &planners_[1];
  std::shared_ptr<PlanMemory> memory_;  ///< that the last plan is in
  Workers limits_;
  Batch asked_;  ///< that they are for
  RopeTableStorage rope_;
  std::vector<float> slopes_;
  Borrowed borrowed_;
  int64_t workspace_bytes_ = -1;  ///< that there may be; -1: as many as a plan needs
  bool planned_ = false;          ///< there is a batch
  bool scheduled_ = false;        ///< and the backend has its plan
  std::optional<RunTypes> ran_;
  std::mutex running_;  ///< held by whoever reads or writes the plan
};

}  // namespace flashbsr::api
