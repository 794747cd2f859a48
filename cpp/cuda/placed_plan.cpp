// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "placed_plan.h"

#include <cstring>

#include <flashbsr/core/error.h>

#include "ops.h"

namespace flashbsr::cuda {

namespace {

using api::HostPlan;

constexpr int64_t kAlign = 256;  // of sections in device memory
/// Bits are read as words of 32, and a tile's worth of them behind the last.
constexpr int64_t kMaskSlack = 64;
/// Most bytes of lengths and page ids that a GPU reads from the host's memory.
constexpr int64_t kReadInPlace = 64 << 10;

/// Of a plan, up to the last section in use.
int64_t used_bytes(const PlanHeader& h) {
  // Page ids of a plan of bounds are the device's to write.
  int64_t words = h.off_kv_indices;
  if (!h.off_bounds) words += h.num_kv_indices;
  // Last, because most plans have none.
  if (h.num_shared > 0) words = h.off_merge_parts + 4 * static_cast<int64_t>(h.num_merge_parts);
  return 4 * words;
}

}  // namespace

PlacedPlan::PlacedPlan(const api::AttentionOptions& options, int device)
    : device_(device),
      head_dim_qk_(options.head_dim_qk),
      head_dim_vo_(options.head_dim_vo),
      num_qo_heads_(options.shape.num_qo_heads),
      packs_outputs_(options.o_dtype == DType::kE2M1),
      max_q_tokens_(options.capacity.max_q_tokens),
      plan_(device),
      counters_(device),
      partials_(device),
      outputs_(device),
      slopes_(device),
      dense_(device),
      lengths_(device),
      coarse_(device),
      fine_(device) {}

void PlacedPlan::grow(DeviceMemory& memory, int64_t bytes, const char* what, bool held) {
  if (held && memory.data() && bytes > memory.size()) {
    throw Error(ErrorCode::kCapacity, what, std::to_string(bytes) + " bytes",
                "at most " + std::to_string(memory.size()) +
                    ", which a captured run holds; plan the largest batch before the capture");
  }
  memory.fit(bytes);
}

void PlacedPlan::take(const HostPlan& plan, const api::Borrowed& borrowed, const PlanSource& from,
                      CUstream stream, Hold hold) {
  const PlanHeader& h = plan.plan.header();
  const bool held = hold == Hold::kByGraphs;
  const int64_t mask_at =
      round_up<int64_t>(4 * static_cast<int64_t>(h.total_size) + kMaskSlack, kAlign);
  grow(plan_, mask_at + plan.mask_bytes + kMaskSlack, "plan", held);
  const int64_t counters = 4 * num_counters(h);
  const bool fresh = counters > counters_.size();
  grow(counters_, counters, "plan", held);
  if (!borrowed.workspace) {
    const int64_t bytes = partial_bytes(h.max_partial_rows, head_dim_vo_);
    if (bytes) grow(partials_, bytes, "workspace", held);
  }
  if (packs_outputs_) {
    const int64_t tokens = max_of<int64_t>(h.num_q_tokens, max_q_tokens_);
    grow(outputs_, 4 * tokens * num_qo_heads_ * head_dim_vo_, "outputs", held);
  }
  if (plan.mask) take_mask(plan, mask_at, from.staging, stream);
  if (fresh) {
    // Zero before a kernel and after it: once is enough.
    check(api().memset_d32_async(counters_.address(), 0, static_cast<size_t>(counters_.size() / 4),
                                 stream),
          "cuMemsetD32Async");
  }
  take_rope(plan, stream, held);
  take_slopes(plan, stream);
  if (hold == Hold::kAtOnce) {
    from.plans.copy_at_once(plan_.address(), used_bytes(h), stream);
  } else {
    from.plans.copy(plan_.address(), used_bytes(h), stream);
  }
  header_ = h;
  resolved_ = fewer_queries_ = fresh_ = false;
  masked_ = plan.mask != nullptr;
  mask_at_ = mask_at;
  borrowed_ = borrowed;
}

/// With zeros around it.
void PlacedPlan::take_mask(const HostPlan& plan, int64_t mask_at, Staging& staging,
                           CUstream stream) {
  const int64_t bytes = plan.mask_bytes + 2 * kMaskSlack;
  char* const out = staging.next(bytes);
  std::memset(out, 0, kMaskSlack);
  std::memcpy(out + kMaskSlack, plan.mask, static_cast<size_t>(plan.mask_bytes));
  std::memset(out + kMaskSlack + plan.mask_bytes, 0, kMaskSlack);
  staging.copy(plan_.address() + static_cast<CUdeviceptr>(mask_at - kMaskSlack), bytes, stream);
}

void PlacedPlan::resolve(const api::LengthViews& views, Staging& staging, CUstream stream) {
  Lengths now = views.lengths;
  const auto bytes = [](const Indices& x) {
    return round_up<int64_t>(x.size * (x.wide ? 8 : 4), 8);
  };
  int64_t total = 0;
  for (int i = 0; i < views.count; ++i) {
    if (views.views[i].host) total += bytes(now.*views.views[i].field);
  }
  // Few are read where they are: the copy would take the host 3 us and the GPU no less than that.
  const bool copies = total > kReadInPlace;
  if (total > 0) {
    char* to = staging.next(total);
    if (copies) lengths_.fit(total);
    const char* from = copies ? lengths_.data() : to;
    int64_t at = 0;
    for (int i = 0; i < views.count; ++i) {
      Indices& x = now.*views.views[i].field;
      if (!views.views[i].host || x.size == 0) continue;
      std::memcpy(to + at, x.data, static_cast<size_t>(x.size * (x.wide ? 8 : 4)));
      x.data = from + at;
      at += bytes(x);
    }
    if (copies) staging.copy(lengths_.address(), total, stream);
  }
  // As many as any later plan has: a captured launch stays what it is. With those of the plan at
  // its capture, which knew little of what came, it took 26 us of a step of vLLM (H200).
  const int64_t threads = int64_t{header_.max_requests} + header_.max_items + header_.num_workers +
                          header_.max_merges + header_.max_kv_indices;
  launch_op(
      "resolve", {.device = device_, .stream = stream},
      {.blocks = ceil_div<int64_t>(threads, ops::kThreads), .blocks_per_sm = 4, .overlap = true},
      ops::ResolveArgs{.plan = reinterpret_cast<int32_t*>(plan_.data()), .lengths = now});
  if (total > 0 && !copies) staging.read(stream);
  resolved_ = fresh_ = true;
  fewer_queries_ = now.qo_indptr.given();
}

/// Copies the tables, whole where they moved, otherwise the rows that are new. Their source is not
/// pinned, so that it has been read when the copy returns.
void PlacedPlan::take_rope(const HostPlan& plan, CUstream stream, bool held) {
  if (plan.rope_positions == 0) return;
  rope_ = plan.rope;
  const auto rows_for = [](int64_t positions) { return positions / RopeTables::kFine + 1; };
  const int64_t row_bytes = 4 * static_cast<int64_t>(head_dim_qk_);
  const auto copy = [&](CUdeviceptr to, const float* from, int64_t bytes) {
    check(api().memcpy_htod_async(to, from, static_cast<size_t>(bytes), stream),
          "cuMemcpyHtoDAsync of RoPE tables");
  };
  if (!fine_.data()) {
    fine_.fit(RopeTables::kFine * row_bytes);
    copy(fine_.address(), plan.rope.fine, RopeTables::kFine * row_bytes);
  }
  const int64_t rows = rows_for(plan.rope_positions);
  if (rows <= rope_rows_) return;
  if (rows * row_bytes > coarse_.size()) {
    const int64_t room = max_of(2 * rows, rows_for(plan.rope_capacity));
    grow(coarse_, room * row_bytes, "RoPE tables", held);
    rope_rows_ = 0;
  }
  const int64_t old = rope_rows_ * row_bytes;
  copy(coarse_.address() + static_cast<CUdeviceptr>(old), plan.rope.coarse + old / 4,
       rows * row_bytes - old);
  rope_rows_ = rows;
}

void PlacedPlan::take_slopes(const HostPlan& plan, CUstream stream) {
  if (!plan.slopes || slopes_.data()) return;
  const int64_t bytes = 4 * static_cast<int64_t>(num_qo_heads_);
  slopes_.fit(bytes);
  check(api().memcpy_htod_async(slopes_.address(), plan.slopes, static_cast<size_t>(bytes), stream),
        "cuMemcpyHtoDAsync of ALiBi slopes");
}

KernelArgs PlacedPlan::args(Params& params) const {
  const auto floats = [](const DeviceMemory& m) {
    return reinterpret_cast<const float*>(m.data());
  };
  if (masked_) params.custom_mask = reinterpret_cast<const uint8_t*>(plan_.data() + mask_at_);
  if (coarse_.data()) {
    params.rope = {floats(coarse_), floats(fine_), rope_.half, rope_.interleave};
  }
  if (slopes_.data() && !params.alibi_slopes) params.alibi_slopes = floats(slopes_);
  api::place_partials(params, header_, borrowed_.workspace ? borrowed_.workspace : partials_.data(),
                      head_dim_vo_);
  KernelArgs args = kernel_args(params, header_, reinterpret_cast<const int32_t*>(plan_.data()),
                                reinterpret_cast<int32_t*>(counters_.data()));
  if (packs_outputs_) {
    args.params.out = {.data = outputs_.data(),
                       .dtype = DType::kF32,
                       .tokens = header_.num_q_tokens,
                       .heads = num_qo_heads_,
                       .dim = head_dim_vo_,
                       .stride_token = int64_t{num_qo_heads_} * head_dim_vo_,
                       .stride_head = head_dim_vo_};
  }
  return args;
}

void PlacedPlan::finish(const KernelArgs& args, const Params& params, CUstream stream) const {
  const int64_t rows = int64_t{header_.num_q_tokens} * num_qo_heads_;
  if (fewer_queries_) {
    launch_op("clear_rows", {.device = device_, .stream = stream},
              {.blocks = ceil_div<int64_t>(rows, ops::kThreads),
               .overlap = args.overlap != Overlap::kNone},
              ops::ClearRowsArgs{.header = args.header,
                                 .out = args.params.out,
                                 .lse = params.lse,
                                 .lse_stride_token = params.lse_stride_token,
                                 .lse_stride_head = params.lse_stride_head});
  }
  if (packs_outputs_) {
    // Replays of this launch may have as many tokens as the capacity.
    const int64_t most = max_of(rows, max_q_tokens_ * num_qo_heads_) * params.out_scales.dim;
    launch_op("quantize_outputs", {.device = device_, .stream = stream},
              {.blocks = ceil_div<int64_t>(most, ops::kThreads), .blocks_per_sm = 8},
              ops::QuantizeOutputsArgs{.header = args.header,
                                       .in = args.params.out,
                                       .codes = params.out,
                                       .scales = params.out_scales});
  }
}

}  // namespace flashbsr::cuda
