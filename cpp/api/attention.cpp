// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "attention.h"

#include <flashbsr/cpu/bits.h>
#include <flashbsr/variant/alibi.h>

#include "../cpu/dispatch.h"

namespace flashbsr::api {

namespace {

const IndexView* optional_indices(const Array* a, IndexView& storage) {
  if (!a) return nullptr;
  storage = indices(*a);
  return &storage;
}

int threads_of(const AttentionOptions& o) {
  return o.num_threads > 0 ? o.num_threads : cpu::available_cores();
}

/// As many queues as twice the cores, and never fewer than 32: the thread count is left out, so
/// that results do not depend on it.
int32_t workers_of(const AttentionOptions& o) {
  if (o.num_workers > 0) return o.num_workers;
  return max_of(32, 2 * cpu::available_cores());
}

void check_bytes(const char* name, int64_t actual, int64_t expected, const char* what) {
  if (actual == expected) return;
  throw Error(ErrorCode::kShape, name, std::to_string(actual) + " elements",
              std::to_string(expected) + " (" + what + ")");
}

const float* head_vector(const std::optional<Array>& a, int64_t heads) {
  if (!a) return nullptr;
  check_element(*a, {Element::kF32});
  check_shape(*a, {heads});
  check_contiguous(*a);
  return static_cast<const float*>(a->data);
}

const Array& one_mask(const MaskArrays& mask) {
  if (mask.boolean && mask.packed) {
    throw Error(ErrorCode::kValue, mask.packed->name, "both masks",
                "a boolean mask or a packed one");
  }
  return mask.boolean ? *mask.boolean : *mask.packed;
}

void check_plan_rows(const Array& a, int64_t actual, int64_t expected, const char* what) {
  if (actual == expected) return;
  throw Error(ErrorCode::kPlan, a.name, std::to_string(actual) + " " + what,
              std::to_string(expected) + ", as planned");
}

}  // namespace

Attention::Attention(const AttentionOptions& options)
    : options_(options), engine_(cpu::chosen_table(), threads_of(options)) {
  limits_.num_workers = workers_of(options);
}

void Attention::plan(const Array* qo_indptr, const Array& kv_indptr, const Array* kv_indices,
                     const Array* last_page_len, const Array* kv_lens, const MaskArrays& mask) {
  const std::lock_guard<std::mutex> hold(running_);
  planned_ = false;
  IndexView qo, pages, last, lens;
  const IndexView* qo_view = optional_indices(qo_indptr, qo);
  if (!options_.cache.paged) {
    const Array* extra = kv_indices ? kv_indices : last_page_len ? last_page_len : kv_lens;
    if (extra) {
      throw Error(ErrorCode::kValue, extra->name, "an array",
                  "None: KV is ragged (TaskInfo.page_size=None)");
    }
    ragged_layout(layout_, qo_view, indices(kv_indptr));
  } else {
    if (!kv_indices) {
      throw Error(ErrorCode::kValue, "kv_indices", "None", "the page ids of a paged KV cache");
    }
    paged_layout(layout_, qo_view, indices(kv_indptr), *optional_indices(kv_indices, pages),
                 optional_indices(last_page_len, last), optional_indices(kv_lens, lens),
                 options_.cache.page_size);
  }
  if (mask.given()) take_mask(mask);
  finish_plan(mask.given());
}

void Attention::plan_block_table(const Array* qo_indptr, const Array& block_tables,
                                 const Array& kv_lens, const MaskArrays& mask) {
  const std::lock_guard<std::mutex> hold(running_);
  planned_ = false;
  IndexView qo;
  check_element(block_tables, {Element::kI32, Element::kI64});
  check_rank(block_tables, 2, "[batch_size, max_pages]");
  check_contiguous(block_tables);
  Array flat = block_tables;
  flat.ndim = 1;
  flat.shape[0] = block_tables.size();
  flat.stride[0] = 1;
  if (kv_lens.size() != block_tables.shape[0]) {
    bad_shape(kv_lens,
              "shape (" + std::to_string(block_tables.shape[0]) + ",), one per block table");
  }
  block_table_layout(layout_, optional_indices(qo_indptr, qo), indices(flat), block_tables.shape[1],
                     indices(kv_lens), options_.cache.page_size);
  if (mask.given()) take_mask(mask);
  finish_plan(mask.given());
}

void Attention::plan_bsr(const Array& indptr, const Array& indices_, int64_t m, int64_t n,
                         int64_t r, int64_t c, const MaskArrays& mask) {
  const std::lock_guard<std::mutex> hold(running_);
  planned_ = false;
  bsr_layout(layout_, indices(indptr), indices(indices_), m, n, r, c);
  if (mask.given()) take_block_mask(mask, r);
  finish_plan(mask.given());
}

void Attention::finish_plan(bool masked) {
  Shape shape = options_.shape;
  shape.custom_mask = masked;
  // A mask says all there is to say: it replaces causality, as in FlashInfer.
  if (masked) shape.causal = false;
  planner_.plan(layout_, shape, limits_, options_.split, options_.capacity);
  const PlanHeader& h = PlanView{planner_.buffer().data()}.header();
  if (options_.position == Position::kRopeLlama) {
    int64_t furthest = h.max_kv_len;
    for (const Request& r : layout_.requests) {
      furthest = max_of<int64_t>(furthest, static_cast<int64_t>(r.q_len) - r.kv_len);
    }
    rope_tables_ = rope_.tables(options_.rope, options_.head_dim_qk, furthest + 1);
  }
  if (workspace_ && workspace_size() > workspace_bytes_) {
    throw Error(ErrorCode::kCapacity, "workspace", std::to_string(workspace_bytes_) + " bytes",
                "at least " + std::to_string(workspace_size()) + " bytes (workspace_size())");
  }
  if (!workspace_) owned_.fit(workspace_size());
  planned_ = true;
}

void Attention::take_mask(const MaskArrays& mask) {
  const Array& a = one_mask(mask);
  check_contiguous(a);
  const uint8_t* in = static_cast<const uint8_t*>(a.data);
  place_masks(layout_);
  mask_.assign(static_cast<size_t>(layout_.mask_bytes), 0);
  if (mask.packed) {
    check_element(a, {Element::kU8});
    check_bytes(a.name, a.size(), layout_.mask_bytes,
                "bytes: sum of ceil(q_len * kv_len / 8) over the requests");
    std::copy(in, in + a.size(), mask_.begin());
    return;
  }
  check_element(a, {Element::kBool, Element::kU8});
  check_bytes(a.name, a.size(), layout_.mask_bits, "sum of q_len * kv_len over the requests");
  for (const Request& r : layout_.requests) {
    const int64_t bits = static_cast<int64_t>(r.q_len) * r.kv_len;
    cpu::pack_bits(in, bits, mask_.data() + r.mask_offset(), true);
    in += bits;
  }
}

/// Block masks come block after block, [blocks, r, c]. In the layout a block row is one request
/// whose columns are its blocks side by side.
void Attention::take_block_mask(const MaskArrays& mask, int64_t r) {
  const Array& a = one_mask(mask);
  check_contiguous(a);
  const int64_t c = layout_.page_size;
  const int64_t blocks = static_cast<int64_t>(layout_.kv_indices.size());
  if (mask.packed) {
    check_element(a, {Element::kU8});
    check_bytes(a.name, a.size(), ceil_div<int64_t>(blocks * r * c, 8), "ceil(blocks * R * C / 8)");
  } else {
    check_element(a, {Element::kBool, Element::kU8});
    check_shape(a, {blocks, r, c});
  }
  const uint8_t* in = static_cast<const uint8_t*>(a.data);
  const auto kept = [&](int64_t i) { return mask.packed ? in[i / 8] >> (i % 8) & 1 : in[i] != 0; };
  place_masks(layout_);
  mask_.assign(static_cast<size_t>(layout_.mask_bytes), 0);
  for (const Request& request : layout_.requests) {
    uint8_t* out = mask_.data() + request.mask_offset();
    for (int64_t row = 0; row < request.q_len; ++row) {
      for (int64_t column = 0; column < request.kv_len; ++column) {
        const int64_t block = request.kv_begin + column / c;
        const int64_t bit = row * request.kv_len + column;
        if (kept((block * r + row) * c + column % c)) {
          out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1 << (bit % 8));
        }
      }
    }
  }
}

