// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// From a layout to a plan: what is shared, which kernel, which cut.
#include <algorithm>

#include "attention.h"

namespace flashbsr::api {

namespace {

/// Rows of wide tiles in kernels for mixed batches. Two of 128 hold a part of 256 rows better than
/// one of 192 and one of 64.
constexpr int kMixedRows[] = {192, 128};

}  // namespace

void Attention::plan(const LayoutArrays& arrays, const PlanOptions& options) {
  const std::lock_guard<std::mutex> hold(running_);
  forget_plan();
  lay_out(arrays, options.mask, {options.q_positions, options_.shape}, laid_);
  laid_.may_be_shared = laid_.may_be_shared && options.share;
  if (options_.capacity.fixed()) options_.capacity.count_pages(laid_.layout.page_size);
  find_shared();
  schedule(options.stream);
  if (!laid_.layout.borrowed_pages.empty()) {
    laid_.layout.borrowed_pages = {planner_->view().kv_indices(), laid_.layout.pages().size()};
  }
  planned_ = true;
}

void Attention::plan(Attention& like, void* stream) {
  if (&like == this) {
    throw Error(ErrorCode::kValue, "layout", "this Attention itself", "another, or a layout");
  }
  const std::scoped_lock hold(running_, like.running_);
  if (!like.planned_) {
    throw Error(ErrorCode::kPlan, "layout", "an Attention without a plan",
                "one whose plan() has succeeded");
  }
  const int32_t heads = options_.shape.num_kv_heads, its = like.options_.shape.num_kv_heads;
  if (!like.laid_.layout.kv_heads.empty() && heads != its) {
    throw Error(ErrorCode::kShape, "layout", "a plan for each of " + std::to_string(its) + " heads",
                "as many as num_kv_heads, " + std::to_string(heads));
  }
  if (settled_by_.empty() && !like.settled_by_.empty()) {
    settle_locked(like.backend_->place(), "layout");
  }
  forget_plan();
  laid_ = like.laid_;
  laid_.layout.own_pages();
  if (options_.capacity.fixed()) options_.capacity.count_pages(laid_.layout.page_size);
  if (has_schedule_of(like)) {
    // Kept only then: until it is written the planner's last plan is in the memory of before.
    const std::shared_ptr<PlanMemory> memory = backend_->plan_memory();
    planner_->take(*like.planner_, options_.shape.window_left, *memory);
    memory_ = memory;
    hand_over(stream);
  } else {
    find_shared();
    schedule(stream);
  }
  planned_ = true;
}

/// Whether the batch would get the schedule here that it has there: with the same shape but for
/// windows that hide nothing, the same place and the same limits of a kernel. Then this has the
/// kernel, and what is shared, too.
bool Attention::has_schedule_of(const Attention& like) {
  options_.shape.may_share = may_share();
  Shape there = like.shape();
  const Shape here = shape();
  prefixes_ = like.prefixes_;
  if (here.window_left != there.window_left) {
    int32_t longest = 0;
    for (const Request& r : laid_.layout.requests) longest = max_of(longest, r.kv_len);
    const auto hides = [&](int32_t window) { return window >= 0 && window < longest; };
    if (hides(here.window_left) || hides(there.window_left) || !laid_.given.empty()) return false;
    there.window_left = here.window_left;
    find_shared();
    if (!prefixes_.nodes.empty() || !like.prefixes_.nodes.empty()) return false;
  }
  if (!like.scheduled_ || !(here == there) || !(backend_->place() == like.backend_->place()) ||
      !(options_.split == like.options_.split) || !(options_.capacity == like.options_.capacity)) {
    return false;
  }
  Batch asked = batch();
  asked.shares = like.asked_.shares;
  asked.tile_rows = like.asked_.tile_rows;
  asked.mixed_rows = like.asked_.mixed_rows;
  limits_ = limits_for(asked);
  sharing_ = like.sharing_;
  return limits_ == like.limits_;
}

void Attention::forget_plan() {
  planned_ = scheduled_ = false;
  ran_.reset();
  lengths_.reset();
}

/// A mask says all there is to say: it replaces causality, as in FlashInfer.
Shape Attention::shape() const {
  Shape shape = options_.shape;
  shape.custom_mask = laid_.masked;
  // Where causality hides nothing of a share, decode say, plans and kernels need not ask.
  const bool whole = laid_.sees_all && shape.context_size > 1 && !options_.capacity.fixed();
  if (laid_.masked || whole) shape.causal = false;
  shape.placed = laid_.placed && !laid_.masked;
  if (shape.placed && laid_.layout.bounds && options_.position == Position::kRopeLlama) {
    shape.end_position = static_cast<int32_t>(furthest_position());
  }
  return shape;
}

/// Parts see no positions, and their rows are of no one request.
bool Attention::may_share() const {
  return laid_.layout.paged && options_.position == Position::kNone && !options_.row_hooks &&
         !options_.asks_where && options_.split.fixed_size == 0 && !options_.split.disabled &&
         !laid_.placed && options_.shape.context_size <= 1;
}

/// What requests share: as given by levels, or found in their page lists.
void Attention::find_shared() {
  prefixes_.clear();
  Shape& shape = options_.shape;
  shape.may_share = may_share();
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
  if (laid_.may_be_shared && shape.may_share) prefixes_.find(laid_.layout, shape);
}

void Attention::check_mixed() const {
  if (limits_.mixed()) return;
  throw Error(ErrorCode::kUnsupported, "mixed", "True in " + place_text(backend_->place()),
              "False there, or what kernels for mixed batches do: compute capability 9.0, 16-bit q "
              "and KV, head dims up to 128, at most 8 query heads of a KV head, no soft-cap, "
              "encodings, masks or variants, neither fixed_split_size nor disable_split_kv");
}

/// Of the two heights the one of which the largest batch of a capacity pads fewer rows.
int Attention::mixed_rows() const {
  if (options_.tile_rows > 0) return options_.tile_rows;
  const int64_t group = options_.shape.num_qo_heads / options_.shape.num_kv_heads;
  const int64_t rows = max_of<int64_t>(options_.capacity.max_q_tokens * group, 1);
  const auto padded = [&](int64_t tile) { return round_up<int64_t>(rows, tile); };
  return padded(kMixedRows[1]) < padded(kMixedRows[0]) ? kMixedRows[1] : kMixedRows[0];
}

/// Requests of few rows beside others, or parts of many rows; and nothing that forbids kernels for
/// them.
bool Attention::is_mixed(const Batch& batch, bool shares) const {
  if (batch.per_head || !batch.lengths || options_.split.disabled || options_.num_workers > 0) {
    return false;
  }
  const int32_t group = options_.shape.num_qo_heads / options_.shape.num_kv_heads;
  const int64_t few = narrow_rows(group);
  bool narrow = false, wide = shares;
  for (const Request& r : laid_.layout.requests) {
    if (r.q_len == 0 || r.kv_len == 0) continue;
    (r.q_len * int64_t{group} <= few ? narrow : wide) = true;
    if (narrow && wide) return true;
  }
  return false;
}

void Attention::choose_kernel(const Shape& shape) {
  const Batch batch = this->batch();
  limits_ = limits_for(batch);
  if (options_.mixed) check_mixed();
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
    const int64_t again = shares && laid_.given.empty() ? sharer_.again() : 0;
    return Sharer::price(laid_.layout, shape, limits, sharing, again);
  };
  int64_t price = choose(limits_, sharing_);
  if (laid_.given.empty() && !sharing_.empty()) {
    const int64_t apart = Sharer::price(laid_.layout, shape, limits_, {}, sharer_.again());
    if (apart <= price) {
      sharing_.clear();
      price = apart;
    }
  }
  // Under a capacity the kernel must not change from plan to plan: captured runs hold it.
  if (fixed) return;
  Batch taken = batch;
  const auto try_kernel = [&](const Batch& other) {
    const Workers limits = limits_for(other);
    const bool wants_mixed = other.mixed_rows > 0;
    if (limits.apart && shares) return;
    const bool same = limits.wide.tile_rows == limits_.wide.tile_rows;
    if (limits.mixed() != wants_mixed || (same && !wants_mixed)) return;
    const int64_t other_price = choose(limits, trial_);
    const bool asked = wants_mixed && options_.tile_rows > 0;
    if (!asked && (other_price >= price || (trial_.empty() && !wants_mixed))) return;
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
    if (mixed && (options_.tile_rows == 0 || options_.tile_rows == rows)) try_kernel(other);
  }
  limits_for(taken);  // the backend's kernel is the last it was asked for
}

