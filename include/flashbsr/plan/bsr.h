// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The front-ends of block-sparse matrices: block rows become requests, block columns pages.
//
//   bsr_layout           block rows of r query tokens, the last one of what is left
//   variable_bsr_layout  block rows that begin where the caller says
//
// Columns are blocks of c KV tokens, the last one of what is left. A matrix is one for all KV
// heads, or each has its own: then a request belongs to one of them.
#pragma once

#include <algorithm>
#include <utility>

#include <flashbsr/plan/layout.h>

namespace flashbsr {

struct BsrShape {
  int64_t m = 0;      ///< query tokens
  int64_t n = 0;      ///< KV tokens
  int64_t r = 1;      ///< query tokens of a block row, where all have the same
  int64_t c = 1;      ///< KV tokens of a block column: the page size
  int32_t heads = 0;  ///< > 0: every KV head has block rows of its own, head after head
};

namespace detail {

inline void check_bsr_size(const char* name, int64_t value, int64_t least) {
  if (value < least || value > std::numeric_limits<int32_t>::max()) {
    throw Error(ErrorCode::kValue, name, std::to_string(value),
                "a value in [" + std::to_string(least) + ", 2^31)");
  }
}

inline void check_bsr_shape(const BsrShape& s) {
  check_bsr_size("R", s.r, 1);
  check_bsr_size("C", s.c, 1);
  check_bsr_size("M", s.m, 0);
  check_bsr_size("N", s.n, 0);
}

/// The short last column becomes the last page of the block rows that have it, so that there is no
/// gap in their positions.
inline void put_short_column_last(Layout& layout, const BsrShape& s) {
  const int32_t column = static_cast<int32_t>(s.n / s.c);
  for (Request& r : layout.requests) {
    int32_t* begin = layout.kv_indices.data() + r.kv_begin;
    int32_t* end = begin + r.kv_len / s.c;
    int32_t* found = std::find(begin, end, column);
    if (found == end) continue;
    if (int32_t* again = std::find(found + 1, end, column); again != end) {
      bad_index(at("indices", again - layout.kv_indices.data()), column,
                "the last column, which is short, once in a block row");
    }
    std::swap(*found, end[-1]);
    r.kv_len -= static_cast<int32_t>(s.c - s.n % s.c);
  }
  layout.num_kv_tokens = s.n;
}

/// Requests of `rows` block rows, or so many of every KV head; queries(i) is the first query token
/// of block row i, and their number.
template <class Queries>
void block_rows(Layout& layout, const IndexView& indptr, const IndexView& indices,
                const BsrShape& s, int64_t rows, const Queries& queries) {
  const int64_t count = rows * max_of(s.heads, 1), columns = ceil_div(s.n, s.c);
  check_indptr("indptr", indptr);
  check_length("indptr", indptr.size, count + 1,
               s.heads ? "num_kv_heads x block rows + 1" : "ceil(M / R) + 1");
  check_length("indices", indices.size, indptr[count], "indptr[-1]");
  layout.decode = false;
  layout.shared_kv = true;
  layout.requests.assign(static_cast<size_t>(count), Request{});
  layout.kv_heads.clear();
  layout.num_kv_tokens = 0;
  start_paged(layout, static_cast<int32_t>(s.c));
  layout.num_q_tokens = s.m;
  for (int64_t i = 0; i < count; ++i) {
    Request& request = layout.requests[static_cast<size_t>(i)];
    const std::pair<int64_t, int64_t> q = queries(i);
    request.q_begin = static_cast<int32_t>(q.first);
    request.q_len = static_cast<int32_t>(q.second);
    request.kv_begin = static_cast<int32_t>(indptr[i]);
    request.kv_len = narrow("indptr", i + 1, (indptr[i + 1] - indptr[i]) * s.c);
    request.mask_lo = request.mask_hi = -1;
    request.index = static_cast<int32_t>(i);
    if (s.heads) layout.kv_heads.push_back(static_cast<int32_t>(i / rows));
  }
  size_pages(layout, indptr[count]);
  take_pages(layout, 0, "indices", indices, 0, indptr[count]);
  if (layout.num_kv_rows > columns) {
    const auto wrong = std::find_if(layout.kv_indices.begin(), layout.kv_indices.end(),
                                    [&](int32_t column) { return column >= columns; });
    bad_index(at("indices", wrong - layout.kv_indices.begin()), *wrong,
              "a block column below ceil(N / C) = " + std::to_string(columns));
  }
  // The matrix has n columns even where the last ones hold no block.
  layout.num_kv_rows = columns;
  if (s.n % s.c) put_short_column_last(layout, s);
  finish(layout);
}

}  // namespace detail

inline void bsr_layout(Layout& layout, const IndexView& indptr, const IndexView& indices,
                       const BsrShape& s) {
  detail::check_bsr_shape(s);
  const int64_t rows = ceil_div(s.m, s.r);
  detail::block_rows(layout, indptr, indices, s, rows, [&](int64_t i) {
    const int64_t first = i % rows * s.r;
    return std::pair(first, min_of(s.r, s.m - first));
  });
}

/// `row_indptr`: where block rows begin and the last ends, [rows + 1], or of every KV head,
/// [heads, rows + 1].
inline void variable_bsr_layout(Layout& layout, const IndexView& row_indptr,
                                const IndexView& indptr, const IndexView& indices,
                                const BsrShape& s) {
  detail::check_bsr_shape(s);
  const int64_t heads = max_of(s.heads, 1), starts = row_indptr.size / heads;
  if (starts < 1 || row_indptr.size % heads) {
    throw Error(ErrorCode::kShape, "R", std::to_string(row_indptr.size) + " boundaries of rows",
                s.heads ? "block rows + 1 for each of " + std::to_string(heads) + " KV heads"
                        : "block rows + 1");
  }
  for (int64_t i = 0; i < row_indptr.size; ++i) {
    const int64_t nth = i % starts, least = nth ? row_indptr[i - 1] : 0;
    if (row_indptr[i] < least || (nth == 0 && row_indptr[i] > 0)) {
      detail::bad_index(detail::at("R", i), row_indptr[i],
                        nth ? "at least " + std::to_string(least) + ", which is before it" : "0");
    }
    if (nth == starts - 1 && row_indptr[i] != s.m) {
      detail::bad_index(detail::at("R", i), row_indptr[i], "M = " + std::to_string(s.m));
    }
  }
  const int64_t rows = starts - 1;
  detail::block_rows(layout, indptr, indices, s, rows, [&](int64_t i) {
    const int64_t first = i / rows * starts + i % rows;
    return std::pair(row_indptr[first], row_indptr[first + 1] - row_indptr[first]);
  });
}

/// Neighbouring block rows with the same columns become one request: one tile of rows then serves
/// several, and K and V are loaded once for them. For layouts without masks.
inline void join_equal_rows(Layout& layout) {
  const auto pages_of = [&](const Request& r) {
    return ceil_div<int64_t>(r.kv_len, layout.page_size);
  };
  const auto same = [&](size_t a, size_t b) {
    const Request &x = layout.requests[a], &y = layout.requests[b];
    const int32_t *px = layout.kv_indices.data() + x.kv_begin,
                  *py = layout.kv_indices.data() + y.kv_begin;
    return x.kv_len == y.kv_len && x.q_begin + x.q_len == y.q_begin &&
           (layout.kv_heads.empty() || layout.kv_heads[a] == layout.kv_heads[b]) &&
           std::equal(px, px + pages_of(x), py);
  };
  size_t kept = 0;
  int64_t end = 0;
  for (size_t i = 0; i < layout.requests.size(); ++i) {
    if (kept && same(kept - 1, i)) {
      layout.requests[kept - 1].q_len += layout.requests[i].q_len;
      continue;
    }
    Request r = layout.requests[i];
    const int64_t count = pages_of(r);
    std::copy_n(layout.kv_indices.begin() + r.kv_begin, count, layout.kv_indices.begin() + end);
    r.kv_begin = static_cast<int32_t>(end);
    r.index = static_cast<int32_t>(kept);
    if (!layout.kv_heads.empty()) layout.kv_heads[kept] = layout.kv_heads[i];
    layout.requests[kept++] = r;
    end += count;
  }
  layout.requests.resize(kept);
  if (!layout.kv_heads.empty()) layout.kv_heads.resize(kept);
  layout.kv_indices.resize(static_cast<size_t>(end));
  detail::finish(layout);
}

}  // namespace flashbsr
