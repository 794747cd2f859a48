// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include <flashbsr/core/latent_row.h>
#include <flashbsr/core/math.h>
#include <flashbsr/core/quantize.h>

#include "overlap.h"

namespace flashbsr::api {

namespace {

/// The arrays of one run; every one must be where the first is.
class Checker {
 public:
  Checker(const AttentionOptions& options, const PlanHeader& plan, Place place)
      : o_(options),
        h_(plan),
        cache_{(plan.flags & kPlanPaged) != 0, plan.page_size, options.hnd, options.kv_dtype,
               options.v_dtype},
        place_(place) {}

  const float* head_vector(const Array* a, int64_t heads) const {
    if (!a) return nullptr;
    check_element(*a, {Element::kF32});
    check_shape(*a, {heads});
    check_contiguous(*a);
    here(*a);
    return static_cast<const float*>(a->data);
  }

  void here(const Array& a) const {
    check_place(a, place_, "every array of a run is where it is computed");
  }

  /// A GPU moves rows in pieces of so many bytes.
  void aligned_rows(const Array& a, int64_t to = 16) const {
    if (!place_.cuda || a.size() == 0) return;
    const int64_t bytes = element_bytes(a.element);
    const auto refuse = [&](const std::string& actual) {
      throw Error(ErrorCode::kShape, a.name, actual,
                  std::to_string(to) + "-byte aligned rows (base address and strides)");
    };
    const auto past = reinterpret_cast<intptr_t>(a.data) % to;
    if (past != 0)
      refuse("an address " + std::to_string(past) + " bytes past " + std::to_string(to));
    for (int i = 0; i + 1 < a.ndim; ++i) {
      if (a.shape[i] > 1 && a.stride[i] * bytes % to != 0) {
        refuse("a stride of " + std::to_string(a.stride[i] * bytes) + " bytes in dimension " +
               std::to_string(i));
      }
    }
  }

  void queries(const Array& q, bool spare_rows, Params& p) const {
    check_element(q, {Element::kF32, Element::kF16, Element::kBF16, Element::kE4M3});
    p.q = ragged_view(q, true);
    if (o_.q_dtype && p.q.dtype != *o_.q_dtype) {
      throw Error(ErrorCode::kDType, q.name, dtype_name(p.q.dtype),
                  std::string(dtype_name(*o_.q_dtype)) + ", the task's q_dtype");
    }
    check_shape(q, {-1, o_.shape.num_qo_heads, o_.head_dim_qk});
    here(q);
    aligned_rows(q);
    if (p.q.tokens == h_.num_q_tokens || (spare_rows && p.q.tokens > h_.num_q_tokens)) return;
    throw Error(ErrorCode::kPlan, q.name, std::to_string(p.q.tokens) + " query rows",
                std::to_string(h_.num_q_tokens) + (spare_rows ? " or more" : "") + ", as planned");
  }

  void cache(const RunArrays& a, Params& p) const {
    if (o_.latent) {
      if (const Array* given = a.k_scale.per_token ? a.k_scale.per_token : a.v_scale.per_token) {
        throw Error(ErrorCode::kUnsupported, given->name, "scales of every token with latent=True",
                    "a number");
      }
      latent_cache(a, p);
    } else {
      const CacheViews kv = cache_views(a.k, a.v, cache_);
      p.k = kv.k;
      p.v = kv.v;
      half(p.k, a.k, o_.head_dim_qk);
      half(p.v, a.v ? *a.v : a.k, o_.head_dim_vo);
    }
    const Array& v = a.v ? *a.v : a.k;
    said(o_.kv_dtype, p.k, "kv");
    said(o_.v_dtype, p.v, v.name);
    if (!o_.latent) {
      scales(a.k_scale.per_token, a.k, !a.v, p.k, p.k_scales);
      scales(a.v_scale.per_token, v, !a.v, p.v, p.v_scales);
    }
    if (p.q.dtype == DType::kE4M3 && p.k.dtype != DType::kE4M3) {
      throw Error(ErrorCode::kDType, a.k.name, dtype_name(p.k.dtype),
                  "float8_e4m3fn as q; other codes go with q in float16 or bfloat16");
    }
    if (p.k.dtype != p.q.dtype && dtype_size(p.k.dtype) > 1) {
      throw Error(
          ErrorCode::kDType, a.k.name, dtype_name(p.k.dtype),
          std::string(dtype_name(p.q.dtype)) + " as q, float8_e4m3fn, float8_e5m2, int8 or int4");
    }
    device_codes(a, p);
    const bool codes = is_code(p.k, p.k_scales) && is_code(p.v, p.v_scales);
    if (p.k.dtype != p.v.dtype && !codes) {
      throw Error(ErrorCode::kDType, v.name, dtype_name(p.v.dtype),
                  std::string(dtype_name(p.k.dtype)) + ", the type of k");
    }
  }

