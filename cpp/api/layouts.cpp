// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
#include "layouts.h"

namespace flashbsr::api {

namespace {

const IndexView* optional_indices(const std::optional<Array>& a, IndexView& storage) {
  if (!a) return nullptr;
  storage = indices(*a);
  return &storage;
}

void write(const RaggedArrays& a, LaidOut& to) {
  IndexView qo;
  ragged_layout(to.layout, optional_indices(a.qo_indptr, qo), indices(a.kv_indptr));
}

void write(const PagedArrays& a, LaidOut& to) {
  IndexView qo, last, lens;
  to.layout.borrow_pages = true;
  paged_layout(to.layout, optional_indices(a.qo_indptr, qo), indices(a.kv_indptr),
               indices(a.kv_indices), optional_indices(a.last_page_len, last),
               optional_indices(a.kv_lens, lens), a.page_size);
  to.may_be_shared = true;
}

void write(const BlockTableArrays& a, LaidOut& to) {
  const Array& table = a.block_tables;
  check_element(table, {Element::kI32, Element::kI64});
  check_rank(table, 2, "[batch_size, max_pages]");
  check_contiguous(table);
  Array flat = table;
  flat.ndim = 1;
  flat.shape[0] = table.size();
  flat.stride[0] = 1;
  const IndexView lens = indices(a.kv_lens);
  if (lens.size != table.shape[0]) {
    bad_shape(a.kv_lens, "shape (" + std::to_string(table.shape[0]) + ",), one per block table");
  }
  IndexView qo;
  block_table_layout(to.layout, optional_indices(a.qo_indptr, qo), indices(flat), table.shape[1],
                     lens, a.page_size);
  to.may_be_shared = true;
}

void write(const BoundsArrays& a, LaidOut& to) {
  IndexView qo;
  bounds_layout(to.layout, optional_indices(a.qo_indptr, qo), indices(a.kv_lens), a.page_size,
                a.heads, a.common_prefix);
  to.may_be_shared = a.common_prefix > 0;
}

void write(const LevelsArrays& a, LaidOut& to) {
  std::vector<LevelView> views;
  for (const LevelsArrays::Level& level : a.levels) {
    views.push_back({indices(level.qo_indptr), indices(level.kv_indptr), indices(level.kv_indices),
                     indices(level.last_page_len)});
  }
  levels_layout(to.layout, to.given, views, a.page_size, to.given_needed);
}

void write(const BsrArrays& a, LaidOut& to) {
  if (a.row_indptr) {
    variable_bsr_layout(to.layout, indices(*a.row_indptr), indices(a.indptr), indices(a.indices),
                        a.shape);
  } else {
    bsr_layout(to.layout, indices(a.indptr), indices(a.indices), a.shape);
  }
  to.masked = a.mask.given();
  if (to.masked) {
    take_block_mask(a.mask, a.shape.r, indices(a.indices), to.layout, to.mask);
  } else {
    join_equal_rows(to.layout);
  }
}

/// Positions stay where neither they nor a window's length beyond them leaves 32 bits.
constexpr int64_t kFarthest = int64_t{1} << 30;

void place_queries(const Placement& placement, Layout& layout) {
  const Array& a = *placement.q_positions;
  const IndexView positions = indices(a);
  flashbsr::detail::check_length(a.name, positions.size,
                                 static_cast<int64_t>(layout.requests.size()), "batch_size");
  for (int64_t b = 0; b < positions.size; ++b) {
    const int64_t position = positions[b];
    if (position < -kFarthest || position > kFarthest) {
      flashbsr::detail::bad_index(flashbsr::detail::at(a.name, b), position,
                                  "a position within 2^30");
    }
    layout.positions.push_back(static_cast<int32_t>(position));
  }
}

/// Whether each request's first query, and so all of them, is behind its last key.
bool see_all(const Shape& shape, const Layout& layout) {
  PlanHeader h{};
  shape.write_visibility(h);
  for (size_t b = 0; b < layout.requests.size(); ++b) {
    const Request& r = layout.requests[b];
    if (r.q_len > 0 && keys_before(h, layout.positions[b] + 1) < r.kv_len) return false;
  }
  return true;
}

void check_keys(const Shape& shape, const Layout& layout) {
  for (const Request& r : layout.requests) {
    if (r.kv_len * int64_t{shape.context_size} <= kFarthest) continue;
    flashbsr::detail::bad_index(flashbsr::detail::at("kv length of request", r.index), r.kv_len,
                                "at most 2^30 tokens on all ranks together");
  }
}

}  // namespace

void lay_out(const LayoutArrays& arrays, const MaskArrays& mask, const Placement& placement,
             LaidOut& to) {
  to.masked = to.given_needed = to.may_be_shared = to.placed = to.sees_all = false;
  to.given.clear();
  to.layout.positions.clear();
  std::visit([&](const auto& a) { write(a, to); }, arrays);
  const bool matrix =
      std::holds_alternative<LevelsArrays>(arrays) || std::holds_alternative<BsrArrays>(arrays);
  if (placement.shape.context_size > 1) check_keys(placement.shape, to.layout);
  if (placement.q_positions) {
    if (matrix || !to.layout.kv_heads.empty()) {
      throw Error(ErrorCode::kUnsupported, "q_positions", "an array",
                  "None with this layout: levels, matrices and tables of heads have no positions "
                  "of their own");
    }
    if (mask.boolean || mask.packed) {
      throw Error(ErrorCode::kValue, "q_positions", "an array next to a mask",
                  "None: a mask says all there is to say");
    }
    if (mask.parents && to.layout.bounds) {
      throw Error(ErrorCode::kUnsupported, "q_positions", "an array next to tree_parents",
                  "a layout of lengths: with Bounds it is not known which of a tree's keys are "
                  "here");
    }
    place_queries(placement, to.layout);
    to.placed = true;
    to.sees_all = !to.layout.bounds && see_all(placement.shape, to.layout);
  }
  if (!mask.given()) return;
  const Array& one = mask.boolean ? *mask.boolean : mask.packed ? *mask.packed : *mask.parents;
  if (to.layout.bounds && !mask.parents) {
    throw Error(ErrorCode::kUnsupported, one.name, "an array",
                "None with Bounds, whose lengths a mask would have to know; tree_parents, or a "
                "layout of lengths");
  }
  if (matrix) {
    throw Error(
        ErrorCode::kUnsupported, one.name, "an array",
        "None with this layout: a block-sparse matrix has masks of its blocks, levels none");
  }
  take_mask(mask, to.placed ? &placement.shape : nullptr, to.layout, to.mask);
  to.masked = true;
}

}  // namespace flashbsr::api
