// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "ops_cache.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "overlap.h"

namespace flashbsr::api {

using flashbsr::detail::at;
using flashbsr::detail::bad_index;

namespace {

/// The page size of a cache whose shape is not fixed by a plan.
int32_t page_size_of(const Array& k, bool stacked, bool hnd) {
  const int full = stacked ? 5 : 4;
  if (k.ndim == full - 1) return 1;
  check_rank(k, full, stacked ? "[pages, 2, ...]" : "[pages, ...]");
  return static_cast<int32_t>(k.shape[full - (hnd ? 2 : 3)]);
}

void check_last_page_len(const IndexView& indptr, const IndexView& last, int32_t page_size) {
  for (int64_t r = 0; r + 1 < indptr.size; ++r) {
    if (indptr[r + 1] > indptr[r] && (last[r] < 1 || last[r] > page_size)) {
      bad_index(at("kv_last_page_len", r), last[r],
                "a value in [1, page_size = " + std::to_string(page_size) + "]");
    }
  }
}

void check_mapping(const AppendViews& v) {
  const int64_t slots = v.cache.k.pages * v.page_size;
  for (int64_t t = 0; t < v.key.tokens; ++t) {
    if (v.slots[t] < -1 || v.slots[t] >= slots) {
      bad_index(at("slot_mapping", t), v.slots[t],
                "-1 (written nowhere), or a slot of the cache, below " + std::to_string(slots));
    }
  }
}

void check_table(const AppendViews& v, const Array& kv_indices) {
  const int64_t requests = flashbsr::detail::check_indptr("kv_indptr", v.kv_indptr);
  if (v.kv_indices.size < v.kv_indptr[requests]) {
    bad_shape(kv_indices,
              "at least kv_indptr[-1] = " + std::to_string(v.kv_indptr[requests]) + " ids");
  }
  check_last_page_len(v.kv_indptr, v.last_page_len, v.page_size);
  for (int64_t t = 0; t < v.key.tokens; ++t) {
    const int64_t b = v.batch[t];
    if (b == -1) continue;
    if (b < 0 || b >= requests) {
      bad_index(at("batch_indices", t), b,
                "-1 (padding), or a request below " + std::to_string(requests));
    }
    const int64_t held = v.kv_indptr[b + 1] - v.kv_indptr[b];
    const int64_t length = held ? (held - 1) * v.page_size + v.last_page_len[b] : 0;
    if (v.positions[t] < 0 || v.positions[t] >= length) {
      bad_index(at("positions", t), v.positions[t],
                "a position in [0, " + std::to_string(length) + "), the length of request " +
                    std::to_string(b));
    }
    const int64_t entry = v.kv_indptr[b] + v.positions[t] / v.page_size;
    const int64_t page = v.kv_indices[entry];
    if (page < 0 || page >= v.cache.k.pages) {
      bad_index(at("kv_indices", entry), page,
                "a page of the cache, in [0, " + std::to_string(v.cache.k.pages) + ")");
    }
  }
}

/// A GPU writes codes where K and V are both codes with scales of every token.
void check_device_codes(const AppendViews& v) {
  const auto coded = [](const PagedView& x, const PagedView& scales) {
    return scales.data || x.dtype == DType::kI8;
  };
  const bool k = coded(v.cache.k, v.scales.k), other = coded(v.cache.v, v.scales.v);
  if (!v.place.cuda || (!k && !other)) return;
  if (v.scales.k.data && v.scales.v.data && v.cache.k.heads == v.cache.v.heads) return;
  throw Error(ErrorCode::kUnsupported, "paged_kv_cache",
              std::string(dtype_name(v.cache.k.dtype)) + " and " + dtype_name(v.cache.v.dtype) +
                  " in " + place_text(v.place) + ", not both with scales of every token",
              "k_scale and v_scale, arrays of scales, and as many heads of V as of K");
}

/// Where the scales of K or V go. Codes that need them are not written without.
PagedView scales_of(const std::optional<Array>& given, const PagedView& x, const Array& cache,
                    bool stacked, const CacheShape& shape) {
  if (!given) {
    if (!is_packed(x.dtype)) return {};
    throw Error(ErrorCode::kValue, cache.name, std::string(dtype_name(x.dtype)) + " without scales",
                "k_scale and v_scale, arrays for a scale of every token, head and group");
  }
  if (x.dim > cpu::kMaxQuantDim) {
    throw Error(ErrorCode::kUnsupported, cache.name, "head dim " + std::to_string(x.dim),
                "at most " + std::to_string(cpu::kMaxQuantDim));
  }
  check_no_overlap(*given);
  if (overlaps(*given, cache)) {
    throw Error(ErrorCode::kValue, given->name, "memory that the cache has too",
                "bytes of its own, beside the codes of a page or elsewhere");
  }
  return scale_view(*given, x, cache.ndim - stacked, shape);
}

/// Every destination is checked before any is written: on the host always, on a device if asked.
void view_slots(AppendViews& v, const Array& mapping, void* stream) {
  v.by_slots = true;
  v.slots = indices(mapping);
  check_shape(mapping, {v.key.tokens});
  if (v.cache.k.pages >= (int64_t{1} << 31) / v.page_size) {  // what the kernels divide
    throw Error(ErrorCode::kValue, "paged_kv_cache",
                std::to_string(v.cache.k.pages) + " pages of " + std::to_string(v.page_size),
                "fewer than 2^31 slots; or batch_indices and a page table, which have no bound");
  }
  if (v.place.cuda && !checking()) return;
  const HostIndices slots(mapping, stream);
  AppendViews values = v;
  values.slots = slots.view();
  check_mapping(values);
}

void view_table(AppendViews& v, const AppendArrays& a, void* stream) {
  const AppendTable& table = *a.table;
  v.batch = indices(table.batch_indices);
  v.kv_indices = indices(table.kv_indices);
  v.kv_indptr = indices(table.kv_indptr);
  v.last_page_len = indices(table.kv_last_page_len);
  check_shape(table.batch_indices, {v.key.tokens});
  check_shape(table.kv_last_page_len, {requests_of("kv_indptr", v.kv_indptr)});
  if (v.place.cuda && !checking()) return;
  const HostIndices batch(table.batch_indices, stream), positions(*a.positions, stream),
      kv_indices(table.kv_indices, stream), kv_indptr(table.kv_indptr, stream),
      last(table.kv_last_page_len, stream);
  AppendViews values = v;
  values.batch = batch.view();
  values.positions = positions.view();
  values.kv_indices = kv_indices.view();
  values.kv_indptr = kv_indptr.view();
  values.last_page_len = last.view();
  check_table(values, table.kv_indices);
}

}  // namespace

AppendViews check_append(const AppendArrays& a, void* stream) {
  const Array* v_cache = a.v_cache ? &*a.v_cache : nullptr;
  AppendViews v;
  const AppendTable* table = a.table ? &*a.table : nullptr;
  v.place =
      common_place({&a.key, &a.value, &a.k_cache, v_cache, a.positions ? &*a.positions : nullptr,
                    a.slot_mapping ? &*a.slot_mapping : nullptr,
                    table ? &table->batch_indices : nullptr, table ? &table->kv_indices : nullptr,
                    table ? &table->kv_indptr : nullptr, table ? &table->kv_last_page_len : nullptr,
                    a.k_scales ? &*a.k_scales : nullptr, a.v_scales ? &*a.v_scales : nullptr});
  v.key = ragged_view(a.key, true);
  v.value = ragged_view(a.value, true);
  v.page_size = max_of(page_size_of(a.k_cache, !v_cache, a.hnd), 1);
  const CacheShape shape{.paged = true,
                         .page_size = v.page_size,
                         .hnd = a.hnd,
                         .k_codes = a.k_codes,
                         .v_codes = a.v_codes};
  v.cache = cache_views(a.k_cache, v_cache, shape);
  v.scales = {scales_of(a.k_scales, v.cache.k, a.k_cache, !v_cache, shape),
              scales_of(a.v_scales, v.cache.v, v_cache ? *v_cache : a.k_cache, !v_cache, shape)};
  check_device_codes(v);
  check_shape(a.key, {-1, v.cache.k.heads, v.cache.k.dim});
  check_shape(a.value, {v.key.tokens, v.cache.v.heads, v.cache.v.dim});
  for (const auto& [scale, name] :
       {std::pair{a.k_scale, "k_scale"}, std::pair{a.v_scale, "v_scale"}}) {
    if (!(scale > 0) || scale == infinity()) {
      throw Error(ErrorCode::kValue, name, std::to_string(scale), "a positive number");
    }
  }
  check_no_overlap(a.k_cache);
  if (v_cache) check_no_overlap(*v_cache);
  if (v.cache.k.pages != v.cache.v.pages) {
    bad_shape(v_cache ? *v_cache : a.k_cache, "as many pages as k");
  }

  if (a.positions) {
    v.positions = indices(*a.positions);
    check_shape(*a.positions, {v.key.tokens});
  }
  if (a.slot_mapping) {
    view_slots(v, *a.slot_mapping, stream);
  } else {
    view_table(v, a, stream);
  }
  return v;
}

std::optional<cpu::Slot> AppendViews::slot_of(int64_t token) const {
  if (by_slots) {
    const int64_t slot = slots[token];
    return slot < 0 ? std::nullopt : std::optional(cpu::Slot{slot / page_size, slot % page_size});
  }
  if (batch[token] < 0) return std::nullopt;
  return cpu::find_slot(kv_indices, kv_indptr, page_size, batch[token], positions[token]);
}

ops::Slots device_slots(const AppendViews& v) {
  return {device_indices(v.slots),
          device_indices(v.batch),
          device_indices(v.positions),
          device_indices(v.kv_indices),
          device_indices(v.kv_indptr),
          FastDiv(static_cast<uint32_t>(v.page_size)),
          v.cache.k.pages};
}

void append_paged_kv_cache(const AppendArrays& a, void* stream) {
  const AppendViews v = check_append(a, stream);
  if (v.place.cuda && v.scales.k.data) {
    ops::QuantizeArgs args;
    args.k = {v.key, v.cache.k, v.scales.k, 1.0f / a.k_scale};
    args.v = {v.value, v.cache.v, v.scales.v, 1.0f / a.v_scale};
    args.slots = device_slots(v);
    return cuda::append_paged_kv_quantize(args, v.key.tokens, {v.place.device, stream});
  }
  if (v.place.cuda) {
    ops::AppendArgs args;
    args.k = {.in = v.key, .cache = v.cache.k, .inverse_scale = 1.0f / a.k_scale};
    args.v = {.in = v.value, .cache = v.cache.v, .inverse_scale = 1.0f / a.v_scale};
    args.slots = device_slots(v);
    return cuda::append_paged_kv(args, v.key.tokens, {v.place.device, stream});
  }
  for (int64_t t = 0; t < v.key.tokens; ++t) {
    const std::optional<cpu::Slot> slot = v.slot_of(t);
    if (!slot) continue;
    cpu::store_token(v.key, t, v.cache.k, v.scales.k, slot->page, slot->offset, 1.0f / a.k_scale);
    cpu::store_token(v.value, t, v.cache.v, v.scales.v, slot->page, slot->offset, 1.0f / a.v_scale);
  }
}

void dequantize_kv_cache(const DequantizeArrays& a, void* stream) {
  const Place place = common_place({&a.cache, &a.scales, &a.out});
  const DType type = kv_dtype(a.cache, a.codes);
  if (a.cache.ndim != 3 && a.cache.ndim != 4) {
    check_rank(a.cache, 4, "[pages, page_size, heads, D], or 3 of [tokens, heads, D]");
  }
  // Of the order of tokens and heads nothing depends but their names.
  const bool paged = a.cache.ndim == 4;
  const CacheShape shape{.paged = paged,
                         .page_size = paged ? static_cast<int32_t>(a.cache.shape[1]) : 1};
  const PagedView x = detail::one_view(a.cache, shape, type);
  const PagedView scales = scale_view(a.scales, x, a.cache.ndim, shape);
  const PagedView out = detail::one_view(a.out, shape, float_dtype(a.out));
  if (paged) {
    check_shape(a.out, {x.pages, x.page_size, x.heads, x.dim});
  } else {
    check_shape(a.out, {x.pages, x.heads, x.dim});
  }
  check_no_overlap(a.out);
  if (place.cuda) {
    return cuda::dequantize_kv({.cache = x, .scales = scales, .out = out, .number = a.number},
                               {place.device, stream});
  }
  std::vector<float> row(static_cast<size_t>(x.dim));
  for (int64_t page = 0; page < x.pages; ++page) {
    for (int32_t token = 0; token < x.page_size; ++token) {
      for (int32_t h = 0; h < x.heads; ++h) {
        cpu::dequantize_row(x.row(page, token, h), x.dim, type, scales, scales.row(page, token, h),
                            row.data());
        for (int32_t d = 0; d < x.dim; ++d) {
          store_from_float(out.row(page, token, h), d, out.dtype,
                           row[static_cast<size_t>(d)] * a.number);
        }
      }
    }
  }
}

namespace {

void check_appended(const IndexView& indptr, const IndexView& lens, int64_t nnz) {
  const int64_t requests = flashbsr::detail::check_indptr("append_indptr", indptr);
  if (nnz < indptr[requests]) {
    bad_index("nnz", nnz, "at least append_indptr[-1] = " + std::to_string(indptr[requests]));
  }
  for (int64_t b = 0; b < requests; ++b) {
    if (lens[b] < indptr[b + 1] - indptr[b]) {
      bad_index(at("seq_lens", b), lens[b],
                "at least the " + std::to_string(indptr[b + 1] - indptr[b]) + " tokens appended");
    }
    flashbsr::detail::narrow("seq_lens", b, lens[b]);
  }
}

}  // namespace

void get_batch_indices_positions(const Array& append_indptr, const Array& seq_lens,
                                 const Array& batch_indices, const Array& positions, void* stream) {
  const Place place = common_place({&append_indptr, &seq_lens, &batch_indices, &positions});
  const IndexView indptr = indices(append_indptr), lens = indices(seq_lens);
  const int64_t requests = requests_of("append_indptr", indptr);
  flashbsr::detail::check_length("seq_lens", lens.size, requests, "one per request");
  const int64_t nnz = batch_indices.size();
  int32_t* batch = int32_out(batch_indices, nnz);
  int32_t* position = int32_out(positions, nnz);
  if (place.cuda) {
    if (checking()) {
      const HostIndices host_indptr(append_indptr, stream), host_lens(seq_lens, stream);
      check_appended(host_indptr.view(), host_lens.view(), nnz);
    }
    return cuda::get_batch_indices_positions(
        {device_indices(indptr), device_indices(lens), nnz, batch, position},
        {place.device, stream});
  }
  check_appended(indptr, lens, nnz);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t first = lens[b] - (indptr[b + 1] - indptr[b]);
    for (int64_t t = indptr[b]; t < indptr[b + 1]; ++t) {
      batch[t] = static_cast<int32_t>(b);
      position[t] = static_cast<int32_t>(first + t - indptr[b]);
    }
  }
  std::fill(batch + indptr[requests], batch + nnz, -1);
  std::fill(position + indptr[requests], position + nnz, 0);
}

