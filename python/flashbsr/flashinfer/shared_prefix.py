# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""One prefix that all requests share, as contiguous keys and values, beside pages of their own.

FlashInfer's calls of before its cascades. `MultiLevelCascadeAttentionWrapper` takes any levels by
their pages, and plans find prefixes in one page table by themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..arrays import to_indices
from ..arrays.types import Array, DType
from ..errors import PlanError, ShapeError
from .base import reject
from .join import pages_within
from .levels import Cascade

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
]


class _SharedPrefix(Cascade):
    """Two levels, of which ``forward`` brings the first: it plans when that is another."""

    _spelling: ClassVar[dict[str, str]] = {
        **Cascade._spelling,
        "kv": "unique_kv_cache",
        "q_dtype": "data_type",
        "kv_dtype": "data_type",
    }
    #: Arguments of begin_forward with the page table.
    _table: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads)
        self._own: tuple[Any, ...] | None = None  # the requests' level
        self._task: dict[str, Any] = {}
        self._planned_for: Any = None

    def _begin(self, own: tuple[Any, ...], task: dict[str, Any]) -> None:
        self._attention = self._own = self._planned_for = None
        names = ("qo_indptr", *self._table)
        # Copies: forward plans with them.
        arrays = tuple(to_indices(x, name).copy() for name, x in zip(names, own, strict=True))
        if not len(arrays[0]):
            raise ShapeError(names[0], "length 0", "batch size + 1")
        self._own = arrays
        self._task = task

    def _forward(self, q: Array, k: Array, v: Array, cache: Any, spec: dict[str, Any]) -> Array:
        if self._own is None:
            raise PlanError("forward", "no plan", "begin_forward() first")
        layout, page_size = self._task_options["kv_layout"], self._task["page_size"]
        where = pages_within({"k_shared": k, "v_shared": v}, layout, cache, page_size, layout)
        wanted = (where, *spec.values())
        if self._attention is None or self._planned_for != wanted:
            self._attention = None
            first, tokens = where
            count = -(-tokens // page_size)
            prefix = (
                self._own[0][[0, -1]], np.array([0, count]), first + np.arange(count),
                np.array([tokens - (count - 1) * page_size]),
            )  # fmt: skip
            pairs = ([a, b] for a, b in zip(prefix, self._own, strict=True))
            self._plan_levels(spec, self._task, *pairs, None)
            self._planned_for = wanted
        result: Array = self._run(q, cache, None, None, False, None, None, None, None)
        return result

    def end_forward(self) -> None:
        """Nothing: FlashInfer has it."""


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Decode of requests that share a prefix.

    One plan has one cache: `k_shared` and `v_shared` of ``forward`` are views of consecutive pages
    of the cache (of a tuple of K and V, or of pages of one token; in a stacked cache a prefix
    within one page). Others raise `UnsupportedError` with the way out.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper), a size in bytes, or an
        array.
    kv_layout : {"NHD", "HND"}
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    lse_base : {"e", "2"}
        Base of the LSE of partial results; none is returned.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Examples
    --------
    A prefix of four tokens in page 0; each of two requests owns one token.

    >>> import numpy as np
    >>> import flashbsr
    >>> k = np.zeros((3, 4, 1, 64), np.float32)
    >>> v = k + np.arange(4, dtype=np.float32)[:, None, None]
    >>> v[1], v[2] = 4, 9
    >>> wrapper = flashbsr.flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(
    ...     np.array([0, 1, 2]), np.array([1, 2]), np.array([1, 1]), num_qo_heads=1,
    ...     num_kv_heads=1, head_dim=64, page_size=4,
    ... )
    >>> wrapper.forward(np.ones((2, 1, 64), np.float32), k[0], v[0], (k, v))[:, 0, 0].tolist()
    [2.0, 3.0]
    """

    _table = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len")
    _spelling: ClassVar[dict[str, str]] = {
        **_SharedPrefix._spelling,
        **dict(zip(("kv_indptr", "kv_indices", "last_page_len"), _table, strict=True)),
    }

    def begin_forward(
        self,
        unique_kv_indptr: Array,
        unique_kv_indices: Array,
        unique_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = None,
    ) -> None:
        """Take the requests' own pages. ``forward`` plans.

        Parameters
        ----------
        unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len
            As in `BatchDecodeWithPagedKVCacheWrapper`, without the prefix.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        data_type : data type, optional
            Of q and KV. None: the arrays'. FlashInfer's default is float16.

        Raises
        ------
        ShapeError, DTypeError
        """
        indptr = to_indices(unique_kv_indptr, "unique_kv_indptr")
        own = (np.arange(len(indptr)), indptr, unique_kv_indices, unique_kv_last_page_len)
        self._begin(
            own,
            {
                "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim, "page_size": page_size, "q_dtype": data_type,
                "kv_dtype": data_type,
            },
        )  # fmt: skip

    def forward(
        self,
        q: Array,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Array | tuple[Array, Array],
    ) -> Array:
        """Compute one layer.

        It plans where the prefix is another than before.

        Parameters
        ----------
        q : array [B, num_qo_heads, head_dim]
        k_shared, v_shared : array [prefix_len, num_kv_heads, head_dim]
            HND: ``[num_kv_heads, prefix_len, head_dim]``. Views of pages of `unique_kv_cache`.
        unique_kv_cache : array or tuple of two
            As in `BatchDecodeWithPagedKVCacheWrapper`.

        Returns
        -------
        array [B, num_qo_heads, head_dim]

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        UnsupportedError
            The prefix lies beside the cache.
        ShapeError, DTypeError, IndexRangeError, DeviceError, FlashbsrError
        """
        return self._forward(q, k_shared, v_shared, unique_kv_cache, {"causal": False})


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix):
    """Prefill or append of requests that share a prefix.

    As `BatchDecodeWithSharedPrefixPagedKVCacheWrapper`, with any number of query tokens.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, backend, lse_base, num_threads
        As there.

    Examples
    --------
    >>> import numpy as np
    >>> import flashbsr
    >>> k = np.zeros((2, 4, 1, 64), np.float32)
    >>> v = k + np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    >>> wrapper.begin_forward(
    ...     np.array([0, 2]), np.array([0, 1]), np.array([1]), np.array([2]), num_qo_heads=1,
    ...     num_kv_heads=1, head_dim=64, page_size=4,
    ... )
    >>> q = np.ones((2, 1, 64), np.float32)
    >>> out = wrapper.forward(q, k[0], v[0], (k, v), causal=True)
    >>> np.allclose(out[:, 0, 0], [6 / 5, 7 / 6])
    True
    """

    _table = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    _spelling: ClassVar[dict[str, str]] = {
        **_SharedPrefix._spelling,
        **dict(zip(("kv_indptr", "kv_indices", "last_page_len"), _table, strict=True)),
    }

    def begin_forward(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Take the requests' rows of q and own pages. ``forward`` plans.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            As in `BatchPrefillWithPagedKVCacheWrapper`, without the prefix.
        num_qo_heads, num_kv_heads, head_dim, page_size : int

        Raises
        ------
        ShapeError, DTypeError
        """
        self._begin(
            (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
            {
                "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim, "page_size": page_size,
            },
        )  # fmt: skip

    def forward(
        self,
        q: Array,
        k_shared: Array,
        v_shared: Array,
        unique_kv_cache: Array | tuple[Array, Array],
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Array:
        """Compute one layer.

        It plans where the prefix or an option is another than before.

        Parameters
        ----------
        q : array [qo_indptr[-1], num_qo_heads, head_dim]
        k_shared, v_shared, unique_kv_cache
            As in `BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`.
        causal : bool
            Of the requests' own tokens; all see the prefix.
        use_fp16_qk_reduction : bool
            Only False.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta : None
            Nothing is rotated here: `apply_rope`.

        Returns
        -------
        array [qo_indptr[-1], num_qo_heads, head_dim]

        Raises
        ------
        As there.
        """
        reject(
            use_fp16_qk_reduction=use_fp16_qk_reduction, rope_scale=rope_scale,
            rope_theta=rope_theta,
        )  # fmt: skip
        spec = {"causal": causal, "sm_scale": sm_scale}
        return self._forward(q, k_shared, v_shared, unique_kv_cache, spec)
