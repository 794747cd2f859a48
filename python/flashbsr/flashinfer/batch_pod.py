# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefill on decode (POD): prompts and decodes of one step as one plan and one launch.

FlashInfer's wrappers take the parts' queries and options apart (Kamath et al., POD-Attention,
ASPLOS 2025). Here they become one batch, as `BatchAttention` has it: the plan gives rows of either
kind their tiles. One plan has one cache and one `AttentionSpec`, so options that differ between the
parts raise; causality does not differ for a decode of one token.
"""

from __future__ import annotations

from typing import Any

from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, UnsupportedError
from .base import reject
from .join import Part, same_cache
from .mixed import TWO_WRAPPERS, Mixed, both_masks, page_table, query_lens

__all__ = ["BatchPODWithPagedKVCacheWrapper"]


class BatchPODWithPagedKVCacheWrapper(Mixed):
    """Prompts and decodes over one paged KV cache, their queries apart, as one plan.

    Rows of q are joined: without a copy where `q_d` lies behind `q_p` in one array, otherwise the
    framework copies both. Outputs are views of one array. `BatchAttention` is the same without
    that.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.

    Examples
    --------
    A prompt of two tokens and a decode, each in a page of its own. Keys are zero, so that attention
    is the mean of the visible values, which are the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((2, 2, 4, 1, 64), np.float32)
    >>> cache[:, 1] = np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.BatchPODWithPagedKVCacheWrapper()
    >>> one = np.array([0, 1])
    >>> wrapper.plan(
    ...     np.array([0, 2]), one, np.array([1]), np.array([2]),  # the prompt
    ...     one, one, np.array([0]), np.array([4]),  # the decode
    ...     num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=4,
    ... )
    >>> q = np.ones((3, 1, 64), np.float32)
    >>> out_p, out_d = wrapper.run(q[:2], cache, q[2:], cache, causal_p=True)
    >>> out_p[:, 0, 0].tolist(), out_d[:, 0, 0].tolist()
    ([0.0, 0.5], [1.5])
    """

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

    def plan(
        self,
        qo_indptr_p: Array,
        kv_indptr_p: Array,
        kv_indices_p: Array,
        last_page_len_p: Array,
        qo_indptr_d: Array,
        kv_indptr_d: Array,
        kv_indices_d: Array,
        last_page_len_d: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType = None,
        kv_data_type: DType = None,
        data_type: DType = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,  # noqa: ARG002
        *,
        causal_p: bool | None = None,
        logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> None:
        """Schedule the batch.

        Parameters
        ----------
        qo_indptr_p, qo_indptr_d : int32 or int64 array [B + 1]
            Rows of `q_p` and of `q_d` of their requests.
        kv_indptr_p, kv_indices_p, last_page_len_p, kv_indptr_d, kv_indices_d, last_page_len_d
            Their page tables, as in `BatchPrefillWithPagedKVCacheWrapper`.
        num_qo_heads, num_kv_heads, head_dim, page_size : int
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
        window_left : int
            Keys kept behind the query, inclusive, in both parts. -1: all.
        q_data_type, kv_data_type, data_type : data type, optional
            None: the arrays'.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta : float, optional
            Default 1 and 10000.
        non_blocking : bool
            Without effect: host arrays are never waited for, arrays on a GPU are copied back once.
        causal_p : bool, optional
            What ``run`` will say, so that it need not plan again. None: what the last run said, or
            False.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits, in both parts.
        stream : CUDA stream or int, optional
            Where the plan is copied to the GPU. Default: the framework's current stream.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        last = bool(self._causal) if causal_p is None else causal_p
        self._forget()
        given = (
            ("_p", qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p),
            ("_d", qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d),
        )
        parts = []
        for suffix, qo_indptr, *table in given:
            indptr, indices, last_page_len = table
            indptr, indices, kv_lens = page_table(indptr, indices, last_page_len, page_size, suffix)
            q_lens = query_lens(qo_indptr, f"qo_indptr{suffix}", len(kv_lens))
            parts.append((Part(suffix, q_lens, kv_lens), indptr, indices))
        self._take(
            {
                "window_left": window_left, "sm_scale": sm_scale,
                "logits_soft_cap": logits_soft_cap, "pos_encoding_mode": pos_encoding_mode,
                "rope_scale": rope_scale, "rope_theta": rope_theta,
            },
            {
                "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim, "page_size": page_size, "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
            },
            data_type,
            stream,
        )  # fmt: skip
        self._join_batch(parts)
        one_each = bool((parts[1][0].q_lens <= 1).all())
        try:
            self._plan_parts(last and (one_each or causal_p is not None), both_masks())
        except FlashbsrError:
            self._forget()
            raise

    def run(
        self,
        q_p: Array,
        paged_kv_cache_p: Array | tuple[Array, Array],
        q_d: Array,
        paged_kv_cache_d: Array | tuple[Array, Array],
        custom_mask_p: Array = None,
        packed_custom_mask_p: Array = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the planned batch for one layer.

        Where `causal_p` is not the planned one, and wherever there is a mask, it plans again: host
        work. A mask is written out for the decodes too, a bit per KV token.

        Parameters
        ----------
        q_p, q_d : array [qo_indptr[-1], num_qo_heads, head_dim]
            Of one kind and type. Adjacent rows of one array, `q_p` first, are not copied.
        paged_kv_cache_p, paged_kv_cache_d : array or tuple of two
            The same cache, as in `BatchPrefillWithPagedKVCacheWrapper`.
        custom_mask_p : bool array [sum_i q_len_i * kv_len_i], optional
            Of the prompts; True keeps. Replaces `causal_p`.
        packed_custom_mask_p : uint8 array, optional
            The same in bits, little-endian, each request from a byte on.
        causal_p : bool
            Of the prompts, bottom-right aligned. Decodes of one token see everything either way.
        q_scale, k_scale, v_scale : float or float32 array, optional
            Per tensor or per head, of both parts.
        return_lse : bool
        use_fp16_qk_reduction : bool
            Only False.
        enable_pdl, kv_ready, stream
            As in `Attention.run`.

        Returns
        -------
        (out_p, out_d), or ((out_p, out_d), (lse_p, lse_d))
            Views of one array.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        UnsupportedError
            Two caches; causality and decodes of several tokens.
        ShapeError, DTypeError, DeviceError, FlashbsrError
        """
        if use_fp16_qk_reduction:
            reject(use_fp16_qk_reduction=use_fp16_qk_reduction)
        if not same_cache(paged_kv_cache_p, paged_kv_cache_d):
            raise UnsupportedError(
                "paged_kv_cache_d",
                "another array than paged_kv_cache_p",
                "one cache, of which the parts name pages: one plan has one cache. " + TWO_WRAPPERS,
            )
        self._plan_parts(causal_p, both_masks(custom_mask_p, packed_custom_mask_p))
        found = self._run_parts(
            (q_p, q_d), paged_kv_cache_d, (q_scale, k_scale, v_scale), return_lse,
            enable_pdl=enable_pdl, kv_ready=kv_ready, stream=stream,
        )  # fmt: skip
        return tuple(found) if return_lse else found[0]
