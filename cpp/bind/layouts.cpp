// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "layouts.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

namespace flashbsr::bind {

api::Array LayoutImport::take(nb::handle object, const char* name) {
  keep_.emplace_back(object, name);
  return keep_.back().array();
}

std::optional<api::Array> LayoutImport::maybe(nb::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return take(object, name);
}

LayoutImport::LayoutImport(const nb::tuple& views) {
  const std::string kind = nb::cast<std::string>(views[0]);
  const auto number = [&](size_t i) { return nb::cast<int32_t>(views[i]); };
  if (kind == "ragged") {
    arrays_ = api::RaggedArrays{.qo_indptr = maybe(views[1], "qo_indptr"),
                                .kv_indptr = take(views[2], "kv_indptr")};
  } else if (kind == "paged") {
    arrays_ = api::PagedArrays{.qo_indptr = maybe(views[1], "qo_indptr"),
                               .kv_indptr = take(views[2], "kv_indptr"),
                               .kv_indices = take(views[3], "kv_indices"),
                               .last_page_len = maybe(views[4], "last_page_len"),
                               .kv_lens = maybe(views[5], "kv_lens"),
                               .page_size = number(6)};
  } else if (kind == "block_table") {
    arrays_ = api::BlockTableArrays{.qo_indptr = maybe(views[1], "qo_indptr"),
                                    .block_tables = take(views[2], "block_tables"),
                                    .kv_lens = take(views[3], "kv_lens"),
                                    .page_size = number(4)};
  } else if (kind == "bounds") {
    arrays_ = api::BoundsArrays{.qo_indptr = maybe(views[1], "qo_indptr"),
                                .kv_lens = take(views[2], "kv_lens"),
                                .page_size = number(3),
                                .heads = number(4),
                                .common_prefix = nb::cast<int64_t>(views[5])};
  } else if (kind == "levels") {
    api::LevelsArrays levels{.levels = {}, .page_size = number(2)};
    for (const nb::handle level : nb::cast<nb::tuple>(views[1])) {
      levels.levels.push_back({.qo_indptr = take(level[0], "qo_indptr"),
                               .kv_indptr = take(level[1], "kv_indptr"),
                               .kv_indices = take(level[2], "kv_indices"),
                               .last_page_len = take(level[3], "last_page_len")});
    }
    arrays_ = std::move(levels);
  } else if (kind == "bsr") {
    const auto [m, n, r, c] =
        nb::cast<std::tuple<int64_t, int64_t, int64_t, int64_t>>(nb::handle(views[4]));
    arrays_ = api::BsrArrays{.row_indptr = maybe(views[1], "R"),
                             .indptr = take(views[2], "indptr"),
                             .indices = take(views[3], "indices"),
                             .shape = {m, n, r, c, number(5)},
                             .mask = {.boolean = maybe(views[6], "mask"),
                                      .packed = maybe(views[7], "packed_mask"),
                                      .parents = {}}};
  } else {
    throw Error(ErrorCode::kValue, "layout", kind, "a kind of cpp/bind/layouts.cpp");
  }
}

}  // namespace flashbsr::bind
