// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <flashbsr/core/latent_row.h>
#include <flashbsr/variant/alibi.h>

#include "../cuda/backend.h"
#include "cpu_backend.h"

namespace flashbsr::api {

namespace {

std::string cuda_text(const AttentionOptions& options) {
  return std::string("backend='") + family_backend(options.family) + "'";
}

std::unique_ptr<Backend> make_backend(const AttentionOptions& options, Place place) {
  if (place.cuda) return cuda::make_backend(options, place.device);
  return std::make_unique<CpuBackend>(options);
}

}  // namespace

Attention::Attention(const AttentionOptions& options)
    : options_(options),
      q_dtype_(options.q_dtype.value_or(DType::kF16)),
      // Queries in float8 leave the KV no other type.
      kv_dtype_(options.kv_dtype.value_or(q_dtype_ == DType::kE4M3 ? DType::kE4M3 : DType::kF16)),
      v_dtype_(options.v_dtype.value_or(kv_dtype_)),
      // A float8 may have them or not: the first run says.
      kv_scaled_(kv_dtype_ == DType::kI8 || is_packed(kv_dtype_) || v_dtype_ != kv_dtype_ ||
                 options.packed_latents) {
  Place place;
  if (options.backend == BackendChoice::kCpu) {
    settled_by_ = "backend='cpu'";
  } else if (options.backend == BackendChoice::kCuda) {
    place = {.cuda = true, .device = max_of(options.device, 0)};
    if (options.device >= 0) {
      settled_by_ = cuda_text(options) + ", device=" + std::to_string(options.device);
    } else {
      place.device = cuda::current_device();
    }
  }
  backend_ = make_backend(options_, place);
  if (options_.position == Position::kAlibi) {
    const int32_t heads = options_.shape.num_qo_heads;
    for (int32_t i = 0; i < heads; ++i) slopes_.push_back(standard_alibi_slope(i, heads));
  }
}

void Attention::settle(Place place, const char* argument) {
  const std::lock_guard<std::mutex> hold(running_);
  settle_locked(place, argument);
}

void Attention::settle_locked(Place place, const char* argument) {
  const Place here = backend_->place();
  if (place == here) {
    if (settled_by_.empty()) settled_by_ = std::string("decided by ") + argument;
    return;
  }
  const bool kind_fixed = options_.backend == BackendChoice::kCuda && !place.cuda;
  if (!settled_by_.empty() || kind_fixed) {
    const std::string why = kind_fixed ? cuda_text(options_) : settled_by_;
    throw Error(ErrorCode::kDevice, argument, "an array in " + place_text(place),
                "one in " + (kind_fixed ? "the memory of a GPU" : place_text(here)) + " (" + why +
                    "); another flashbsr.Attention for another device");
  }
  if (const std::string why = cuda::why_unavailable(); place.cuda && !why.empty()) {
    throw Error(ErrorCode::kDevice, argument, "an array in " + place_text(place),
                "one in host memory: " + why);
  }
  backend_ = make_backend(options_, place);
  scheduled_ = false;
  settled_by_ = std::string("decided by ") + argument;
}

Place Attention::place() {
  const std::lock_guard<std::mutex> hold(running_);
  return backend_->place();
}

void Attention::update(const LengthArrays& arrays, const ResolveOptions& options) {
  const std::lock_guard<std::mutex> hold(running_);
  update_locked(arrays, options);
}

void Attention::update_locked(const LengthArrays& arrays, const ResolveOptions& options) {
  if (!planned_ || !laid_.layout.bounds) {
    throw Error(ErrorCode::kPlan, "update", planned_ ? "a plan of lengths" : "no plan",
                "a plan of flashbsr.Bounds");
  }
  arrays.each([&](const Array& a) {
    if (a.place.cuda) settle_locked(a.place, a.name);
  });
  lengths_ = arrays;
  if (scheduled_) {
    resolve(options);
  } else {
    schedule_again(options.stream);
  }
}

void Attention::resolve(const ResolveOptions& options) {
  const PlanHeader& h = planner_->view().header();
  backend_->resolve(length_views(*lengths_, h, backend_->place()), options);
}

int64_t Attention::needed_bytes() {
  int64_t rows;
  if (options_.capacity.fixed()) {
    const Shape shape = options_.shape.with_heads_of_item(limits_.wide.heads_of_item);
    rows = sizes_for(options_.capacity, shape, limits_, options_.split, laid_.layout.page_size)
               .partial_rows;
  } else {
    rows = planner_->view().header().max_partial_rows;
  }
  return partial_bytes(rows, options_.head_dim_vo);
}

int64_t Attention::workspace_size() {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) throw Error(ErrorCode::kPlan, "workspace_size", "no plan", "plan() first");
  if (!scheduled_) limits_ = limits_for(batch());
  return needed_bytes();
}

