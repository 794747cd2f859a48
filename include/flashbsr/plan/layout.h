// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The front-ends: every way to name queries and KV becomes one BSR layout, a table of requests
// (block rows) over a list of page ids (block columns). All values are checked here, completely and
// once.
//
//   contiguous      q [B, S, H, D], k [B, T, H, D]
//   ragged          qo_indptr, kv_indptr over token rows
//   paged CSR       qo_indptr, kv_indptr over kv_indices, last_page_len or kv_lens
//   block table     [B, max_pages] + kv_lens
//   bounds          the most KV tokens that requests may have; lengths and pages when they are
//   known BSR             block rows of r query tokens, block columns of c KV tokens, any r and c:
//   bsr.h
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <flashbsr/core/error.h>
#include <flashbsr/core/math.h>
#include <flashbsr/core/plan.h>
#include <flashbsr/plan/page_range.h>

namespace flashbsr {

/// A caller's index array, int32 or int64. Owns nothing.
struct IndexView {
  const void* data = nullptr;
  int64_t size = 0;
  bool wide = false;

  IndexView() = default;
  IndexView(const int32_t* p, int64_t n) : data(p), size(n) {}
  IndexView(const int64_t* p, int64_t n) : data(p), size(n), wide(true) {}
  IndexView(const std::vector<int32_t>& v) : IndexView(v.data(), static_cast<int64_t>(v.size())) {}

  int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct Layout {
  std::vector<Request> requests;
  std::vector<int32_t> kv_indices;  ///< page ids, unless borrowed; empty where KV is ragged
  std::span<const int32_t> borrowed_pages;
  /// Set before paged_layout(): ids of int32 stay where they are, and there as long as the layout
  /// is used. 264136 of them are checked and copied into a plan in 95 us so, 138 by way of
  /// kv_indices (Xeon).
  bool borrow_pages = false;
  std::vector<int32_t> kv_heads;   ///< of each request, its one KV head; empty: all have all
  std::vector<int32_t> positions;  ///< of requests' first query tokens; empty: they are the last
  int32_t page_size = 1;
  bool paged = false;
  bool shared_kv = false;  ///< requests choose from the same K and V: rows of one matrix
  bool decode = false;     ///< one query token each, by the call rather than by these lengths
  bool bounds = false;     ///< lengths are the most that there may be; page ids come later
  int32_t common_prefix =
      0;  ///< of bounds: KV tokens that all begin with who have keys, and queries
  int64_t num_q_tokens = 0;
  int64_t num_kv_rows = 0;  ///< ragged: token rows of k, v. paged: highest page id + 1
  /// Where pages follow each other and the last one is short: tokens of k, v. 0: it is whole.
  int64_t num_kv_tokens = 0;
  int64_t mask_bits = 0;   ///< length of a boolean mask: sum of q_len * (kv_len - mask_begin)
  int64_t mask_bytes = 0;  ///< length of the packed one: each request starts at a byte

  int64_t first_position(size_t request) const {
    const Request& r = requests[request];
    return positions.empty() ? int64_t{r.kv_len} - r.q_len : positions[request];
  }
  std::span<const int32_t> pages() const {
    return borrowed_pages.data() ? borrowed_pages : std::span<const int32_t>(kv_indices);
  }
  /// Before whoever keeps borrowed ids writes there.
  void own_pages() {
    if (!borrowed_pages.data()) return;
    kv_indices.assign(borrowed_pages.begin(), borrowed_pages.end());
    borrowed_pages = {};
  }
};

/// Tokens that lie in a row in memory, as a factor of all there are: boxes are loaded whole, and
/// none may reach beyond a last page that is short.
inline int64_t page_run(int64_t page_size, int64_t num_kv_tokens) {
  return std::gcd(page_size, num_kv_tokens);
}

namespace detail {

inline std::string at(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

[[noreturn]] inline void bad_index(std::string argument, int64_t actual, std::string expected) {
  throw Error(ErrorCode::kIndexRange, std::move(argument), std::to_string(actual),
              std::move(expected));
}

inline void check_length(const char* name, int64_t actual, int64_t expected, const char* why) {
  if (actual == expected) return;
  throw Error(ErrorCode::kShape, name, "length " + std::to_string(actual),
              "length " + std::to_string(expected) + " (" + why + ")");
}

inline int32_t narrow(const char* name, int64_t i, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    bad_index(at(name, i), value, "a value in [0, 2^31)");
  }
  return static_cast<int32_t>(value);
}

/// indptr[0] == 0, non-decreasing, last value below 2^31. Returns the number of rows.
inline int64_t check_indptr(const char* name, const IndexView& indptr) {
  if (indptr.size < 1) {
    throw Error(ErrorCode::kShape, name, "length 0", "length batch_size + 1, at least 1");
  }
  if (indptr[0] != 0) bad_index(at(name, 0), indptr[0], "0");
  for (int64_t i = 1; i < indptr.size; ++i) {
    if (indptr[i] < indptr[i - 1]) {
      bad_index(at(name, i), indptr[i],
                "at least " + at(name, i - 1) + " = " + std::to_string(indptr[i - 1]));
    }
  }
  narrow(name, indptr.size - 1, indptr[indptr.size - 1]);
  return indptr.size - 1;
}

/// Query rows of the requests. An empty `qo_indptr` means decode: one token each.
inline int64_t start_requests(Layout& layout, const IndexView* qo_indptr, int64_t batch_size) {
  if (qo_indptr) {
    check_indptr("qo_indptr", *qo_indptr);
    check_length("qo_indptr", qo_indptr->size, batch_size + 1, "batch_size + 1");
  }
  layout.decode = qo_indptr == nullptr;
  layout.requests.resize(static_cast<size_t>(batch_size));
  layout.kv_heads.clear();
  layout.shared_kv = layout.bounds = false;
  layout.common_prefix = 0;
  layout.num_kv_tokens = 0;
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t begin = qo_indptr ? (*qo_indptr)[b] : b;
    const int64_t end = qo_indptr ? (*qo_indptr)[b + 1] : b + 1;
    layout.requests[static_cast<size_t>(b)] = {.q_begin = static_cast<int32_t>(begin),
                                               .q_len = static_cast<int32_t>(end - begin),
                                               .kv_begin = 0,
                                               .kv_len = 0,
                                               .mask_lo = -1,
                                               .mask_hi = -1,
                                               .index = static_cast<int32_t>(b),
                                               .mask_begin = 0};
  }
  layout.num_q_tokens = qo_indptr ? (*qo_indptr)[batch_size] : batch_size;
  return batch_size;
}

/// Checks that ids, `first` of the argument and those behind it, are not negative, and keeps the
/// highest. `range`: theirs.
inline void note_pages(Layout& layout, const char* name, int64_t first, const int32_t* ids,
                       int64_t count, const PageRange& range) {
  // The number of pages, highest + 1, must fit as well.
  if (range.signs < 0 || range.highest == std::numeric_limits<int32_t>::max()) {
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] == std::numeric_limits<int32_t>::max()) {
        bad_index(detail::at(name, first + i), ids[i], "a page id in [0, 2^31 - 1)");
      }
    }
  }
  layout.num_kv_rows = max_of(layout.num_kv_rows, int64_t{range.highest} + 1);
}

