# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cascades given by hand: KV that groups of requests share, level by level; merging states.

All levels are one plan and one launch, and their states are merged in float32. Plans find shared
prefixes by themselves (``share_prefixes="auto"``): who has one page table with the shared pages in
it needs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import adapter_for, float_dtype, to_indices
from ..arrays.dtypes import Q_DTYPES, output_dtype
from ..arrays.types import Array, DType
from ..errors import PlanError, ShapeError, renamed
from ..layout.joined import pages_within
from ..layout.layouts import Layout, Levels
from ..ops import state
from ._arguments import FLOAT16, Number, Workspace, described, refuse
from ._composed import Composed
from .decode import PagedWrapper
from .prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
           "BatchPrefillWithSharedPrefixPagedKVCacheWrapper", "MultiLevelCascadeAttentionWrapper",
           "merge_state", "merge_state_in_place", "merge_states"]  # fmt: skip


@described("merge")
def merge_state(
    v_a: Array, s_a: Array, v_b: Array, s_b: Array, *, lse_base: str = "2"
) -> tuple[Array, Array]:
    """Merge two states into ``(v, s)``: `flashbsr.merge_state` in base 2."""
    return state.merge_state(v_a, s_a, v_b, s_b, lse_base=lse_base)


@described("merge")
def merge_state_in_place(
    v: Array, s: Array, v_other: Array, s_other: Array, mask: Array = None, *, lse_base: str = "2"
) -> None:
    """Merge a state into another, in base 2."""
    state.merge_state_in_place(v, s, v_other, s_other, mask, lse_base=lse_base)


@described("merge")
def merge_states(v: Array, s: Array, *, lse_base: str = "2") -> tuple[Array, Array]:
    """Merge any number of states, in their order, into ``(v, s)``, in base 2."""
    return state.merge_states(v, s, lse_base=lse_base)