void Attention::check_workspace(int64_t needed) const {
  if (needed <= workspace_bytes_) return;
  throw Error(ErrorCode::kCapacity, "workspace", std::to_string(workspace_bytes_) + " bytes",
              "at least " + std::to_string(needed) + " bytes (workspace_size())");
}

void Attention::keep(std::shared_ptr<void> kept) {
  const std::lock_guard<std::mutex> hold(running_);
  borrowed_.kept = std::move(kept);
}

void Attention::set_workspace(const Array& workspace) {
  const std::lock_guard<std::mutex> hold(running_);
  check_element(workspace, {Element::kU8});
  check_rank(workspace, 1, "(bytes)");
  check_contiguous(workspace);
  settle_locked(workspace.place, workspace.name);
  // Rows of partial states are read and written in vectors on a device.
  const uintptr_t align = workspace.place.cuda ? 16 : alignof(float);
  if (reinterpret_cast<uintptr_t>(workspace.data) % align != 0) {
    throw Error(ErrorCode::kValue, workspace.name,
                "memory not aligned to " + std::to_string(align) + " bytes", "an aligned array");
  }
  set_bytes(workspace.shape[0]);
  borrowed_.workspace = static_cast<char*>(workspace.data);
}

void Attention::set_workspace_bytes(int64_t bytes) {
  const std::lock_guard<std::mutex> hold(running_);
  set_bytes(bytes);
}

void Attention::set_bytes(int64_t bytes) {
  borrowed_.workspace = nullptr;
  scheduled_ = false;
  workspace_bytes_ = bytes;
  if (planned_ && options_.capacity.fixed()) check_workspace(needed_bytes());
}

std::vector<int32_t> Attention::plan_buffer() {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) throw Error(ErrorCode::kPlan, "plan_info", "no plan", "plan() first");
  const std::span<const int32_t> words = planner_->buffer();
  return {words.begin(), words.end()};
}

RunStats Attention::stats() {
  const std::lock_guard<std::mutex> hold(running_);
  return backend_->stats();
}

std::optional<RunTypes> Attention::run_types() {
  const std::lock_guard<std::mutex> hold(running_);
  return ran_;
}

bool Attention::captured() {
  const std::lock_guard<std::mutex> hold(running_);
  return backend_->captured();
}

std::string Attention::kernel_name() {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) throw Error(ErrorCode::kPlan, "kernel_name", "no plan", "plan() first");
  return backend_->kernel_name();
}

std::string Attention::device_name() {
  const std::lock_guard<std::mutex> hold(running_);
  return backend_->device_name();
}

double Attention::bandwidth() {
  const std::lock_guard<std::mutex> hold(running_);
  return backend_->bandwidth();
}

void Attention::run(const RunArrays& arrays, const RunOptions& options) {
  const std::lock_guard<std::mutex> hold(running_);
  run_locked(arrays, options);
}

void Attention::run(const RunArrays& arrays, const LengthArrays& lengths,
                    const RunOptions& options) {
  const std::lock_guard<std::mutex> hold(running_);
  struct Forget {
    std::optional<LengthArrays>& lengths;
    ~Forget() { lengths.reset(); }
  } forget{lengths_};
  update_locked(lengths, {.stream = options.stream, .check = options.check});
  run_locked(arrays, options);
}

void Attention::run_locked(const RunArrays& arrays, const RunOptions& options) {
  if (!planned_) {
    throw Error(ErrorCode::kPlan, "run", "no plan",
                "plan() first; a plan() that raised leaves none");
  }
  settle_locked(arrays.q.place, arrays.q.name);
  const Place place = backend_->place();
  // Under a CUDA graph the arrays are those of the largest batch.
  const bool spare_rows = place.cuda && options_.capacity.fixed();
  Params params = params_for(options_, planner_->view().header(), arrays, place, spare_rows);
  types_seen_ = true;
  if (!scheduled_ || tile_rows_open_ || !backend_->serves(params, options.stream)) {
    q_dtype_ = params.q.dtype;
    kv_dtype_ = params.k.dtype;
    v_dtype_ = options_.latent ? kv_dtype_ : params.v.dtype;
    kv_scaled_ = has_token_scales(params);
    schedule_again(options.stream);
  }
  backend_->run(params, options);
  ran_ = RunTypes{params.q.dtype, params.k.dtype, params.v.dtype, params.out.dtype};
}

}  // namespace flashbsr::api