Batch Attention::batch() const {
  // 16-bit K and V have queries of their own type.
  const std::optional<DType>& kv = options_.kv_dtype;
  const bool types_given = kv && (dtype_size(*kv) > 1 || options_.q_dtype);
  Batch batch{
      .requests = static_cast<int64_t>(laid_.layout.requests.size()),
      .q_tokens = laid_.layout.num_q_tokens,
      .per_head = !laid_.layout.kv_heads.empty(),
      .decode = laid_.layout.decode,
      .masked = laid_.masked,
      .places = options_.shape.context_size > 1 && options_.position != Position::kNone,
      .page_run =
          laid_.layout.paged ? page_run(laid_.layout.page_size, laid_.layout.num_kv_tokens) : 0,
      .q = q_dtype_,
      .kv = kv_dtype_,
      .v = v_dtype_,
      .scaled = kv_scaled_,
      .kv_slots = laid_.layout.paged
                      ? static_cast<int64_t>(laid_.layout.pages().size()) * laid_.layout.page_size
                      : laid_.layout.num_kv_rows,
      .tile_rows = options_.tile_rows,
      .guessed = !types_seen_ && !types_given};
  // Fixed splits promise that a request's bits do not depend on its batch: nor may the kernel.
  if (options_.split.fixed_size <= 0) batch.lengths = &laid_.layout.requests;
  if (options_.capacity.fixed()) {
    // The kernel must not change from plan to plan: captured runs hold it.
    batch.requests = options_.capacity.max_requests;
    batch.q_tokens = options_.capacity.max_q_tokens;
    batch.lengths = nullptr;
    const bool splits = options_.split.fixed_size <= 0 && !options_.split.disabled;
    if (options_.mixed && splits) batch.mixed_rows = mixed_rows();
  }
  return batch;
}