  /// Its scales say that a float8 is a code.
  static bool is_code(const PagedView& x, const PagedView& scales) {
    return scales.data || x.dtype == DType::kI8;
  }

  static void said(const std::optional<DType>& type, const PagedView& x, const char* name) {
    if (!type || x.dtype == *type) return;
    throw Error(ErrorCode::kDType, name, dtype_name(x.dtype),
                std::string(dtype_name(*type)) + ", the task's kv_dtype");
  }

  /// Of every token and head of K or V.
  void scales(const Array* given, const Array& cache, bool stacked, const PagedView& x,
              PagedView& view) const {
    if (!given) {
      if (!is_packed(x.dtype)) return;
      throw Error(ErrorCode::kValue, cache.name,
                  std::string(dtype_name(x.dtype)) + " without scales",
                  "k_scale and v_scale with a scale of every token, head and group");
    }
    if (is_packed(x.dtype) && x.dim % 16 != 0) {
      throw Error(ErrorCode::kUnsupported, cache.name,
                  "head dim " + std::to_string(x.dim) + " of " + dtype_name(x.dtype),
                  "a multiple of 16");
    }
    view = scale_view(*given, x, cache.ndim - stacked, cache_);
    // Of arrays without elements some have no address, and scales without one are none.
    static char nothing[16];
    if (!view.data) view.data = nothing;
    here(*given);
  }

  /// Codes that kernels of a GPU read: with scales of every token; packed ones in rows that kernels
  /// need not pad, since padding has no scale.
  void device_codes(const RunArrays& a, const Params& p) const {
    const bool some = p.k_scales.data || p.v_scales.data || p.k.dtype == DType::kI8;
    if (!place_.cuda || !some) return;
    const auto served = [](const PagedView& x, const PagedView& scales) {
      const bool one =
          dtype_size(x.dtype) == 1 && (!is_packed(x.dtype) || x.dim == 64 || x.dim == 128);
      return one && scales.data;
    };
    const bool some_packed = is_packed(p.k.dtype) || is_packed(p.v.dtype);
    const bool same = p.k.dim == p.v.dim || (p.k.dtype == p.v.dtype && !some_packed);
    const bool half = p.q.dtype == DType::kBF16 || p.q.dtype == DType::kF16;
    if (!same || !half || !served(p.k, p.k_scales) || !served(p.v, p.v_scales)) {
      throw Error(
          ErrorCode::kUnsupported, a.k.name,
          std::string(dtype_name(p.k.dtype)) + " and " + dtype_name(p.v.dtype) +
              " codes for q in " + dtype_name(p.q.dtype) + " on " + place_text(place_),
          "K and V there in int8, float8, int4 or nvfp4 (packed, or of two types: of one head "
          "dim, packed 64 or 128), both with scales of every token and head, and q in "
          "float16 or bfloat16; backend='cpu' has all");
    }
    word_scales("k_scale", p.k_scales);
    word_scales("v_scale", p.v_scales);
  }

  /// Scales of a byte are copied in words.
  static void word_scales(const char* name, const PagedView& x) {
    if (x.dtype != DType::kE4M3) return;
    const auto odd = [](int64_t stride, int64_t count) { return count > 1 && stride % 4 != 0; };
    if (reinterpret_cast<uintptr_t>(x.data) % 4 == 0 && !odd(x.stride_page, x.pages) &&
        !odd(x.stride_token, x.page_size) && !odd(x.stride_head, x.heads)) {
      return;
    }
    throw Error(ErrorCode::kUnsupported, name, "rows of scales that are not aligned to 4 bytes",
                "base address and strides that are multiples of 4; backend='cpu' takes any");
  }