namespace {

/// Calls `take(request, length)` for every request, lengths checked.
template <class Take>
void for_each_length(const IndexView& indptr, const IndexView& last, int32_t page_size,
                     const Take& take) {
  const int64_t requests = flashbsr::detail::check_indptr("kv_indptr", indptr);
  check_last_page_len(indptr, last, page_size);
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t pages = indptr[b + 1] - indptr[b];
    const int64_t len = pages ? (pages - 1) * page_size + last[b] : 0;
    take(b, flashbsr::detail::narrow("kv length of request", b, len));
  }
}

}  // namespace

void get_seq_lens(const Array& kv_indptr, const Array& last_page_len, int32_t page_size,
                  const Array& out, void* stream) {
  const Place place = common_place({&kv_indptr, &last_page_len, &out});
  const IndexView indptr = indices(kv_indptr), last = indices(last_page_len);
  const int64_t requests = requests_of("kv_indptr", indptr);
  flashbsr::detail::check_length("kv_last_page_len", last.size, requests, "one per request");
  if (page_size < 1) {
    throw Error(ErrorCode::kValue, "page_size", std::to_string(page_size), "at least 1");
  }
  int32_t* lens = int32_out(out, requests);
  if (place.cuda) {
    if (checking()) {
      const HostIndices host_indptr(kv_indptr, stream), host_last(last_page_len, stream);
      for_each_length(host_indptr.view(), host_last.view(), page_size, [](int64_t, int32_t) {});
    }
    return cuda::get_seq_lens({device_indices(indptr), device_indices(last), page_size, lens},
                              {place.device, stream});
  }
  for_each_length(indptr, last, page_size, [&](int64_t b, int32_t len) { lens[b] = len; });
}

}  // namespace flashbsr::api