Workers Attention::limits_for(const Batch& batch) {
  Workers limits = backend_->limits(batch);
  if (options_.num_workers > 0) limits.wide.num_workers = options_.num_workers;
  // Captured runs hold their launch: it cannot become one of clusters, nor of others.
  if (options_.capacity.fixed()) limits.wide.cluster_blocks = {};
  asked_ = batch;
  return limits;
}

/// @param rows  of the kernel's items, as many as are whole query tokens
bool Attention::has_tile_rows(int32_t rows) const {
  const int32_t group = options_.shape.num_qo_heads / options_.shape.num_kv_heads;
  const int32_t asked = options_.tile_rows;
  return backend_->place().cuda && rows <= asked && rows > asked - min_of(group, asked);
}

/// Only the first run says of what type queries are, and whether float8 has scales of every token.
/// Where there are no such tiles by what was guessed it makes the plan again.
void Attention::check_tile_rows() {
  tile_rows_open_ = false;
  if (options_.tile_rows == 0 || has_tile_rows(limits_.wide.tile_rows)) return;
  const bool may_scale = (kv_dtype_ == DType::kE4M3 || kv_dtype_ == DType::kE5M2) && !kv_scaled_;
  tile_rows_open_ = backend_->place().cuda && !types_seen_ && (batch().guessed || may_scale);
  if (tile_rows_open_) return;
  throw Error(
      ErrorCode::kUnsupported, "tile_rows",
      std::to_string(options_.tile_rows) + " in " + place_text(backend_->place()),
      "on a GPU the rows of a kernel for these heads and types ('flashbsr info' lists them), "
      "or None");
}

/// Where there are few tiles, another kernel may hold them better: 64 queries of 4 heads are 256
/// rows, two tiles of 128 or one of 192 and one of 64. (Up to 64 rows are one warpgroup's in
/// either; 64 heads over one KV head took 25.0 us by the lower one and 23.7 by the other.) And a
/// kernel for mixed batches is worth its beginning, 3 us, where there is enough to read beside its
/// products. Latents have tiles of 32 rows on mma.sync, and of 16 on Hopper, for batches of few
/// parts.
void Attention::choose_cut(const Shape& shape) {
  constexpr int32_t kUsualRows = 192, kRows = 128;
  constexpr int64_t kRounds = 4;  // of all workers; beyond, waste at the ends of requests is little
  const auto choose = [&](Planner& planner) {
    return planner.choose(laid_.layout, shape, limits_, options_.split, sharing_);
  };
  const Choice first = choose(*planner_);
  const Batch usual = batch();
  const bool open = usual.lengths && !options_.capacity.fixed() && options_.num_workers == 0 &&
                    options_.tile_rows == 0;
  if (!open || first.price <= 0 || !sharing_.empty()) return;
  const bool mixed = limits_.mixed(), apart = limits_.apart;
  const bool few = first.num_items <= kRounds * first.num_workers;
  if (!few && !apart) return;
  Batch low = usual;
  low.tile_rows = kRows;
  Batch best = asked_;
  int64_t price = first.price;
  const auto try_kernel = [&](const Batch& other, bool lower) {
    const int32_t rows = limits_.wide.tile_rows;
    limits_ = limits_for(other);
    if (lower && limits_.wide.tile_rows >= rows) return;
    const int64_t found = choose(*other_planner_).price;
    if (found <= 0 || found >= price) return;
    std::swap(planner_, other_planner_);
    price = found;
    best = other;
  };
  if (mixed) {
    // The average of all rows may suggest a kernel of which requests of many rows take many tiles:
    // 68 decodes and 2 chunks of 46 tokens took 86 us by it, 73 mixed, and 64 in tiles of 192 rows.
    // And where decodes have 16 rows the chunks' tiles hold them not so badly: 4 x 512 queries and
    // 60 decodes (64/4 heads, 4096 tokens) take 468 us in one launch and 518 in two.
    Batch high = usual;
    high.tile_rows = kUsualRows;
    try_kernel(usual, false);
    if (limits_.wide.tile_rows <= kRows) try_kernel(high, false);
  }
  if (apart && few) {
    Batch other = usual;
    other.mixed_rows = kRows;
    try_kernel(other, false);
  }
  if (few && limits_.wide.tile_rows > kRows && first.max_rows > kRows / 2) try_kernel(low, true);
  if (const int32_t fewer = limits_.wide.fewer_rows; few && fewer > 0) {
    low.tile_rows = fewer;
    try_kernel(low, true);
  }
  limits_ = limits_for(best);  // the backend's kernel is the last it was asked for
}