  /// V is the latent, the first dims of K; what K has behind it is in the same array or in another.
  void latent_cache(const RunArrays& a, Params& p) const {
    const int32_t tail = o_.head_dim_qk - o_.head_dim_vo;
    const Array k = with_head(a.k, cache_);
    const bool packed =
        !a.v && k.shape[k.ndim - 1] == PackedLatent::kBytes && element_bytes(k.element) == 1;
    if (packed || o_.packed_latents) return packed_cache(k, packed, p);
    p.k = api::detail::one_view(k, cache_, float_dtype(k, true));
    half(p.k, k, a.v ? o_.head_dim_vo : o_.head_dim_qk);
    p.v = p.k;
    p.v.dim = o_.head_dim_vo;
    PagedView rest = p.k;
    rest.data = static_cast<char*>(p.k.data) + o_.head_dim_vo * dtype_size(p.k.dtype);
    rest.dim = tail;
    const PagedView behind = rest;
    if (a.v) {
      const Array v = with_head(*a.v, cache_);
      rest = api::detail::one_view(v, cache_, float_dtype(v, true));
      half(rest, v, tail);
      if (rest.dtype != p.k.dtype) {
        throw Error(ErrorCode::kDType, v.name, dtype_name(rest.dtype),
                    std::string(dtype_name(p.k.dtype)) + ", the type of the latent");
      }
    }
    // A GPU copies tails by themselves; the CPU reads whole rows where they are.
    const bool whole = rest.data == behind.data && rest.stride_page == behind.stride_page &&
                       rest.stride_token == behind.stride_token;
    if (place_.cuda || !whole) {
      p.k.dim = o_.head_dim_vo;
      p.k_tail = rest;
      p.v.pages = min_of(p.k.pages, rest.pages);
    } else {
      p.k.dim = o_.head_dim_qk;
    }
  }

  /// Rows of 656 bytes: codes, their scales, and rotated keys in bf16.
  void packed_cache(const Array& k, bool packed, Params& p) const {
    using Row = PackedLatent;
    if (!packed) {
      bad_shape(k,
                "one array of uint8 with 656 bytes of each token: the task's kv_dtype is "
                "'fp8_ds_mla'");
    }
    if (o_.head_dim_vo != Row::kDim || o_.head_dim_qk != Row::kDim + Row::kTailDim) {
      bad_shape(k, "head dims 576 and 512 with rows of 656 bytes");
    }
    p.k = api::detail::one_view(k, cache_, DType::kE4M3);
    half(p.k, k, Row::kBytes);
    const auto odd = [](int64_t stride, int64_t count) { return count > 1 && stride % 2 != 0; };
    if (odd(p.k.stride_page, p.k.pages) || odd(p.k.stride_token, p.k.page_size)) {
      throw Error(ErrorCode::kUnsupported, k.name, "an odd number of bytes between rows",
                  "strides that are even");
    }
    p.k.dim = Row::kDim;
    p.v = p.k;
    p.k_tail = p.k;
    p.k_tail.data = static_cast<char*>(p.k.data) + Row::kTailOffset;
    p.k_tail.dtype = DType::kBF16;
    p.k_tail.dim = Row::kTailDim;
    p.k_tail.stride_page /= 2;
    p.k_tail.stride_token /= 2;
    p.k_tail.stride_head /= 2;
  }

  void outputs(const RunArrays& a, Params& p) const {
    if (o_.o_dtype == DType::kE2M1) {
      packed_output(a, p);
    } else {
      output(a, p);
    }
    if (a.lse) lse(a, p);
  }

  void output(const RunArrays& a, Params& p) const {
    if (a.out_scales) {
      throw Error(ErrorCode::kDType, a.out.name, "a tuple", "an array: o_dtype is not 'nvfp4'");
    }
    check_element(a.out, {Element::kF32, Element::kF16, Element::kBF16, Element::kE4M3});
    p.out = ragged_view(a.out, true);
    const bool free = p.q.dtype == DType::kE4M3 || p.out.dtype == DType::kE4M3;
    const DType wanted = o_.o_dtype.value_or(free ? p.out.dtype : p.q.dtype);
    if (p.out.dtype != wanted) {
      throw Error(ErrorCode::kDType, a.out.name, dtype_name(p.out.dtype),
                  std::string(dtype_name(wanted)) + " (o_dtype; by default that of q)");
    }
    check_shape(a.out, {p.q.tokens, o_.shape.num_qo_heads, o_.head_dim_vo});
    check_no_overlap(a.out);
    check_apart(a.out, a, true);
    here(a.out);
    aligned_rows(a.out);
  }

