// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// Shared parts given by hand: a page table per level, level 0 over the largest groups of queries,
// the last one over the requests themselves. A request's KV is that of its groups, level after
// level, and its own; as one page table and its shared parts, which is what a walk finds too.
#pragma once

#include <vector>

#include <flashbsr/plan/share.h>

namespace flashbsr {

/// A level: rows [qo_indptr[g], qo_indptr[g + 1]) of q see the pages of its group g.
struct LevelView {
  IndexView qo_indptr, kv_indptr, kv_indices, last_page_len;
};

namespace detail {

/// A level and the group of it that a request is in.
struct LevelWalk {
  const LevelView* level;
  Layout pages;  ///< its groups as requests, checked
  int64_t group = 0;
};

inline void check_nested(size_t level, const LevelWalk& outer, const LevelWalk& inner) {
  const IndexView &a = outer.level->qo_indptr, &b = inner.level->qo_indptr;
  const auto name = [&](int64_t i) {
    return "qo_indptr[" + std::to_string(level) + "][" + std::to_string(i) + "]";
  };
  int64_t at = 0;
  for (int64_t i = 0; i < a.size; ++i) {
    while (at < b.size && b[at] < a[i]) ++at;
    if (at == b.size || b[at] != a[i]) {
      bad_index(name(i), a[i], "a place where a group of the next level begins or ends");
    }
  }
  if (a[a.size - 1] != b[b.size - 1]) {
    bad_index(name(a.size - 1), a[a.size - 1],
              std::to_string(b[b.size - 1]) + ", the query tokens of the last level");
  }
}

}  // namespace detail

/// @param needed  set where a level ends inside of a page: positions then have a gap behind it, and
///                the parts cannot be given up for the requests' own page lists
inline void levels_layout(Layout& layout, Sharing& sharing, const std::vector<LevelView>& levels,
                          int32_t page_size, bool& needed) {
  std::vector<detail::LevelWalk> walk(levels.size());
  for (size_t l = 0; l < levels.size(); ++l) {
    walk[l].level = &levels[l];
    paged_layout(walk[l].pages, &levels[l].qo_indptr, levels[l].kv_indptr, levels[l].kv_indices,
                 &levels[l].last_page_len, nullptr, page_size);
  }
  for (size_t l = 0; l + 1 < levels.size(); ++l) detail::check_nested(l, walk[l], walk[l + 1]);

  sharing.clear();
  needed = false;
  const Layout& own = walk.back().pages;
  layout = own;
  layout.kv_indices.clear();
  sharing.kv_first.assign(own.requests.size(), 0);
  for (size_t r = 0; r < own.requests.size(); ++r) {
    Request& request = layout.requests[r];
    const int32_t place = static_cast<int32_t>(sharing.order.size());
    if (request.q_len > 0) sharing.order.push_back(static_cast<int32_t>(r));
    request.kv_begin = static_cast<int32_t>(layout.kv_indices.size());
    int64_t position = 0;
    for (size_t l = 0; l < levels.size(); ++l) {
      detail::LevelWalk& at = walk[l];
      const bool last = l + 1 == levels.size();
      if (last) at.group = static_cast<int64_t>(r);
      // The group of the request's first query; one without queries sees nothing anyway.
      while (!last && at.group + 1 < at.level->qo_indptr.size - 1 &&
             at.level->qo_indptr[at.group + 1] <= request.q_begin) {
        ++at.group;
      }
      const Request& group = at.pages.requests[static_cast<size_t>(at.group)];
      const auto first = at.pages.kv_indices.begin() + group.kv_begin;
      layout.kv_indices.insert(layout.kv_indices.end(), first,
                               first + ceil_div(group.kv_len, page_size));
      layout.num_kv_rows = max_of(layout.num_kv_rows, at.pages.num_kv_rows);
      const int64_t end = position + group.kv_len;
      if (last) {
        request.kv_len = detail::narrow("kv length of request", static_cast<int64_t>(r), end);
      } else if (group.kv_len > 0 && request.q_len > 0) {
        const int32_t begin = static_cast<int32_t>(position);
        const bool goes_on = request.q_begin > group.q_begin;
        if (!goes_on) {
          sharing.parts.push_back({begin, static_cast<int32_t>(end), place, place + 1});
        } else {
          for (size_t p = sharing.parts.size(); p-- > 0;) {
            SharedPart& part = sharing.parts[p];
            if (part.begin != begin || part.last != place) continue;
            ++part.last;
            break;
          }
        }
        needed = needed || group.kv_len % page_size != 0;
        sharing.kv_first[r] = static_cast<int32_t>(round_up<int64_t>(end, page_size));
      }
      position = last ? end : round_up<int64_t>(end, page_size);
    }
  }
  detail::finish(layout);
}

}  // namespace flashbsr