/// Copies page ids to `at` of the layout's, which has room for them.
inline void take_pages(Layout& layout, int64_t at, const char* name, const IndexView& pages,
                       int64_t first, int64_t count) {
  int32_t* out = layout.kv_indices.data() + at;
  PageRange range;
  if (!pages.wide) {
    const int32_t highest = static_cast<int32_t>(layout.num_kv_rows) - 1;
    range = scan_pages(static_cast<const int32_t*>(pages.data) + first, count, highest, out);
  } else {
    // To throw from this loop would keep it from vector code: 131072 ids in 80 us instead of 20.
    const int64_t* in = static_cast<const int64_t*>(pages.data) + first;
    int64_t lost = 0;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<int32_t>(in[i]);
      lost |= in[i] ^ out[i];
    }
    for (int64_t i = 0; lost != 0 && i < count; ++i) narrow(name, first + i, in[i]);
    range = range_of(out, count);
  }
  note_pages(layout, name, first, out, count, range);
}

inline void start_paged(Layout& layout, int32_t page_size) {
  if (page_size < 1) {
    throw Error(ErrorCode::kValue, "page_size", std::to_string(page_size), "at least 1");
  }
  layout.paged = true;
  layout.bounds = false;
  layout.borrowed_pages = {};
  layout.page_size = page_size;
  layout.num_kv_rows = 0;
}

/// Room for page ids. What the vector had stays: to clear it first would fill all with zeros.
inline void size_pages(Layout& layout, int64_t count) {
  layout.kv_indices.resize(static_cast<size_t>(count));
}

/// All pages of a layout.
inline void take_all_pages(Layout& layout, const char* name, const IndexView& pages,
                           int64_t count) {
  if (pages.wide || !layout.borrow_pages) {
    size_pages(layout, count);
    take_pages(layout, 0, name, pages, 0, count);
    return;
  }
  const int32_t* ids = static_cast<const int32_t*>(pages.data);
  layout.kv_indices.clear();
  layout.borrowed_pages = {ids, static_cast<size_t>(count)};
  note_pages(layout, name, 0, ids, count, scan_pages(ids, count, -1, nullptr));
}

inline int64_t mask_bits(const Request& r) {
  return static_cast<int64_t>(r.q_len) * (r.kv_len - r.mask_begin);
}