void Attention::schedule(void* stream) {
  scheduled_ = false;
  check_placement();
  const Shape shape = this->shape();
  choose_kernel(shape);
  if (laid_.given.empty()) sharer_.sort_members(laid_.layout, sharing_);
  check_tile_rows();
  choose_cut(shape);
  const std::shared_ptr<PlanMemory> memory = backend_->plan_memory();
  planner_->write(*memory, options_.capacity);
  memory_ = memory;
  hand_over(stream);
}

/// The same batch, for another kernel or place: where its last plan is, the next one may be
/// written.
void Attention::schedule_again(void* stream) {
  laid_.layout.own_pages();
  schedule(stream);
}

/// The plan to the backend, with what a run needs beside it.
void Attention::hand_over(void* stream) {
  HostPlan host;
  host.plan = planner_->view();
  if (laid_.masked) {
    host.mask = laid_.mask.data();
    host.mask_bytes = static_cast<int64_t>(laid_.mask.size());
  }
  if (options_.position == Position::kRopeLlama) {
    const int64_t furthest = furthest_position();
    check_positions(furthest);
    host.rope_positions = furthest + 1;
    host.rope = rope_.tables(options_.rope, options_.head_dim_qk, host.rope_positions);
    const Capacity& c = options_.capacity;
    const int64_t keys = c.max_kv_indices * laid_.layout.page_size;
    host.rope_capacity = max_of(keys * options_.shape.context_size, c.max_q_tokens) + 1;
  }
  if (!slopes_.empty()) host.slopes = slopes_.data();
  if (workspace_bytes_ >= 0) check_workspace(needed_bytes());
  if (laid_.layout.bounds) check_bounds();
  backend_->take_plan(host, borrowed_, stream);
  scheduled_ = true;
  if (lengths_) resolve({.stream = stream});
}

/// What needs to know where queries are, and what knows only that they are the last tokens.
void Attention::check_placement() const {
  const bool encodes = options_.position != Position::kNone || options_.asks_where;
  const Shape& shape = options_.shape;
  if (shape.context_size > 1 && !laid_.placed) {
    const bool causal = shape.causal && !laid_.masked;
    if (causal || encodes || shape.window_left >= 0) {
      throw Error(ErrorCode::kValue, "q_positions", "None",
                  "with context_parallel, causality, windows and encodings the position of each "
                  "request's first query token");
    }
  }
  if (!laid_.placed) return;
  if (!backend_->place().cuda) return;
  if (options_.asks_where) {
    throw Error(ErrorCode::kUnsupported, "q_positions", "an array",
                "on a GPU None with variants that ask for positions or lengths");
  }
}

/// Of queries and keys, in magnitude.
int64_t Attention::furthest_position() const {
  PlanHeader h{};
  options_.shape.write_visibility(h);
  int64_t furthest = 0;
  for (size_t b = 0; b < laid_.layout.requests.size(); ++b) {
    const Request& r = laid_.layout.requests[b];
    const int64_t first = laid_.layout.first_position(b);
    furthest = max_of<int64_t>(furthest, max_of(-first, first + r.q_len));
    // Lengths below the bound put more queries before the first key.
    if (laid_.layout.bounds && !laid_.placed) furthest = max_of<int64_t>(furthest, r.q_len);
    if (r.kv_len > 0) furthest = max_of<int64_t>(furthest, key_position(h, r.kv_len - 1) + 1);
  }
  return furthest;
}

/// What lengths that come later would break.
void Attention::check_bounds() const {
  if (options_.split.fixed_size > 0 && options_.shape.window_left >= 0) {
    throw Error(ErrorCode::kUnsupported, "fixed_split_size", "a number",
                "None with Bounds and a window, whose begin is not known");
  }
}

/// Positions are below `furthest` in magnitude, or the one that no key has.
void Attention::check_positions(int64_t furthest) const {
  const int64_t most = options_.rope.max_positions;
  if (most < 0 || furthest <= most) return;
  throw Error(ErrorCode::kIndexRange, "rope_cos_sin_cache",
              std::to_string(most) + " positions for a request of " + std::to_string(furthest),
              "a row for every position; or rope_frequencies, which have no end");
}

}  // namespace flashbsr::api