int64_t Attention::workspace_size() const {
  int64_t slots;
  if (options_.capacity.fixed()) {
    slots = sizes_for(options_.capacity, options_.shape, limits_, options_.split,
                      options_.cache.page_size)
                .slots;
  } else if (planner_.buffer().empty()) {
    throw Error(ErrorCode::kPlan, "workspace_size", "no plan and no capacity",
                "plan() first, or a TaskInfo with max_batch_size");
  } else {
    slots = PlanView{planner_.buffer().data()}.header().max_slots;
  }
  return cpu::partial_bytes(slots, limits_.tile_rows, options_.head_dim_vo);
}

void Attention::set_workspace(const Array* workspace) {
  const std::lock_guard<std::mutex> hold(running_);
  workspace_ = nullptr;
  workspace_bytes_ = 0;
  if (!workspace) return;
  check_element(*workspace, {Element::kU8});
  check_rank(*workspace, 1, "(bytes)");
  check_contiguous(*workspace);
  const auto address = reinterpret_cast<uintptr_t>(workspace->data);
  if (address % alignof(float) != 0) {
    throw Error(ErrorCode::kValue, workspace->name, "memory not aligned to 4 bytes",
                "an aligned array");
  }
  workspace_ = static_cast<char*>(workspace->data);
  workspace_bytes_ = workspace->shape[0];
  if (options_.capacity.fixed() && workspace_size() > workspace_bytes_) {
    throw Error(ErrorCode::kCapacity, workspace->name, std::to_string(workspace_bytes_) + " bytes",
                "at least " + std::to_string(workspace_size()) + " bytes");
  }
}

