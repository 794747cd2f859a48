# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of `bad_table` about plans: layouts, capacity, masks."""

from __future__ import annotations

import numpy as np
from bad_calls import (
    F32,
    HUGE,
    Bad,
    i32,
    i64,
    plan_anything,
    plan_bsr,
    plan_levels,
    plan_paged,
    plan_ragged,
    plan_table,
)
from flashbsr import Ragged, block_mask

# fmt: off
MASK = np.ones(3 * 10 + 4 + 2 * 3, bool)  # of the world's batch
PACKED = np.full(4 + 1 + 1, 0xFF, np.uint8)

BAD_PLANS = [
    # --- plan: what is no layout, and options
    Bad(plan_anything, "layout", "an array", {"layout": i32(0, 3, 4, 6)}),
    Bad(plan_anything, "layout", "a mask before layout()",
        {"layout": block_mask(lambda b, h, q, kv: kv <= q, 6, 16)}),
    Bad(plan_anything, "layout", "the class itself", {"layout": Ragged}),
    Bad(plan_ragged, "share_prefixes", "unknown name", {"share_prefixes": "on"}),
    # --- plan: qo_indptr
    Bad(plan_ragged, "qo_indptr", "does not start at 0", {"qo_indptr": i32(1, 3, 4, 6)}),
    Bad(plan_ragged, "qo_indptr", "decreases", {"qo_indptr": i32(0, 4, 3, 6)}),
    Bad(plan_ragged, "qo_indptr", "negative", {"qo_indptr": i32(0, 3, -1, 6)}),
    Bad(plan_ragged, "qo_indptr", "overflows int32", {"qo_indptr": i64(0, 3, 4, HUGE)}),
    Bad(plan_ragged, "qo_indptr", "wraps to a good value in int32",
        {"qo_indptr": i64(0, 3, 4, 2**32 + 6)}),
    Bad(plan_ragged, "qo_indptr", "rank 2", {"qo_indptr": i32(0, 3, 4, 6)[None]}),
    Bad(plan_ragged, "qo_indptr", "float", {"qo_indptr": np.array([0.0, 3, 4, 6])}),
    Bad(plan_ragged, "qo_indptr", "bool", {"qo_indptr": np.zeros(4, bool)}),
    Bad(plan_ragged, "qo_indptr", "empty", {"qo_indptr": i32()}),
    Bad(plan_ragged, "qo_indptr", "text", {"qo_indptr": "0346"}),
    Bad(plan_ragged, "qo_indptr|kv_indptr", "another batch size", {"qo_indptr": i32(0, 3, 6)}),
    Bad(plan_ragged, "qo_indptr", "scalar", {"qo_indptr": 5}),
    # --- plan: kv_indptr
    Bad(plan_ragged, "kv_indptr", "does not start at 0", {"kv_indptr": i32(2, 10, 14, 17)}),
    Bad(plan_ragged, "kv_indptr", "decreases", {"kv_indptr": i32(0, 14, 10, 17)}),
    Bad(plan_ragged, "kv_indptr", "overflows int32", {"kv_indptr": i64(0, 10, 14, HUGE)}),
    Bad(plan_ragged, "kv_indptr", "none", {"kv_indptr": None}),
    Bad(plan_ragged, "kv_indptr", "complex", {"kv_indptr": np.zeros(4, complex)}),
    # --- plan: pages
    Bad(plan_paged, "page_size", "zero", {"page_size": 0}),
    Bad(plan_paged, "page_size", "text", {"page_size": "16"}),
    Bad(plan_paged, "page_size", "none", {"page_size": None}),
    Bad(plan_paged, "kv_indptr", "decreases", {"kv_indptr": i32(0, 3, 2, 5)}),
    Bad(plan_paged, "kv_indices", "none", {"kv_indices": None}),
    Bad(plan_paged, "kv_indices", "too short", {"kv_indices": i32(6, 0, 2, 5)}),
    Bad(plan_paged, "kv_indices", "negative", {"kv_indices": i32(6, 0, -2, 5, 1)}),
    Bad(plan_paged, "kv_indices", "overflows int32", {"kv_indices": i64(6, 0, 2**32, 5, 1)}),
    Bad(plan_paged, "kv_indices", "float", {"kv_indices": np.arange(5, dtype=F32)}),
    Bad(plan_paged, "kv_indices", "rank 2", {"kv_indices": i32(6, 0, 2, 5, 1)[:, None]}),
    Bad(plan_paged, "last_page_len|kv_lens", "no lengths", {"last_page_len": None}),
    Bad(plan_paged, "last_page_len|kv_lens", "both lengths", {"kv_lens": i32(10, 4, 3)}),
    Bad(plan_paged, "last_page_len", "zero", {"last_page_len": i32(2, 0, 3)}),
    Bad(plan_paged, "last_page_len", "above the page size", {"last_page_len": i32(2, 5, 3)}),
    Bad(plan_paged, "last_page_len", "negative", {"last_page_len": i32(-2, 4, 3)}),
    Bad(plan_paged, "last_page_len", "another batch size", {"last_page_len": i32(2, 4)}),
    Bad(plan_paged, "last_page_len", "float", {"last_page_len": np.array([2.0, 4, 3])}),
    Bad(plan_paged, "kv_lens", "more than the pages hold",
        {"last_page_len": None, "kv_lens": i32(13, 4, 3)}),
    Bad(plan_paged, "kv_lens", "negative", {"last_page_len": None, "kv_lens": i32(10, -4, 3)}),
    Bad(plan_paged, "kv_lens", "another batch size",
        {"last_page_len": None, "kv_lens": i32(10, 4, 3, 1)}),
    Bad(plan_paged, "qo_indptr", "decode with another batch size", {"qo_indptr": i32(0, 1, 2)}),
    # --- plan: capacity
    Bad(plan_paged, "max_batch_size|qo_indptr", "capacity",
        {"task": {"max_batch_size": 2, "max_q_tokens": 6, "max_kv_pages": 5}}),
    Bad(plan_paged, "max_q_tokens|qo_indptr", "capacity",
        {"task": {"max_batch_size": 3, "max_q_tokens": 5, "max_kv_pages": 5}}),
    Bad(plan_paged, "max_kv_pages|kv_ind", "capacity",
        {"task": {"max_batch_size": 3, "max_q_tokens": 6, "max_kv_pages": 4}}),
    Bad(
        plan_ragged,
        "max_kv_pages|kv_ind",
        "capacity",
        {
            "task": {
                "max_batch_size": 3,
                "max_q_tokens": 6,
                "max_kv_pages": 16,
                "fixed_split_size": 1,
            }
        },
    ),
    # --- plan: masks
    Bad(plan_ragged, "custom_mask", "too short", {"custom_mask": MASK[:-1]}),
    Bad(plan_ragged, "custom_mask", "too long", {"custom_mask": np.append(MASK, True)}),
    Bad(plan_ragged, "custom_mask", "float", {"custom_mask": MASK.astype(F32)}),
    Bad(plan_ragged, "packed_custom_mask", "too short", {"packed_custom_mask": PACKED[:-1]}),
    Bad(plan_ragged, "packed_custom_mask", "int32",
        {"packed_custom_mask": PACKED.astype(np.int32)}),
    Bad(plan_ragged, "packed_custom_mask|custom_mask", "both",
        {"custom_mask": MASK, "packed_custom_mask": PACKED}),
    # --- plan: a block table
    Bad(plan_table, "page_size", "zero", {"page_size": 0}),
    Bad(plan_table, "page_size", "float", {"page_size": 4.0}),
    Bad(plan_table, "block_tables", "rank 1", {"block_tables": i32(6, 5, 1)}),
    Bad(plan_table, "block_tables|kv_lens", "another batch size",
        {"block_tables": np.zeros((2, 3), np.int32)}),
    Bad(plan_table, "block_tables", "negative page in use",
        {"block_tables": np.array([[6, -1, 2], [5, 0, 0], [1, 0, 0]], np.int32)}, cpu_only=True),
    Bad(plan_table, "block_tables", "float", {"block_tables": np.zeros((3, 3), F32)}),
    Bad(plan_table, "kv_lens", "more than the table holds", {"kv_lens": i32(13, 4, 3)}),
    Bad(plan_table, "kv_lens", "negative", {"kv_lens": i32(10, -1, 3)}),
    Bad(plan_table, "kv_lens", "float", {"kv_lens": np.array([10.0, 4, 3])}),
    Bad(plan_table, "block_tables|kv_lens", "another batch", {"kv_lens": i32(10, 4)}),
    # --- plan: levels
    Bad(plan_levels, "qo_indptr|kv_indptr", "one array missing",
        {"kv_indptr": (i32(0, 2),)}),
    Bad(plan_levels, "qo_indptr", "no levels",
        {"qo_indptr": (), "kv_indptr": (), "kv_indices": (), "last_page_len": ()}),
    Bad(plan_levels, "qo_indptr", "not nested",
        {"qo_indptr": (i32(0, 2, 6), i32(0, 3, 4, 6)), "kv_indptr": (i32(0, 1, 2), i32(0, 1, 2, 3)),
         "last_page_len": (i32(4, 4), i32(2, 4, 3))}),
    Bad(plan_levels, "kv_indptr", "decreases", {"kv_indptr": (i32(0, 2), i32(0, 2, 1, 3))}),
    Bad(plan_levels, "kv_indices", "negative page", {"kv_indices": (i32(6, -1), i32(2, 5, 1))}),
    Bad(plan_levels, "last_page_len", "above the page size",
        {"last_page_len": (i32(4), i32(2, 5, 3))}),
    Bad(plan_levels, "last_page_len", "float", {"last_page_len": (i32(4), np.ones(3, F32))}),
    Bad(plan_levels, "page_size", "zero", {"page_size": 0}),
    # --- plan: a block-sparse matrix
    Bad(plan_bsr, "indptr", "wrong length", {"indptr": i32(0, 2, 3, 3)}),
    Bad(plan_bsr, "indptr", "decreases", {"indptr": i32(0, 4, 3)}),
    Bad(plan_bsr, "indices", "column out of range", {"indices": i32(0, 4, 1)}),
    Bad(plan_bsr, "indices", "negative column", {"indices": i32(0, -1, 1)}),
    Bad(plan_bsr, "indices", "too short", {"indices": i32(0, 3)}),
    Bad(plan_bsr, "N", "negative", {"shape": (6, -16)}),
    Bad(plan_bsr, "indices", "the short column twice", {"shape": (6, 15), "indices": i32(3, 3, 1)}),
    Bad(plan_bsr, "indptr", "of one head", {"per_head": True}),
    Bad(plan_bsr, "R", "rows that end early", {"block": (i32(0, 3, 5), 4)}),
    Bad(plan_bsr, "R", "rows that go back", {"block": (i32(0, 7, 6), 4)}),
    Bad(plan_bsr, "R", "rows of one head", {"block": (i32(0, 3, 6), 4), "per_head": True}),
    Bad(plan_bsr, "mask", "rows of any size",
        {"block": (i32(0, 3, 6), 4), "mask": np.ones((3, 3, 4), bool)}),
    Bad(plan_bsr, "R", "no number", {"block": (2.5, 4)}),
    Bad(plan_bsr, "R", "zero", {"block": (0, 4)}),
    Bad(plan_bsr, "C", "zero", {"block": (3, 0)}),
    Bad(plan_bsr, "M", "negative", {"shape": (-6, 16)}),
    Bad(plan_bsr, "mask", "wrong shape", {"mask": np.ones((2, 3, 4), bool)}),
    Bad(plan_bsr, "packed_mask", "too short", {"packed_mask": np.zeros(4, np.uint8)}),
]
# fmt: on
