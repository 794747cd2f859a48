// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <algorithm>

#include <flashbsr/variant/alibi.h>

#include "../cuda/backend.h"
#include "cpu_backend.h"

namespace flashbsr::api {

namespace {

/// Rows of wide tiles in kernels for mixed batches. Two of 128 hold a part of 256 rows better than
/// one of 192 and one of 64.
constexpr int kMixedRows[] = {192, 128};
/// Most packed rows of a request that has few: what narrow items of a mixed batch hold.
constexpr int64_t kFewRows = 8;

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
      kv_dtype_(options.kv_dtype.value_or(q_dtype_ == DType::kE4M3 ? DType::kE4M3 : DType::kF16)) {
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

void Attention::plan(const LayoutArrays& arrays, const PlanOptions& options) {
  const std::lock_guard<std::mutex> hold(running_);
  planned_ = scheduled_ = false;
  ran_.reset();
  lengths_.reset();
  lay_out(arrays, options.mask, laid_);
  if (options_.capacity.fixed()) options_.capacity.count_pages(laid_.layout.page_size);
  find_shared(options.share);
  schedule(options.stream);
  planned_ = true;
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
    schedule(options.stream);
  }
}

void Attention::resolve(const ResolveOptions& options) {
  const PlanHeader& h = PlanView{planner_.buffer().data()}.header();
  backend_->resolve(length_views(*lengths_, h, backend_->place()), options);
}

/// What requests share: as given by levels, or found in their page lists.
void Attention::find_shared(bool share) {
  prefixes_.clear();
  // Parts see no positions, and their rows are of no one request.
  Shape& shape = options_.shape;
  shape.may_share = laid_.layout.paged && options_.position == Position::kNone &&
                    !options_.row_hooks && !options_.asks_where && options_.split.fixed_size == 0 &&
                    !options_.split.disabled;
  if (!laid_.given.empty() && (!shape.may_share || shape.window_left >= 0)) {
    // The requests' own page lists say the same, as long as positions have no gaps.
    if (laid_.given_needed) {
      throw Error(ErrorCode::kUnsupported, "last_page_len",
                  "a shared level that ends inside of a page",
                  "levels of whole pages for windows, position encodings, fixed or disabled splits "
                  "and variants that ask for positions");
    }
    laid_.given.clear();
  }
  if (share && laid_.may_be_shared && shape.may_share) prefixes_.find(laid_.layout, shape);
}

/// Requests of few rows beside others, or parts of many rows; and nothing that forbids a kernel for
/// them.
bool Attention::is_mixed(const Batch& batch, bool shares) const {
  if (batch.per_head || !batch.lengths || options_.split.disabled || options_.num_workers > 0) {
    return false;
  }
  const int32_t group = options_.shape.num_qo_heads / options_.shape.num_kv_heads;
  bool narrow = false, wide = shares;
  for (const Request& r : laid_.layout.requests) {
    (r.q_len * int64_t{group} <= kFewRows ? narrow : wide) = true;
    if (narrow && wide) return true;
  }
  return false;
}

void Attention::choose_kernel(const Shape& shape) {
  const Batch batch = this->batch();
  limits_ = limits_for(batch);
  sharing_.clear();
  const bool shares = !laid_.given.empty() || !prefixes_.nodes.empty();
  const bool mixed = is_mixed(batch, shares);
  if (!shares && !mixed) return;
  const bool fixed = options_.capacity.fixed();
  const auto choose = [&](const Workers& limits, Sharing& sharing) {
    sharing.clear();
    if (!laid_.given.empty()) {
      sharing = laid_.given;
    } else if (shares) {
      sharer_.choose(prefixes_, laid_.layout, shape, limits, fixed, sharing);
    }
    return Sharer::price(laid_.layout, shape, limits, sharing);
  };
  int64_t price = choose(limits_, sharing_);
  if (laid_.given.empty() && Sharer::price(laid_.layout, shape, limits_, {}) <= price) {
    sharing_.clear();
    price = Sharer::price(laid_.layout, shape, limits_, {});
  }
  // Under a capacity the kernel must not change from plan to plan: captured runs hold it.
  if (fixed) return;
  Batch taken = batch;
  const auto try_kernel = [&](const Batch& other) {
    const Workers limits = limits_for(other);
    const bool wants_mixed = other.mixed_rows > 0;
    const bool same = limits.wide.tile_rows == limits_.wide.tile_rows;
    if (limits.mixed() != wants_mixed || (same && !wants_mixed)) return;
    const int64_t other_price = choose(limits, trial_);
    if (other_price >= price || (trial_.empty() && !wants_mixed)) return;
    limits_ = limits;
    price = other_price;
    taken = other;
    std::swap(sharing_, trial_);
  };
  Batch other = batch;
  other.shares = true;
  if (shares) try_kernel(other);
  other = batch;
  for (const int rows : kMixedRows) {
    other.mixed_rows = rows;
    if (mixed) try_kernel(other);
  }
  limits_for(taken);  // the backend's kernel is the last it was asked for
}

Batch Attention::batch() const {
  // 16-bit K and V have queries of their own type.
  const std::optional<DType>& kv = options_.kv_dtype;
  const bool types_given = kv && (dtype_size(*kv) > 1 || options_.q_dtype);
  Batch batch{.requests = static_cast<int64_t>(laid_.layout.requests.size()),
              .q_tokens = laid_.layout.num_q_tokens,
              .per_head = !laid_.layout.kv_heads.empty(),
              .decode = laid_.layout.decode,
              .masked = laid_.masked,
              .page_run = laid_.layout.paged
                              ? page_run(laid_.layout.page_size, laid_.layout.num_kv_tokens)
                              : 0,
              .q = q_dtype_,
              .kv = kv_dtype_,
              .guessed = !types_seen_ && !types_given};
  // Fixed splits promise that a request's bits do not depend on its batch: nor may the kernel.
  if (options_.split.fixed_size <= 0) batch.lengths = &laid_.layout.requests;
  if (options_.capacity.fixed()) {
    // The kernel must not change from plan to plan: captured runs hold it.
    batch.requests = options_.capacity.max_requests;
    batch.q_tokens = options_.capacity.max_q_tokens;
    batch.lengths = nullptr;
  }
  return batch;
}

Workers Attention::limits_for(const Batch& batch) {
  Workers limits = backend_->limits(batch);
  if (options_.num_workers > 0) limits.wide.num_workers = options_.num_workers;
  // Captured runs hold their launch: it cannot become one of clusters, nor of others.
  if (options_.capacity.fixed()) std::ranges::fill(limits.wide.cluster_blocks, 0);
  return limits;
}

/// Tiles of fewer rows hold some batches better, where there are few of them: 64 queries of 4 heads
/// are 256 rows, two tiles of 128 or one of 192 and one of 64, which takes four fifths of its time.
PlanView Attention::make_plan(const Shape& shape) {
  constexpr int32_t kRows = 128;
  constexpr int64_t kRounds = 4;  // of all workers; beyond, waste at the ends of requests is little
  const auto plan = [&](Planner& planner) {
    return planner.plan(laid_.layout, shape, limits_, options_.split, options_.capacity, sharing_);
  };
  const PlanView made = plan(planner_);
  const PlanHeader& h = made.header();
  Batch other = batch();
  if (limits_.wide.tile_rows <= kRows || limits_.mixed() || h.price <= 0 || !sharing_.empty() ||
      !other.lengths || options_.capacity.fixed() || options_.num_workers > 0 ||
      h.num_items > kRounds * h.num_workers) {
    return made;
  }
  const Workers first = limits_;
  other.tile_rows = kRows;
  limits_ = limits_for(other);
  if (limits_.wide.tile_rows < first.wide.tile_rows) {
    const PlanView trial = plan(other_planner_);
    if (trial.header().price < h.price - h.price / 32) {
      std::swap(planner_, other_planner_);
      return PlanView{planner_.buffer().data()};
    }
  }
  limits_ = limits_for(batch());  // the backend's kernel is the last it was asked for
  return made;
}

void Attention::schedule(void* stream) {
  scheduled_ = false;
  Shape shape = options_.shape;
  shape.custom_mask = laid_.masked;
  // A mask says all there is to say: it replaces causality, as in FlashInfer.
  if (laid_.masked) shape.causal = false;
  choose_kernel(shape);
  HostPlan host;
  host.plan = make_plan(shape);
  const PlanHeader& h = host.plan.header();
  if (laid_.masked) {
    host.mask = laid_.mask.data();
    host.mask_bytes = static_cast<int64_t>(laid_.mask.size());
  }
  if (options_.position == Position::kRopeLlama) {
    int64_t furthest = h.max_kv_len;
    for (const Request& r : laid_.layout.requests) {
      furthest = max_of<int64_t>(furthest, static_cast<int64_t>(r.q_len) - r.kv_len);
    }
    check_positions(furthest);
    host.rope_positions = furthest + 1;
    host.rope = rope_.tables(options_.rope, options_.head_dim_qk, host.rope_positions);
    const Capacity& c = options_.capacity;
    host.rope_capacity = max_of(c.max_kv_indices * laid_.layout.page_size, c.max_q_tokens) + 1;
  }
  if (!slopes_.empty()) host.slopes = slopes_.data();
  if (workspace_bytes_ >= 0) check_workspace(needed_bytes());
  if (laid_.layout.bounds) check_bounds();
  backend_->take_plan(host, borrowed_, stream);
  scheduled_ = true;
  if (lengths_) resolve({.stream = stream});
}

/// What lengths that come later would break.
void Attention::check_bounds() const {
  if (options_.split.fixed_size > 0 && options_.shape.window_left >= 0) {
    throw Error(ErrorCode::kUnsupported, "fixed_split_size", "a number",
                "None with Bounds and a window, whose begin is not known");
  }
}

int64_t Attention::needed_bytes() {
  int64_t rows;
  if (options_.capacity.fixed()) {
    rows = sizes_for(options_.capacity, options_.shape, limits_.wide, options_.split,
                     laid_.layout.page_size)
               .partial_rows;
  } else {
    rows = PlanView{planner_.buffer().data()}.header().max_partial_rows;
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

/// Positions are below `furthest` in magnitude, or the one that no key has.
void Attention::check_positions(int64_t furthest) const {
  const int64_t most = options_.rope.max_positions;
  if (most < 0 || furthest <= most) return;
  throw Error(ErrorCode::kIndexRange, "rope_cos_sin_cache",
              std::to_string(most) + " positions for a request of " + std::to_string(furthest),
              "a row for every position; or rope_frequencies, which have no end");
}

std::vector<int32_t> Attention::plan_buffer() {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) throw Error(ErrorCode::kPlan, "plan_info", "no plan", "plan() first");
  return planner_.buffer();
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
  Params params =
      params_for(options_, PlanView{planner_.buffer().data()}.header(), arrays, place, spare_rows);
  types_seen_ = true;
  if (!scheduled_ || !backend_->serves(params, options.stream)) {
    q_dtype_ = params.q.dtype;
    kv_dtype_ = params.k.dtype;
    schedule(options.stream);
  }
  backend_->run(params, options);
  ran_ = RunTypes{params.q.dtype, params.k.dtype, params.v.dtype, params.out.dtype};
}

}  // namespace flashbsr::api