/// Page ids of a plan of bounds: the same for the first `tokens` of all requests, others for each
/// page behind them.
inline void take_common_prefix(Layout& layout, int64_t tokens, int32_t heads) {
  const char* name = "common_prefix";
  if (heads > 0) {
    throw Error(ErrorCode::kUnsupported, name, std::to_string(tokens),
                "0 where each KV head has a length of its own");
  }
  if (tokens < 0 || tokens % layout.page_size != 0) {
    throw Error(ErrorCode::kValue, name, std::to_string(tokens),
                "whole pages of " + std::to_string(layout.page_size) + " tokens");
  }
  std::iota(layout.kv_indices.begin(), layout.kv_indices.end(), 0);
  for (const Request& r : layout.requests) {
    if (r.q_len == 0 || r.kv_len == 0) continue;
    if (r.kv_len < tokens + r.q_len) {
      throw Error(ErrorCode::kValue, name, std::to_string(tokens),
                  "at most what bounds leave beside the query tokens, " +
                      std::to_string(r.kv_len - r.q_len) + " of request " +
                      std::to_string(r.index));
    }
    std::iota(layout.kv_indices.begin() + r.kv_begin,
              layout.kv_indices.begin() + r.kv_begin + tokens / layout.page_size, 0);
  }
  layout.common_prefix = static_cast<int32_t>(tokens);
}

/// The lengths a mask must have.
inline void finish(Layout& layout) {
  layout.mask_bits = layout.mask_bytes = 0;
  for (const Request& r : layout.requests) {
    const int64_t bits = mask_bits(r);
    layout.mask_bits += bits;
    layout.mask_bytes += ceil_div<int64_t>(bits, 8);
  }
}

}  // namespace detail

/// A mask of this layout will speak of the last q_len KV positions of each request only, the query
/// tokens' own; whatever is before them is seen. `name` is the argument that says so.
inline void mask_new_tokens(Layout& layout, const char* name) {
  for (Request& r : layout.requests) {
    if (r.kv_len < r.q_len) {
      throw Error(ErrorCode::kValue, name,
                  std::to_string(r.q_len) + " query tokens and " + std::to_string(r.kv_len) +
                      " KV tokens in request " + std::to_string(r.index),
                  "lengths of KV that include the query tokens");
    }
    r.mask_begin = r.kv_len - r.q_len;
  }
  detail::finish(layout);
}

/// Gives every request the offset of its bits in a packed custom mask.
inline void place_masks(Layout& layout) {
  int64_t offset = 0;
  for (Request& r : layout.requests) {
    r.mask_lo = static_cast<int32_t>(static_cast<uint32_t>(offset));
    r.mask_hi = static_cast<int32_t>(offset >> 32);
    offset += ceil_div<int64_t>(detail::mask_bits(r), 8);
  }
}

inline void ragged_layout(Layout& layout, const IndexView* qo_indptr, const IndexView& kv_indptr) {
  const int64_t batch = detail::check_indptr("kv_indptr", kv_indptr);
  detail::start_requests(layout, qo_indptr, batch);
  layout.paged = false;
  layout.page_size = 1;
  layout.kv_indices.clear();
  layout.borrowed_pages = {};
  layout.num_kv_rows = kv_indptr[batch];
  for (int64_t b = 0; b < batch; ++b) {
    Request& r = layout.requests[static_cast<size_t>(b)];
    r.kv_begin = static_cast<int32_t>(kv_indptr[b]);
    r.kv_len = static_cast<int32_t>(kv_indptr[b + 1] - kv_indptr[b]);
  }
  detail::finish(layout);
}

/// q [batch * q_len, H, D], k and v [batch * kv_len, H, D]: a batch of equal lengths, affine.
inline void contiguous_layout(Layout& layout, int64_t batch, int64_t q_len, int64_t kv_len) {
  std::vector<int64_t> qo(static_cast<size_t>(batch) + 1), kv(qo);
  for (int64_t b = 0; b <= batch; ++b) {
    qo[static_cast<size_t>(b)] = b * q_len;
    kv[static_cast<size_t>(b)] = b * kv_len;
  }
  const IndexView qo_view(qo.data(), batch + 1);
  ragged_layout(layout, &qo_view, IndexView(kv.data(), batch + 1));
}