  /// NVFP4: two codes in a byte, and scales of 16 of them.
  void packed_output(const RunArrays& a, Params& p) const {
    if (!a.out_scales) {
      throw Error(ErrorCode::kDType, a.out.name, "an array", "(codes, scales): o_dtype is 'nvfp4'");
    }
    const int64_t tokens = p.q.tokens, heads = o_.shape.num_qo_heads, dim = o_.head_dim_vo;
    const auto view = [&](const Array& x, Element element, DType type, int64_t row) {
      check_element(x, {element});
      check_shape(x, {tokens, heads, row});
      check_rows(x);
      check_no_overlap(x);
      check_apart(x, a, false);
      here(x);
      return RaggedView{
          x.data,      type,       tokens, static_cast<int32_t>(heads), static_cast<int32_t>(dim),
          x.stride[0], x.stride[1]};
    };
    p.out = view(a.out, Element::kU8, DType::kE2M1, dim / 2);
    p.out_scales = view(*a.out_scales, Element::kE4M3, DType::kE4M3, dim / kNvfp4Group);
    p.out_scales.dim /= kNvfp4Group;
    if (overlaps(a.out, *a.out_scales)) shares(*a.out_scales, a.out, "memory of its own");
    aligned_rows(a.out, kNvfp4Group / 2);
  }

  void lse(const RunArrays& a, Params& p) const {
    if (o_.activation == Activation::kSigmoid) {
      throw Error(ErrorCode::kUnsupported, "return_lse", "True without a softmax",
                  "False: sigmoid attention, and a variant with use_softmax = false, have no "
                  "normaliser");
    }
    check_element(*a.lse, {Element::kF32});
    check_shape(*a.lse, {p.q.tokens, o_.shape.num_qo_heads});
    check_no_overlap(*a.lse);
    check_apart(*a.lse, a, false);
    for (const Array* out : {&a.out, a.out_scales}) {
      if (out && overlaps(*a.lse, *out)) shares(*a.lse, *out, "memory of its own");
    }
    here(*a.lse);
    p.lse = static_cast<float*>(a.lse->data);
    p.lse_stride_token = a.lse->stride[0];
    p.lse_stride_head = a.lse->stride[1];
  }

  /// What is written is read by nobody: rows are computed in any order. A tile of q is read before
  /// the same tile of the output is written, so that the output may be q itself.
  void check_apart(const Array& written, const RunArrays& a, bool may_be_q) const {
    const char* const own = may_be_q ? "memory of its own, or exactly q" : "memory of its own";
    if (!(may_be_q && same_view(written, a.q)) && overlaps(written, a.q)) shares(written, a.q, own);
    if (overlaps(written, a.k)) shares(written, a.k, own);
    if (a.v && overlaps(written, *a.v)) shares(written, *a.v, own);
    for (const Array* scale : {a.k_scale.per_token, a.v_scale.per_token}) {
      if (scale && overlaps(written, *scale)) shares(written, *scale, own);
    }
  }

  [[noreturn]] static void shares(const Array& a, const Array& with, const char* expected) {
    throw Error(ErrorCode::kValue, a.name, std::string("memory that ") + with.name + " has too",
                expected);
  }

  /// A scale of NaN or infinity is a mistake that would show much later.
  static float finite(const Scale& scale, const char* name) {
    if (std::isfinite(scale.number)) return scale.number;
    throw Error(ErrorCode::kValue, name, std::to_string(scale.number), "a finite float32");
  }

  void scalars(const RunArrays& a, Params& p) const {
    if (a.sinks && o_.activation == Activation::kSigmoid) {
      throw Error(ErrorCode::kUnsupported, "sinks", "an array without a softmax",
                  "None: sinks join a softmax denominator");
    }
    const int64_t qo_heads = o_.shape.num_qo_heads, kv_heads = o_.shape.num_kv_heads;
    p.sm_scale = o_.sm_scale * finite(a.q_scale, "q_scale") * finite(a.k_scale, "k_scale");
    if (!std::isfinite(p.sm_scale)) {
      throw Error(ErrorCode::kValue, "q_scale", std::to_string(p.sm_scale) + " with k_scale",
                  "a finite float32 as sm_scale * q_scale * k_scale");
    }
    if (!(a.o_scale > 0) || std::isinf(a.o_scale)) {
      throw Error(ErrorCode::kValue, "o_scale", std::to_string(a.o_scale), "a positive number");
    }
    p.out_scale = finite(a.v_scale, "v_scale") / a.o_scale;
    if (!std::isfinite(p.out_scale)) {
      throw Error(ErrorCode::kValue, "o_scale", std::to_string(a.o_scale) + " with v_scale",
                  "a finite float32 as v_scale / o_scale");
    }
    p.q_head_scale = head_vector(a.q_scale.per_head, qo_heads);
    p.k_head_scale = head_vector(a.k_scale.per_head, kv_heads);
    p.v_head_scale = head_vector(a.v_scale.per_head, kv_heads);
    p.soft_cap = o_.soft_cap;
    p.sinks = head_vector(a.sinks, qo_heads);
    if (o_.position == Position::kAlibi) {
      p.alibi_slopes = head_vector(a.alibi_slopes, qo_heads);
    } else if (a.alibi_slopes) {
      throw Error(ErrorCode::kValue, "alibi_slopes", "an array",
                  "None unless pos_encoding_mode='ALIBI'");
    }
    p.sigmoid_bias = o_.sigmoid_bias;
    p.lse_unit = o_.lse_base2 ? 1.0f : kLn2;
  }

