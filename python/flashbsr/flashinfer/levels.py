# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Cascades given by hand: KV that groups of requests share, level by level.

All levels are one plan and one launch, and their states are merged in float32 (FlashInfer, MLSys
2025, section 3.1.2). Plans find shared prefixes by themselves (``share_prefixes="auto"``): who has
one page table with the shared pages in it needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._check import check_int
from ..arrays.types import Array, DType, Scale
from ..errors import ShapeError
from .base import Wrapper, reject, reject_others

__all__ = ["Cascade", "MultiLevelCascadeAttentionWrapper"]


class Cascade(Wrapper):
    """A wrapper whose plan has levels."""

    def _plan_levels(self, spec: dict[str, Any], task: dict[str, Any], *levels: Any) -> None:
        """Plan with the engine of these options; ``levels`` are those of `Attention.plan_levels`.

        The last of them is the stream.
        """
        attention = self._engine_of(spec, task)
        self._plan_by(attention, attention.plan_levels, *levels[:-1], stream=levels[-1])


class MultiLevelCascadeAttentionWrapper(Cascade):
    """Prefill, append or decode of requests that share KV on any number of levels.

    Parameters
    ----------
    num_levels : int
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array. `CapacityError` in ``plan`` if it is too small.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    use_cuda_graph : bool
        Only False: `BatchDecodeWithPagedKVCacheWrapper` and `BatchPrefillWithPagedKVCacheWrapper`
        capture, and find shared prefixes by themselves.
    qo_indptr_buf_arr, paged_kv_indptr_buf_arr, paged_kv_indices_buf_arr : None
    paged_kv_last_page_len_buf_arr : None
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Raises
    ------
    UnsupportedError
        An option of FlashInfer's that has no meaning here, with the way out.

    Examples
    --------
    Two requests share page 0 with four tokens, and own one token each, in pages 1 and 2. Keys are
    zero, so that attention is the mean of the values: of 0, 1, 2, 3, and of 4 or 9.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((3, 2, 4, 1, 64), np.float32)
    >>> cache[0, 1] = np.arange(4, dtype=np.float32)[:, None, None]
    >>> cache[1, 1], cache[2, 1] = 4, 9
    >>> wrapper = flashbsr.flashinfer.MultiLevelCascadeAttentionWrapper(2)
    >>> wrapper.plan(
    ...     [np.array([0, 2]), np.array([0, 1, 2])],  # all rows; each request's
    ...     [np.array([0, 1]), np.array([0, 1, 2])], [np.array([0]), np.array([1, 2])],  # pages
    ...     [np.array([4]), np.array([1, 1])],
    ...     num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=4,
    ... )
    >>> wrapper.run(np.ones((2, 1, 64), np.float32), cache)[:, 0, 0].tolist()
    [2.0, 3.0]
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "kv_indptr_arr": "paged_kv_indptr_arr",
        "kv_indices_arr": "paged_kv_indices_arr",
        "last_page_len_arr": "paged_kv_last_page_len",
        "qo_indptr": "qo_indptr_arr",
        "kv_indptr": "paged_kv_indptr_arr",
        "kv_indices": "paged_kv_indices_arr",
        "last_page_len": "paged_kv_last_page_len",
        "kv": "paged_kv_cache",
    }

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Any = None,
        paged_kv_indptr_buf_arr: Any = None,
        paged_kv_indices_buf_arr: Any = None,
        paged_kv_last_page_len_buf_arr: Any = None,
        *,
        backend: str = "auto",
        lse_base: str = "e",
        num_threads: int | None = None,
    ) -> None:
        self._num_levels = check_int("num_levels", num_levels, 1)
        reject_others(
            "BatchDecodeWithPagedKVCacheWrapper(use_cuda_graph=True) and "
            "BatchPrefillWithPagedKVCacheWrapper find shared prefixes in one page table",
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf_arr=qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr=paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr=paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr=paged_kv_last_page_len_buf_arr,
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads)

    def plan(
        self,
        qo_indptr_arr: Sequence[Array],
        paged_kv_indptr_arr: Sequence[Array],
        paged_kv_indices_arr: Sequence[Array],
        paged_kv_last_page_len: Sequence[Array],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = None,
        kv_data_type: DType = None,
        *,
        head_dim_vo: int | None = None,
        o_data_type: DType = None,
        stream: Any = None,
    ) -> None:
        """Schedule the batch.

        Parameters
        ----------
        qo_indptr_arr : list of int32 or int64 arrays [num_groups + 1]
            Rows of q of the groups of each level. Level 0 has the largest groups, the last level
            has the requests; each group is made of whole groups of the next level.
        paged_kv_indptr_arr, paged_kv_indices_arr : lists of int32 or int64 arrays
            Pages of the groups of each level.
        paged_kv_last_page_len : list of int32 or int64 arrays [num_groups]
            Tokens in the last page of each group. A shared level that ends inside of a page goes
            with no window and no position encoding: `UnsupportedError`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        causal : bool
            Of the last level: a request's queries are the last of its own tokens, and all of them
            see the levels above.
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
            Positions count through the levels; the levels are then not loaded once.
        use_fp16_qk_reduction : bool
            Only False.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim)``.
        window_left : int
            Keys kept behind the query, inclusive, counted through the levels. -1: all.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        rope_scale, rope_theta : float, optional
            Default 1 and 10000.
        q_data_type, kv_data_type, o_data_type : data type, optional
            None: the arrays'. FlashInfer's default is float16.
        head_dim_vo : int, optional
            Default `head_dim`.
        stream : CUDA stream or int, optional
            Where the plan is copied to the GPU. Default: the framework's current stream.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        if use_fp16_qk_reduction:
            reject(use_fp16_qk_reduction=use_fp16_qk_reduction)
        for name, arrays in (
            ("qo_indptr_arr", qo_indptr_arr),
            ("paged_kv_indptr_arr", paged_kv_indptr_arr),
            ("paged_kv_indices_arr", paged_kv_indices_arr),
            ("paged_kv_last_page_len", paged_kv_last_page_len),
        ):
            if not isinstance(arrays, (list, tuple)) or len(arrays) != self._num_levels:
                count = f"{len(arrays)} arrays" if isinstance(arrays, (list, tuple)) else "no list"
                raise ShapeError(name, count, f"a list of {self._num_levels}: one per level")
        self._plan_levels(
            {
                "causal": causal, "window_left": window_left, "sm_scale": sm_scale,
                "logits_soft_cap": logits_soft_cap, "pos_encoding_mode": pos_encoding_mode,
                "rope_scale": rope_scale, "rope_theta": rope_theta,
            },
            {
                "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim, "head_dim_vo": head_dim_vo, "page_size": page_size,
                "q_dtype": q_data_type, "kv_dtype": kv_data_type, "o_dtype": o_data_type,
            },
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len,
            stream,
        )  # fmt: skip

    def run(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        sinks: Array = None,
        alibi_slopes: Array = None,
        enable_pdl: bool | None = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the planned batch for one layer.

        Parameters
        ----------
        q : array [qo_indptr_arr[-1][-1], num_qo_heads, head_dim]
            float32, float16, bfloat16 or float8_e4m3fn.
        paged_kv_cache : array or tuple of two
            As in `BatchPrefillWithPagedKVCacheWrapper`, the pages of all levels.
        q_scale, k_scale, v_scale, out, lse, return_lse, sinks, alibi_slopes
            As there.
        enable_pdl, kv_ready, stream
            As in `Attention.run`.

        Returns
        -------
        out, or (out, lse)

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError
        """
        return self._run(
            q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream,
        )  # fmt: skip

    begin_forward = plan
    forward = run