/// Exactly one of `last_page_len` and `kv_lens` is given (size batch). A request without pages has
/// length 0 whatever its last_page_len says.
inline void paged_layout(Layout& layout, const IndexView* qo_indptr, const IndexView& kv_indptr,
                         const IndexView& kv_indices, const IndexView* last_page_len,
                         const IndexView* kv_lens, int32_t page_size) {
  const int64_t batch = detail::check_indptr("kv_indptr", kv_indptr);
  detail::start_requests(layout, qo_indptr, batch);
  detail::start_paged(layout, page_size);
  if (!last_page_len == !kv_lens) {
    throw Error(ErrorCode::kValue, "last_page_len", last_page_len ? "both" : "neither",
                "exactly one of last_page_len and kv_lens");
  }
  const IndexView& lens = last_page_len ? *last_page_len : *kv_lens;
  const char* name = last_page_len ? "last_page_len" : "kv_lens";
  detail::check_length(name, lens.size, batch, "batch_size");
  if (kv_indices.size < kv_indptr[batch]) {
    throw Error(ErrorCode::kShape, "kv_indices", "length " + std::to_string(kv_indices.size),
                "length at least kv_indptr[-1] = " + std::to_string(kv_indptr[batch]));
  }
  for (int64_t b = 0; b < batch; ++b) {
    Request& r = layout.requests[static_cast<size_t>(b)];
    r.kv_begin = static_cast<int32_t>(kv_indptr[b]);
    const int64_t pages = kv_indptr[b + 1] - kv_indptr[b], len = lens[b];
    int64_t tokens = 0;
    if (kv_lens) {
      if (len < 0 || len > pages * page_size) {
        detail::bad_index(detail::at(name, b), len,
                          "a length in [0, " + std::to_string(pages * page_size) +
                              "], what the request's pages hold");
      }
      tokens = len;
    } else if (pages > 0) {
      if (len < 1 || len > page_size) {
        detail::bad_index(detail::at(name, b), len,
                          "a value in [1, page_size = " + std::to_string(page_size) + "]");
      }
      tokens = (pages - 1) * page_size + len;
    }
    r.kv_len = detail::narrow("kv length of request", b, tokens);
  }
  detail::take_all_pages(layout, "kv_indices", kv_indices, kv_indptr[batch]);
  detail::finish(layout);
}

/// `block_tables` [batch, max_pages], row-major; only the entries that kv_lens needs are read.
inline void block_table_layout(Layout& layout, const IndexView* qo_indptr,
                               const IndexView& block_tables, int64_t max_pages,
                               const IndexView& kv_lens, int32_t page_size) {
  const int64_t batch = kv_lens.size;
  detail::start_requests(layout, qo_indptr, batch);
  detail::start_paged(layout, page_size);
  detail::check_length("block_tables", block_tables.size, batch * max_pages,
                       "batch_size x max_pages");
  int64_t count = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t len = kv_lens[b];
    if (len < 0 || len > max_pages * page_size) {
      detail::bad_index(detail::at("kv_lens", b), len,
                        "a length in [0, " + std::to_string(max_pages * page_size) +
                            "], what a row of block_tables holds");
    }
    Request& r = layout.requests[static_cast<size_t>(b)];
    r.kv_begin = static_cast<int32_t>(count);
    r.kv_len = detail::narrow("kv_lens", b, len);
    count += ceil_div<int64_t>(len, page_size);
  }
  detail::size_pages(layout, count);
  for (int64_t b = 0; b < batch; ++b) {
    const Request& r = layout.requests[static_cast<size_t>(b)];
    detail::take_pages(layout, r.kv_begin, "block_tables", block_tables, b * max_pages,
                       ceil_div<int64_t>(r.kv_len, page_size));
  }
  detail::finish(layout);
}

/// `kv_lens` [batch] or, with `heads` > 0, [batch, heads]: a request and a page table for every KV
/// head. Page ids are unknown, and whatever they are (core/resolve.h writes them where the plan
/// is); with a `common_prefix` they are such that a walk finds what is common, and nothing else.
inline void bounds_layout(Layout& layout, const IndexView* qo_indptr, const IndexView& kv_lens,
                          int32_t page_size, int32_t heads, int64_t common_prefix) {
  const int32_t tables = max_of(heads, 1);
  detail::start_requests(layout, qo_indptr, kv_lens.size / tables);
  detail::start_paged(layout, page_size);
  layout.bounds = true;
  if (heads > 0) {
    std::vector<Request> batch;
    batch.swap(layout.requests);
    for (const Request& r : batch) {
      layout.requests.insert(layout.requests.end(), static_cast<size_t>(heads), r);
      for (int32_t h = 0; h < heads; ++h) layout.kv_heads.push_back(h);
    }
  }
  int64_t count = 0;
  for (int64_t i = 0; i < kv_lens.size; ++i) {
    Request& r = layout.requests[static_cast<size_t>(i)];
    r.kv_begin = detail::narrow("pages of request", i, count);
    r.kv_len = detail::narrow("kv_lens", i, kv_lens[i]);
    count += ceil_div<int64_t>(r.kv_len, page_size);
  }
  detail::narrow("pages of request", kv_lens.size, count);
  detail::size_pages(layout, count);
  if (common_prefix != 0) detail::take_common_prefix(layout, common_prefix, heads);
  detail::finish(layout);
}

}  // namespace flashbsr
