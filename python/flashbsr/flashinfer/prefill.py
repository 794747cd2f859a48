# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batch prefill and append over a paged KV cache (and, from `ragged`, over ragged K and V)."""

from __future__ import annotations

from typing import Any, ClassVar

from ..arrays.types import Array, DType, Scale
from ..errors import PlanError
from .base import Wrapper, pages_to_tokens, reject
from .graphs import graph_mode
from .ragged import BatchPrefillWithRaggedKVCacheWrapper

__all__ = ["BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Attention of several tokens per request against a paged KV cache.

    Prefill, chunked prefill, speculative verification: any number of query tokens per request, 0
    and 1 among them. FlashInfer, MLSys 2025, section 3.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array. `CapacityError` in ``plan`` if it is too small.
    kv_layout : {"NHD", "HND"}
        Order of tokens and heads in a page.
    use_cuda_graph : bool
        A captured ``run`` may be replayed over later plans: memory, kernel and grid stay. Needs the
        buffers below on a GPU, and fixes the computation to it.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : array
        With `use_cuda_graph`: their lengths are the most requests + 1 and the most pages of a
        batch. (The last is not needed.) They are neither read nor written.
    custom_mask_buf, mask_indptr_buf : None
        Masks lie in memory of the wrapper's own, as large as the largest planned before a capture.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    jit_args, jit_kwargs : None
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.
    max_q_tokens : int, optional
        With `use_cuda_graph`: the most rows of q. Default: those of the first plan.

    Raises
    ------
    UnsupportedError
        An option of FlashInfer's that has no meaning here, with the way out.

    Examples
    --------
    Two new tokens behind one in the cache; keys are zero, so that attention is the mean of the
    visible values, which are the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((1, 2, 4, 1, 64), np.float32)
    >>> cache[0, 1] = np.arange(4, dtype=np.float32)[:, None, None]
    >>> wrapper = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None)
    >>> wrapper.plan(
    ...     np.array([0, 2], np.int32),  # qo_indptr: 2 query tokens
    ...     np.array([0, 1], np.int32), np.array([0], np.int32),  # page table: page 0
    ...     np.array([3], np.int32),  # 3 tokens in it
    ...     num_qo_heads=1, num_kv_heads=1, head_dim_qk=64, page_size=4, causal=True,
    ... )
    >>> wrapper.run(np.ones((2, 1, 64), np.float32), cache)[:, 0, 0].tolist()
    [0.5, 1.0]
    """

    _spelling: ClassVar[dict[str, str]] = {
        **Wrapper._spelling,
        "kv_indptr": "paged_kv_indptr",
        "kv_indices": "paged_kv_indices",
        "last_page_len": "paged_kv_last_page_len",
        "kv_lens": "seq_lens",
        "kv": "paged_kv_cache",
    }

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        lse_base: str = "e",
        num_threads: int | None = None,
        max_q_tokens: int | None = None,
    ) -> None:
        reject(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        graph = graph_mode(
            use_cuda_graph,
            {"qo_indptr_buf": qo_indptr_buf, "paged_kv_indptr_buf": paged_kv_indptr_buf},
            {"paged_kv_indices_buf": paged_kv_indices_buf},
            {"paged_kv_last_page_len_buf": paged_kv_last_page_len_buf},
            {"max_q_tokens": max_q_tokens},
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads, graph)
        self._window_left = -1

    def plan(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Array = None,
        packed_custom_mask: Array = None,
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
        o_data_type: DType = None,
        non_blocking: bool = True,  # noqa: ARG002
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Array = None,
        seq_lens_q: Any = None,
        block_tables: Array = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        *,
        tree_parents: Array = None,
        share_prefixes: str = "auto",
        fp8_accumulation: str = "default",
        stream: Any = None,
    ) -> None:
        """Schedule the batch. Checks indptrs, page table and mask completely.

        Parameters
        ----------
        qo_indptr : int32 or int64 array [B + 1]
            Request *i* has the query rows ``q[qo_indptr[i]:qo_indptr[i + 1]]``.
        paged_kv_indptr : int32 or int64 array [B + 1]
            And the pages ``paged_kv_indices[paged_kv_indptr[i]:paged_kv_indptr[i + 1]]``.
        paged_kv_indices : int32 or int64 array [>= paged_kv_indptr[-1]]
            Page ids.
        paged_kv_last_page_len : int32 or int64 array [B]
            Tokens in each request's last page, 1 to `page_size`. None: `seq_lens` instead.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim_qk : int
            Multiple of 8, at most 512.
        page_size : int
        head_dim_vo : int, optional
            Default `head_dim_qk`.
        custom_mask : bool array [sum_i q_len_i * kv_len_i], optional
            Row-major per request, one request after the other; True keeps. Replaces `causal`;
            `window_left` still holds.
        packed_custom_mask : uint8 array, optional
            The same in bits, little-endian, each request from a byte on: what
            ``segment_packbits(..., bitorder="little")`` makes.
        causal : bool
            Bottom-right aligned: key *j* is visible to query *i* iff
            ``j <= i + kv_len - q_len``.
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
        use_fp16_qk_reduction : bool
            Only False.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim_qk)``.
        window_left : int
            Keys kept behind the query, inclusive. -1: all.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        rope_scale, rope_theta : float, optional
            Default 1 and 10000.
        q_data_type, kv_data_type, o_data_type : data type, optional
            None: the arrays'. The output's is that of q, or of a given `out` and otherwise bfloat16
            where q is float8_e4m3fn, which needs a KV of that type. FlashInfer's default is
            float16.
        non_blocking : bool
            Without effect: host arrays are never waited for, arrays on a GPU are copied back once.
        prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
            Multi-item scoring, not supported: say it as `custom_mask`.
        seq_lens : int32 or int64 array [B], optional
            KV length per request. Next to `paged_kv_last_page_len` it must say the same.
        seq_lens_q, max_token_per_sequence, max_sequence_kv : None
            ``plan`` reads the lengths from the indptrs.
        block_tables : int32 or int64 array [B, max_pages], optional
            Page ids per request, instead of `paged_kv_indptr` and `paged_kv_indices`, which must
            then be None; needs `seq_lens`.
        fixed_split_size : int, optional
            Split every KV range at multiples of this many *pages*: a request's result then does
            not depend on the rest of the batch.
        disable_split_kv : bool
            Never split a KV range.
        tree_parents : int32 or int64 array [qo_indptr[-1]], optional
            Query tokens are a tree per request, given by their parents, instead of `causal` and
            masks: see `Attention.plan` and `draft_trees`.
        share_prefixes : {"auto", "off"}
            Whether pages that requests begin with are loaded once where that pays: see
            `Attention.plan`.
        fp8_accumulation : {"default", "fast"}
            As in `TaskInfo`.
        stream : CUDA stream or int, optional
            Where the plan is copied to the GPU. Default: the framework's current stream.

        Raises
        ------
        ShapeError, DTypeError, IndexRangeError, CapacityError, UnsupportedError, FlashbsrError
            The argument, what it was, what is allowed. There is no plan afterwards.
        """
        self._attention = None
        if use_fp16_qk_reduction or token_pos_in_items_len:
            reject(
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                token_pos_in_items_len=token_pos_in_items_len,
            )
        if not (
            prefix_len_ptr is token_pos_in_items_ptr is max_item_len_ptr is seq_lens_q is None
            and max_token_per_sequence is max_sequence_kv is None
        ):
            reject(
                prefix_len_ptr=prefix_len_ptr,
                token_pos_in_items_ptr=token_pos_in_items_ptr,
                max_item_len_ptr=max_item_len_ptr,
                seq_lens_q=seq_lens_q,
                max_token_per_sequence=max_token_per_sequence,
                max_sequence_kv=max_sequence_kv,
            )
        if not (custom_mask is packed_custom_mask is tree_parents is None):
            causal = False
        key = (
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo, causal,
            pos_encoding_mode, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta,
            q_data_type, kv_data_type, o_data_type, fixed_split_size, disable_split_kv,
            fp8_accumulation,
        )  # fmt: skip
        attention = self._find(key) or self._engine(
            key,
            {
                "causal": causal,
                "window_left": window_left,
                "sm_scale": sm_scale,
                "logits_soft_cap": logits_soft_cap,
                "pos_encoding_mode": pos_encoding_mode,
                "rope_scale": rope_scale,
                "rope_theta": rope_theta,
            },
            {
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim_qk,
                "head_dim_vo": head_dim_vo,
                "page_size": page_size,
                "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
                "o_dtype": o_data_type,
                "fixed_split_size": pages_to_tokens(fixed_split_size, page_size),
                "disable_split_kv": disable_split_kv,
                "fp8_accumulation": fp8_accumulation,
                **self._capacity(qo_indptr),
            },
        )
        self._plan(
            attention, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            seq_lens, block_tables, custom_mask, packed_custom_mask, stream, tree_parents,
            share_prefixes,
        )  # fmt: skip
        self._window_left = window_left

    def run(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array = None,
        kv_cache_sf: Array = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
        alibi_slopes: Array = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the planned batch for one layer.

        Parameters
        ----------
        q : array [qo_indptr[-1], num_qo_heads, head_dim_qk]
            float32, float16, bfloat16 or float8_e4m3fn.
        paged_kv_cache : array or tuple of two
            Stacked ``[pages, 2, page_size, num_kv_heads, head_dim]`` (HND: ``page_size`` and
            ``num_kv_heads`` swapped), or ``(k, v)`` without the 2; the type of `q`, or unless
            that is float8 also float8_e4m3fn / float8_e5m2. Any strides but the last.
        *args
            Not supported: extras have names here.
        q_scale, k_scale, v_scale : float or float32 array, optional
            Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first
            two multiply the logits, the third the output.
        out : array [qo_indptr[-1], num_qo_heads, head_dim_vo], optional
            Written and returned.
        lse : float32 array [qo_indptr[-1], num_qo_heads], optional
            Written and returned.
        return_lse : bool
            Return ``(out, lse)``.
        enable_pdl : bool, optional
            GPUs of compute capability 9.0 and later: start before the kernel ahead in the stream
            has finished. None and True: reading ahead no more than the plan, which is always safe.
            False: never.
        window_left : int, optional
            Only the planned one.
        sinks : float32 array [num_qo_heads], optional
            Learned logit per head that takes part in the softmax (and the LSE) and has no value.
        kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress : None
        alibi_slopes : float32 array [num_qo_heads], optional
            For ``pos_encoding_mode="ALIBI"``. Default: the standard ones for `num_qo_heads` heads;
            under tensor parallelism pass this rank's part.
        kv_ready : bool
            The caller promises that the kernel ahead in the stream does not write the KV cache.
        stream : CUDA stream or int, optional
            Default: the current stream of q's framework.

        Returns
        -------
        out : array [qo_indptr[-1], num_qo_heads, head_dim_vo]
            Of the caller's kind. A row that sees no key gives 0.
        lse : float32 array [qo_indptr[-1], num_qo_heads]
            Only with ``return_lse=True``. ``-inf`` for a row that sees no key.

        Raises
        ------
        PlanError
            No plan, or the arrays do not match it.
        ShapeError, DTypeError, DeviceError, UnsupportedError
        """
        if args or use_fp16_softmax or uses_spcompress:
            reject(
                args=args,
                use_fp16_softmax=use_fp16_softmax,
                uses_spcompress=uses_spcompress,
            )
        if not (kv_cache_sf is skip_softmax_threshold_scale_factor is None):
            reject(
                kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            )
        if window_left is not None and window_left != self._window_left:
            raise PlanError("window_left", window_left, f"the planned {self._window_left}")
        return self._run(
            q, paged_kv_cache, out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream,
        )  # fmt: skip

    def workspace_size(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> tuple[int, int]:
        """Bytes that a plan needs, without touching the current one.

        On the GPU of `backend`, the workspace or the current plan, otherwise on that of the index
        arrays, otherwise on the CPU.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            As for ``plan``.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size : int
            As for ``plan``.
        **options
            The further arguments of ``plan``, by name.

        Returns
        -------
        tuple of two int
            Workspace (partial results), and plan.
        """
        probe = self._probe()
        probe.plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim_qk, page_size, **options,
        )  # fmt: skip
        return probe._sizes()
