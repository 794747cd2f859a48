// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// KV caches as the ecosystem shapes them, turned into two PagedViews:
//
//   NHD: stacked [pages, 2, page_size, H_kv, D], or k and v of [pages, page_size, H_kv, D]
//   HND: stacked [pages, 2, H_kv, page_size, D], or k and v of [pages, H_kv, page_size, D]
//   page size 1: the page_size dimension may be left out
//   ragged: k and v of [tokens, H_kv, D] (NHD) or [H_kv, tokens, D] (HND)
//   the same for pages of several tokens: pages one after another, the last may be short
//
// Scales of every token and head have the shape of the array of K or V without its last dimension,
// or with groups of a row's dims in its place.
#pragma once

#include <optional>

#include "array.h"

namespace flashbsr::api {

struct CacheShape {
  bool paged = true;
  int32_t page_size = 1;
  bool hnd = false;
  // What bytes of K and V are said to be; empty: arrays say it themselves.
  std::optional<DType> k_codes = std::nullopt;
  std::optional<DType> v_codes = std::nullopt;
};

struct CacheViews {
  PagedView k;
  PagedView v;
};

/// Whether an array of K or V is tokens rather than pages.
inline bool holds_tokens(const Array& a, const CacheShape& cache) {
  return cache.paged && cache.page_size > 1 && a.ndim == 3;
}

namespace detail {

/// Removes dimension `at`, keeping the part that starts `index` along it.
inline Array drop_dim(Array a, int at, int64_t index, int element_bytes) {
  a.data = static_cast<char*>(a.data) + index * a.stride[at] * element_bytes;
  for (int i = at; i + 1 < a.ndim; ++i) {
    a.shape[i] = a.shape[i + 1];
    a.stride[i] = a.stride[i + 1];
  }
  --a.ndim;
  return a;
}

inline PagedView one_view(const Array& a, const CacheShape& cache, DType dtype) {
  PagedView view{.data = a.data, .dtype = dtype};
  check_rows(a);
  int page = 0, token = 1, head = 2;
  const bool tokens = holds_tokens(a, cache);
  if (!cache.paged || tokens) {
    check_rank(a, 3, cache.hnd ? "[H_kv, tokens, D]" : "[tokens, H_kv, D]");
    page = cache.hnd ? 1 : 0;
    head = cache.hnd ? 0 : 1;
    token = -1;
  } else if (a.ndim == 3 && cache.page_size == 1) {
    head = 1;
    token = -1;
  } else {
    check_rank(a, 4, cache.hnd ? "[pages, H_kv, page_size, D]" : "[pages, page_size, H_kv, D]");
    if (cache.hnd) token = 2, head = 1;
    if (a.shape[token] != cache.page_size) {
      bad_shape(a, "page_size " + std::to_string(cache.page_size) + " in dimension " +
                       std::to_string(token));
    }
  }
  view.pages = a.shape[page];
  view.page_size = cache.page_size;
  view.heads = static_cast<int32_t>(a.shape[head]);
  view.dim = static_cast<int32_t>(a.shape[a.ndim - 1]) * (is_packed(dtype) ? 2 : 1);
  view.stride_page = a.stride[page];
  view.stride_token = token < 0 ? view.stride_page : a.stride[token];
  view.stride_head = a.stride[head];
  if (tokens) {
    view.pages = ceil_div<int64_t>(view.pages, cache.page_size);
    view.stride_token = view.stride_page;
    view.stride_page *= cache.page_size;
  }
  return view;
}

}  // namespace detail

/// `v` null: `k` is the stacked cache.
inline CacheViews cache_views(const Array& k, const Array* v, const CacheShape& cache) {
  const DType k_type = kv_dtype(k, cache.k_codes), v_type = kv_dtype(v ? *v : k, cache.v_codes);
  if (v) return {detail::one_view(k, cache, k_type), detail::one_view(*v, cache, v_type)};
  if (!cache.paged) {
    throw Error(ErrorCode::kValue, k.name, "one array", "a tuple (k, v) for ragged KV");
  }
  const bool short_form = cache.page_size == 1 && k.ndim == 4;
  if (!short_form) {
    check_rank(k, 5,
               cache.hnd ? "[pages, 2, H_kv, page_size, D]" : "[pages, 2, page_size, H_kv, D]");
  }
  if (k.shape[1] != 2) bad_shape(k, "2 (k and v) in dimension 1");
  const int bytes = dtype_size(k_type);
  return {detail::one_view(detail::drop_dim(k, 1, 0, bytes), cache, k_type),
          detail::one_view(detail::drop_dim(k, 1, 1, bytes), cache, v_type)};
}

/// Scales of every token and head of `x`, the view of an array of `rank` dimensions, K or V alone.
inline PagedView scale_view(Array a, const PagedView& x, int rank, const CacheShape& cache) {
  if (x.dtype == DType::kI4) {
    check_element(a, {Element::kF32});
  } else if (x.dtype == DType::kE2M1) {
    check_element(a, {Element::kE4M3, Element::kU8});
    a.element = Element::kE4M3;
  } else if (dtype_size(x.dtype) == 1) {
    check_element(a, {Element::kF32, Element::kF16});
  } else {
    throw Error(ErrorCode::kDType, a.name,
                std::string("scales of every token, of a cache in ") + dtype_name(x.dtype),
                "a number, or one per head; or a cache of int8, float8, int4 "
                "or nvfp4");
  }
  const Array given = a;
  if (a.ndim == rank - 1) {
    a.shape[a.ndim] = 1;
    a.stride[a.ndim++] = 1;
  }
  check_rank(a, rank, "as the cache of K or V alone has, or without the last one");
  const PagedView view = detail::one_view(a, cache, static_cast<DType>(a.element));
  if (view.heads != x.heads) bad_shape(given, std::to_string(x.heads) + " KV heads");
  if (view.pages != x.pages) {
    bad_shape(given, "as many pages or tokens as its cache: " + std::to_string(x.pages));
  }
  const int32_t size = view.dim > 0 ? x.dim / view.dim : 0;
  const bool whole = view.dim > 0 && x.dim % view.dim == 0;
  if (x.dtype == DType::kE2M1 ? !whole || size != 16
      : x.dtype == DType::kI4 ? !whole || (view.dim > 1 && size != 32 && size != 64)
                              : view.dim != 1) {
    bad_shape(given, x.dtype == DType::kE2M1 ? "one scale for each 16 dims"
                     : x.dtype == DType::kI4 ? "one scale for each 32, each 64 or all dims"
                                             : "one scale per token and head");
  }
  return view;
}

/// A latent cache, or a part of it: [pages, page_size, D] or [tokens, D], which has one KV head. As
/// arrays of other caches are, with the head.
inline Array with_head(Array a, const CacheShape& cache) {
  const int full = cache.paged ? 4 : 3;
  const bool short_form = cache.paged && cache.page_size == 1 && a.ndim == 3;
  if (a.ndim == full || short_form) return a;
  const bool tokens = a.ndim == 2 && (!cache.paged || cache.page_size == 1);
  if (a.ndim != full - 1 && !tokens) {
    bad_shape(a, cache.paged ? "[pages, page_size, D], with or without a head of extent 1"
                             : "[tokens, D], with or without a head of extent 1");
  }
  const int head = cache.hnd ? a.ndim - 2 : a.ndim - 1;
  for (int i = a.ndim; i > head; --i) {
    a.shape[i] = a.shape[i - 1];
    a.stride[i] = a.stride[i - 1];
  }
  a.shape[head] = 1;
  ++a.ndim;
  return a;
}

}  // namespace flashbsr::api
