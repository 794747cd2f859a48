// SPDX-FileCopyrightText: 2026 The flashbsr authors
// SPDX-License-Identifier: Apache-2.0
//
// The layouts that a caller names, each the struct of its arrays, and how one becomes a batch: the
// only place between the bindings and the front-ends of flashbsr/plan that knows them apart.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include <flashbsr/plan/bsr.h>
#include <flashbsr/plan/levels.h>

#include "arrays.h"

namespace flashbsr::api {

/// KV of consecutive token rows.
struct RaggedArrays {
  std::optional<Array> qo_indptr;  ///< empty: one query token each
  Array kv_indptr;
};

/// Pages in CSR form, with one of the last two for their lengths.
struct PagedArrays {
  std::optional<Array> qo_indptr;
  Array kv_indptr, kv_indices;
  std::optional<Array> last_page_len, kv_lens;
  int32_t page_size = 1;
};

/// A dense table of pages, [batch, max_pages].
struct BlockTableArrays {
  std::optional<Array> qo_indptr;
  Array block_tables, kv_lens;
  int32_t page_size = 1;
};

/// The most that requests may have; their lengths and pages come with LengthArrays (lengths.h).
struct BoundsArrays {
  std::optional<Array> qo_indptr;
  Array kv_lens;  ///< [batch], or [batch x heads]
  int32_t page_size = 1;
  int32_t heads = 0;          ///< > 0: each KV head has a length and a page table of its own
  int64_t common_prefix = 0;  ///< that all requests begin with that have queries and keys
};

/// KV that requests share, level by level; the last level is the requests' own.
struct LevelsArrays {
  struct Level {
    Array qo_indptr, kv_indptr, kv_indices, last_page_len;
  };
  std::vector<Level> levels;
  int32_t page_size = 1;
};

/// A block-sparse matrix; its masks are of blocks.
struct BsrArrays {
  std::optional<Array> row_indptr;  ///< where block rows begin; empty: every shape.r tokens
  Array indptr, indices;
  BsrShape shape;
  MaskArrays mask;
};

using LayoutArrays = std::variant<RaggedArrays, PagedArrays, BlockTableArrays, BoundsArrays,
                                  LevelsArrays, BsrArrays>;

/// What the scheduler is given, kept from plan to plan for its memory.
struct LaidOut {
  Layout layout;
  std::vector<uint8_t> mask;  ///< bits
  bool masked = false;
  Sharing given;               ///< of levels
  bool given_needed = false;   ///< the requests' own page lists do not say the same
  bool may_be_shared = false;  ///< requests with the same pages may be looked for
  bool placed = false;         ///< requests say where their queries are
  bool sees_all = false;       ///< and causality hides no key of theirs
};

/// Positions of requests' first query tokens, [batch], and what keys there are (Shape's context).
struct Placement {
  std::optional<Array> q_positions;
  const Shape& shape;
};

/// Checks the arrays completely and writes `to`, which may borrow page ids from them. `mask`: of
/// requests' pairs.
void lay_out(const LayoutArrays& arrays, const MaskArrays& mask, const Placement& placement,
             LaidOut& to);

}  // namespace flashbsr::api