  /// Numbers and arrays take their places in the order in which the variant declares them.
  void extras(const RunArrays& a, Params& p) const {
    int32_t numbers = 0, tensors = 0;
    for (size_t i = 0; i < o_.extras.size(); ++i) {
      const ExtraOption& option = o_.extras[i];
      const ExtraValue& value = a.extras[i];
      if (option.rank == 0) {
        p.extras.scalar[numbers++] = value.bits;
        continue;
      }
      ExtraArray& to = p.extras.tensor[tensors++];
      check_element(*value.array, {option.element});
      check_rank(*value.array, option.rank, "as the variant declares");
      here(*value.array);
      to.data = value.array->data;
      for (int d = 0; d < option.rank; ++d) {
        const int64_t size = value.array->shape[d];
        if (size < 1 || size > std::numeric_limits<int32_t>::max()) {
          bad_shape(*value.array, "extents in [1, 2^31)");
        }
        to.size[d] = static_cast<int32_t>(size);
        to.stride[d] = value.array->stride[d];
      }
    }
  }

 private:
  void half(PagedView& view, const Array& array, int32_t dim) const {
    const int32_t kv_heads = o_.shape.num_kv_heads;
    if (view.heads != kv_heads || view.dim != dim) {
      bad_shape(array, std::to_string(kv_heads) + " KV heads of dim " + std::to_string(dim));
    }
    if (holds_tokens(array, cache_)) {
      const int64_t tokens = array.shape[cache_.hnd ? 1 : 0];
      const int64_t needed =
          h_.num_kv_tokens ? h_.num_kv_tokens : static_cast<int64_t>(h_.num_kv_rows) * h_.page_size;
      if (tokens < needed) {
        throw Error(ErrorCode::kIndexRange, array.name, std::to_string(tokens) + " tokens",
                    "at least " + std::to_string(needed) + ", which the plan refers to");
      }
      // Only a plan that knows of a short page may have it; replays of this run know no other.
      if (!h_.num_kv_tokens) view.pages = tokens / h_.page_size;
    }
    // Every id was checked against 0 in plan(); the highest decides here.
    if (h_.num_kv_rows > view.pages) {
      throw Error(ErrorCode::kIndexRange, array.name,
                  std::to_string(view.pages) + (cache_.paged ? " pages" : " token rows"),
                  "at least " + std::to_string(h_.num_kv_rows) + ", which the plan refers to");
    }
    here(array);
    aligned_rows(array);
    if (place_.cuda && dim % (16 / dtype_size(view.dtype)) != 0) {
      throw Error(ErrorCode::kUnsupported, array.name,
                  "head dim " + std::to_string(dim) + " of " + dtype_name(view.dtype) + " on " +
                      place_text(place_),
                  "a multiple of 16 there (pad the cache's rows with zeros)");
    }
  }

  const AttentionOptions& o_;
  const PlanHeader& h_;
  const CacheShape cache_;
  Place place_;
};

}  // namespace

Params params_for(const AttentionOptions& options, const PlanHeader& plan, const RunArrays& arrays,
                  Place place, bool spare_rows) {
  const Checker checker(options, plan, place);
  Params p;
  checker.queries(arrays.q, spare_rows, p);
  checker.cache(arrays, p);
  checker.outputs(arrays, p);
  checker.scalars(arrays, p);
  checker.extras(arrays, p);
  return p;
}

}  // namespace flashbsr::api