void Attention::place_partials(Params& params) {
  const PlanHeader& h = PlanView{planner_.buffer().data()}.header();
  char* memory = workspace_ ? workspace_ : owned_.fit(workspace_size());
  params.partial_out = reinterpret_cast<float*>(memory);
  params.partial_lse =
      params.partial_out + static_cast<int64_t>(h.max_slots) * h.tile_rows * options_.head_dim_vo;
}

Params Attention::params_for(const RunArrays& a) {
  const AttentionOptions& o = options_;
  const PlanHeader& h = PlanView{planner_.buffer().data()}.header();
  const int64_t qo_heads = o.shape.num_qo_heads, kv_heads = o.shape.num_kv_heads;
  Params p;
  p.q = ragged_view(a.q);
  check_shape(a.q, {-1, qo_heads, o.head_dim_qk});
  check_plan_rows(a.q, p.q.tokens, h.num_q_tokens, "query rows");

  const CacheViews kv = cache_views(a.k, a.v ? &*a.v : nullptr, o.cache);
  p.k = kv.k;
  p.v = kv.v;
  const Array& v_array = a.v ? *a.v : a.k;
  const auto check_cache = [&](const PagedView& view, const Array& array, int32_t dim) {
    if (view.heads != kv_heads || view.dim != dim) {
      bad_shape(array, std::to_string(kv_heads) + " KV heads of dim " + std::to_string(dim));
    }
    // Every id was checked against 0 in plan(); the highest decides here.
    if (h.num_kv_rows > view.pages) {
      throw Error(ErrorCode::kIndexRange, array.name,
                  std::to_string(view.pages) + (o.cache.paged ? " pages" : " token rows"),
                  "at least " + std::to_string(h.num_kv_rows) + ", which the plan refers to");
    }
  };
  check_cache(p.k, a.k, o.head_dim_qk);
  check_cache(p.v, v_array, o.head_dim_vo);
  if (p.k.dtype != p.q.dtype && p.k.dtype != DType::kE4M3 && p.k.dtype != DType::kE5M2) {
    throw Error(ErrorCode::kDType, a.k.name, dtype_name(p.k.dtype),
                std::string(dtype_name(p.q.dtype)) + " as q, float8_e4m3fn or float8_e5m2");
  }
  if (p.k.dtype != p.v.dtype) {
    throw Error(ErrorCode::kDType, v_array.name, dtype_name(p.v.dtype),
                std::string(dtype_name(p.k.dtype)) + ", the type of k");
  }

  p.out = ragged_view(a.out);
  check_shape(a.out, {p.q.tokens, qo_heads, o.head_dim_vo});
  check_no_overlap(a.out);
  if (a.lse) {
    if (o.activation == Activation::kSigmoid) {
      throw Error(ErrorCode::kUnsupported, "return_lse", "True with activation='sigmoid'",
                  "False: sigmoid attention has no normaliser");
    }
    check_element(*a.lse, {Element::kF32});
    check_shape(*a.lse, {p.q.tokens, qo_heads});
    check_no_overlap(*a.lse);
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_token = a.lse->stride[0];
    p.lse_stride_head = a.lse->stride[1];
  }
  if (a.sinks && o.activation == Activation::kSigmoid) {
    throw Error(ErrorCode::kUnsupported, "sinks", "an array with activation='sigmoid'",
                "None: sinks join a softmax denominator");
  }
  p.sm_scale = o.sm_scale * a.q_scale.number * a.k_scale.number;
  p.out_scale = a.v_scale.number;
  p.q_head_scale = head_vector(a.q_scale.per_head, qo_heads);
  p.k_head_scale = head_vector(a.k_scale.per_head, kv_heads);
  p.v_head_scale = head_vector(a.v_scale.per_head, kv_heads);
  p.soft_cap = o.soft_cap;
  p.sinks = head_vector(a.sinks, qo_heads);
  if (o.position == Position::kAlibi) {
    p.alibi_slopes = head_vector(a.alibi_slopes, qo_heads);
    if (!p.alibi_slopes) {
      if (slopes_.empty()) {
        for (int32_t i = 0; i < qo_heads; ++i) {
          slopes_.push_back(standard_alibi_slope(i, static_cast<int32_t>(qo_heads)));
        }
      }
      p.alibi_slopes = slopes_.data();
    }
  } else if (a.alibi_slopes) {
    throw Error(ErrorCode::kValue, "alibi_slopes", "an array",
                "None unless pos_encoding_mode='ALIBI'");
  }
  if (h.flags & kPlanCustomMask) p.custom_mask = mask_.data();
  p.sigmoid_bias = o.sigmoid_bias;
  p.lse_unit = o.lse_base2 ? 1.0f : kLn2;
  if (o.position == Position::kRopeLlama) p.rope = rope_tables_;
  place_partials(p);
  return p;
}

std::vector<int32_t> Attention::plan_buffer() {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) throw Error(ErrorCode::kPlan, "plan_info", "no plan", "plan() first");
  return planner_.buffer();
}

cpu::RunStats Attention::stats() {
  const std::lock_guard<std::mutex> hold(running_);
  return engine_.stats();
}

void Attention::run(const RunArrays& arrays) {
  const std::lock_guard<std::mutex> hold(running_);
  if (!planned_) {
    throw Error(ErrorCode::kPlan, "run", "no plan",
                "plan() first; a plan() that raised leaves none");
  }
  const Params params = params_for(arrays);
  engine_.run(PlanView{planner_.buffer().data()}, params, options_.activation);
}

}  // namespace flashbsr::api