class MultiLevelCascadeAttentionWrapper(PagedWrapper):
    """Prefill, append or decode of requests that share KV on any number of levels."""

    _context = ("levels",)
    _spelling: ClassVar[dict[str, str]] = {
        "qo_indptr": "qo_indptr_arr", "kv_indptr": "paged_kv_indptr_arr",
        "kv_indices": "paged_kv_indices_arr", "last_page_len": "paged_kv_last_page_len",
        "kv": "paged_kv_cache",
    }  # fmt: skip
    _LISTS = (
        "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len",
    )  # fmt: skip

    def __init__(
        self, num_levels: int, float_workspace_buffer: Workspace = None, kv_layout: str = "NHD",
        use_cuda_graph: bool = False, qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None, paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None, *, backend: str = "auto", lse_base: str = "2",
        num_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._num_levels = check_int("num_levels", num_levels, 1)
        refuse("levels", use_cuda_graph=use_cuda_graph)
        self._set_up({**locals(), "use_cuda_graph": False})

    def plan(
        self, qo_indptr_arr: Sequence[Array], paged_kv_indptr_arr: Sequence[Array],
        paged_kv_indices_arr: Sequence[Array], paged_kv_last_page_len: Sequence[Array],
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: Number = None, window_left: int = -1, logits_soft_cap: Number = None,
        rope_scale: Number = None, rope_theta: Number = None, q_data_type: DType = FLOAT16,
        kv_data_type: DType = None, *, head_dim_vo: int | None = None, o_data_type: DType = None,
        stream: Any = None,
    ) -> None:  # fmt: skip
        """Schedule the batch.

        Positions and windows count through the levels. A shared level that ends inside of a page
        goes with neither a window nor a position encoding.
        """
        self._plan(locals())

    def _check(self, given: dict[str, Any]) -> None:
        for name, x in ((name, given[name]) for name in self._LISTS):
            if not isinstance(x, (list, tuple)) or len(x) != self._num_levels:
                expected = f"a list of {self._num_levels}: one per level"
                raise ShapeError(name, f"{type(x).__name__} of {len(x)}", expected)

    def _layout(self, given: dict[str, Any]) -> Layout:
        return Levels(*(given[name] for name in self._LISTS), page_size=given["page_size"])

    def reset_workspace_buffer(
        self, float_workspace_buffer: Array | int | None, int_workspace_buffers: Any = None
    ) -> None:
        """Replace the workspace. The next call must be ``plan``."""
        for buffer in int_workspace_buffers or ():
            super().reset_workspace_buffer(None, buffer)
        super().reset_workspace_buffer(float_workspace_buffer)


class _SharedPrefix(Composed):
    """Two levels, of which ``forward`` brings the first: it plans when that is another."""

    #: Arguments of begin_forward with the page table.
    _table: ClassVar[tuple[str, ...]] = ()
    _level: tuple[Any, ...] | None = None  # the requests' own

    def _begin(
        self, level: tuple[Any, ...], sizes: tuple[int, ...], data_type: DType = FLOAT16
    ) -> None:
        self._forget()
        self._level, names = None, ("qo_indptr", *self._table)
        # Copies: forward plans with them.
        arrays = tuple(to_indices(x, name).copy() for name, x in zip(names, level, strict=True))
        if not len(arrays[0]):
            raise ShapeError(names[0], "length 0", "batch size + 1")
        self._level, self._sizes = arrays, sizes
        self._given = {"q_data_type": data_type, "kv_data_type": data_type}

    def _compute(self, q: Array, k: Array, v: Array, cache: Any, spec: dict[str, Any]) -> Array:
        if self._level is None or self._given is None:
            raise PlanError("forward", "no plan", "begin_forward() first")
        layout, page_size = self._task_options["kv_layout"], self._sizes[-1]
        with renamed({"paged_kv_cache": "unique_kv_cache"}):
            where = pages_within({"k_shared": k, "v_shared": v}, layout, cache, page_size, layout)
        rows, key = self._level[0][[0, -1]], tuple(spec.items())
        of_prefix = renamed({"k": "k_shared", "v": "v_shared"})
        of_cache = renamed(dict.fromkeys(("k", "v", "paged_kv_cache"), "unique_kv_cache"))
        if where:
            page, tokens = where
            count = -(-tokens // page_size)
            shared = (
                rows, np.array([0, count]), page + np.arange(count),
                np.array([tokens - (count - 1) * page_size]),
            )  # fmt: skip
            levels = ([a, b] for a, b in zip(shared, self._level, strict=True))
            kind = functools.partial(MultiLevelCascadeAttentionWrapper, 2)
            with of_cache:
                both = self._on(
                    "levels", kind, layout, (where, key), *levels, *self._sizes, **spec,
                    **self._given,
                )  # fmt: skip
                result: Array = both.run(q, cache)
            return result
        tokens = int(k.shape[0 if layout == "NHD" else 1])
        wide = {"o_data_type": "float32", **self._given}  # what is merged is not rounded before
        seen_by_all = {name: x for name, x in spec.items() if name != "causal"}
        with of_prefix:
            first = self._on(
                "prefix", BatchPrefillWithRaggedKVCacheWrapper, layout, (tokens, key), rows,
                np.array([0, tokens]), *self._sizes[:-1], **seen_by_all, **wide,
            )  # fmt: skip
            state = first.run(q, k, v, return_lse=True)
        with of_cache:
            own = self._on(
                "own", BatchPrefillWithPagedKVCacheWrapper, layout, key, *self._level,
                *self._sizes, **spec, **wide,
            )  # fmt: skip
            states = *state, *own.run(q, cache, return_lse=True)
        merged, _ = merge_state(*states, lse_base=self._task_options["lse_base"])
        return adapter_for(q).cast(merged, output_dtype(float_dtype(q, "q", Q_DTYPES)))


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode of requests that share a prefix, one token each."""

    _context = ("shared",)
    _table = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len")

    def begin_forward(
        self, unique_kv_indptr: Array, unique_kv_indices: Array, unique_kv_last_page_len: Array,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
        data_type: DType = FLOAT16,
    ) -> None:  # fmt: skip
        """Take the requests' own pages, without the prefix. ``forward`` plans."""
        indptr = to_indices(unique_kv_indptr, "unique_kv_indptr")
        level = np.arange(len(indptr)), indptr, unique_kv_indices, unique_kv_last_page_len
        self._begin(level, (num_qo_heads, num_kv_heads, head_dim, page_size), data_type)

    def forward(  # type: ignore[override]
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Any
    ) -> Array:
        """Compute one layer. It plans where the prefix is another than before."""
        return self._compute(q, k_shared, v_shared, unique_kv_cache, {})


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill or append of requests that share a prefix: any number of query tokens."""

    _context = ("shared",)
    _table = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def begin_forward(
        self, qo_indptr: Array, paged_kv_indptr: Array, paged_kv_indices: Array,
        paged_kv_last_page_len: Array, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int,
    ) -> None:  # fmt: skip
        """Take the requests' rows of q and own pages, without the prefix. ``forward`` plans."""
        level = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._begin(level, (num_qo_heads, num_kv_heads, head_dim, page_size))

    def forward(  # type: ignore[override]
        self, q: Array, k_shared: Array, v_shared: Array, unique_kv_cache: Any,
        causal: bool = False, use_fp16_qk_reduction: bool = False,  # noqa: ARG002
        sm_scale: float | None = None, rope_scale: float | None = None,  # noqa: ARG002
        rope_theta: float | None = None,  # noqa: ARG002
    ) -> Array:  # fmt: skip
        """Compute one layer. It plans where the prefix or an option is another than before."""
        spec = {"causal": causal, "sm_scale": sm_scale}
        return self._compute(q, k_shared, v_shared, unique_kv_cache, spec)
