# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batch prefill over ragged keys and values: no cache, or an encoder."""

from __future__ import annotations

from typing import Any

from ..arrays.types import Array, DType, Scale
from .base import Wrapper, reject
from .graphs import graph_mode

__all__ = ["BatchPrefillWithRaggedKVCacheWrapper"]


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attention of ragged queries against ragged keys and values.

    Each request's keys lie one after the other: prefill without a cache, encoders.

    Parameters
    ----------
    float_workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned by the wrapper and sized by ``plan``), a
        size in bytes, or an array. `CapacityError` in ``plan`` if it is too small.
    kv_layout : {"NHD", "HND"}
        Keys and values are ``[nnz_kv, num_kv_heads, dim]`` or ``[num_kv_heads, nnz_kv, dim]``.
    use_cuda_graph : bool
        A captured ``run`` may be replayed over later plans: memory, kernel and grid stay. Needs the
        buffers below on a GPU, and fixes the computation to it.
    qo_indptr_buf, kv_indptr_buf : array, optional
        With `use_cuda_graph`: their length is the most requests of a batch + 1. They are neither
        read nor written.
    custom_mask_buf, mask_indptr_buf : None
        Masks lie in memory of the wrapper's own, as large as the largest planned before a capture.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    jit_args, jit_kwargs : None
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    num_threads : int, optional
        Threads that compute. Default: the machine's cores.
    max_q_tokens, max_kv_tokens : int, optional
        With `use_cuda_graph`: the most rows of q and of k. Default: those of the first plan.

    Raises
    ------
    UnsupportedError
        An option of FlashInfer's that has no meaning here, with the way out.

    Examples
    --------
    An encoder on two sentences of 2 and 3 tokens.

    >>> import numpy as np
    >>> import flashbsr
    >>> indptr = np.array([0, 2, 5])
    >>> wrapper = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None)
    >>> wrapper.plan(indptr, indptr, num_qo_heads=2, num_kv_heads=2, head_dim_qk=32)
    >>> x = np.ones((5, 2, 32), np.float32)
    >>> wrapper.run(x, x, x).shape
    (5, 2, 32)
    """

    def __init__(
        self,
        float_workspace_buffer: Array | int | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        *,
        lse_base: str = "e",
        num_threads: int | None = None,
        max_q_tokens: int | None = None,
        max_kv_tokens: int | None = None,
    ) -> None:
        reject(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
        )
        graph = graph_mode(
            use_cuda_graph,
            {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf},
            limits={"max_q_tokens": max_q_tokens, "max_kv_tokens": max_kv_tokens},
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, lse_base, num_threads, graph)

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Array = None,
        packed_custom_mask: Array = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        *,
        fp8_accumulation: str = "default",
        stream: Any = None,
    ) -> None:
        """Schedule the batch. Checks indptrs and mask completely.

        The order of `sm_scale` among the arguments differs from the paged wrapper's, as it does in
        FlashInfer.

        Parameters
        ----------
        qo_indptr : int32 or int64 array [B + 1]
            Request *i* has the query rows ``q[qo_indptr[i]:qo_indptr[i + 1]]``.
        kv_indptr : int32 or int64 array [B + 1]
            And the rows ``k[kv_indptr[i]:kv_indptr[i + 1]]``, likewise of `v`.
        num_qo_heads, num_kv_heads : int
            The first is a multiple of the second.
        head_dim_qk : int
            Multiple of 8, at most 512.
        head_dim_vo : int, optional
            Default `head_dim_qk`.
        custom_mask : bool array [sum_i q_len_i * kv_len_i], optional
            Row-major per request, one request after the other; True keeps. Replaces `causal`;
            `window_left` still holds.
        packed_custom_mask : uint8 array, optional
            The same in bits, little-endian, each request from a byte on.
        causal : bool
            Bottom-right aligned: key *j* is visible to query *i* iff
            ``j <= i + kv_len - q_len``.
        pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
        use_fp16_qk_reduction : bool
            Only False.
        window_left : int
            Keys kept behind the query, inclusive. -1: all.
        logits_soft_cap : float, optional
            ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
        sm_scale : float, optional
            Default ``1 / sqrt(head_dim_qk)``.
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
        fixed_split_size : int, optional
            Split every KV range at multiples of this many tokens: a request's result then does
            not depend on the rest of the batch.
        disable_split_kv : bool
            Never split a KV range.
        seq_lens, seq_lens_q, max_token_per_sequence, max_sequence_kv : None
            ``plan`` reads the lengths from the indptrs.
        v_indptr, o_indptr : None
            Values have the rows of the keys, the output those of the queries.
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
            prefix_len_ptr is token_pos_in_items_ptr is max_item_len_ptr is seq_lens is None
            and seq_lens_q is max_token_per_sequence is max_sequence_kv is None
            and v_indptr is o_indptr is None
        ):
            reject(
                prefix_len_ptr=prefix_len_ptr,
                token_pos_in_items_ptr=token_pos_in_items_ptr,
                max_item_len_ptr=max_item_len_ptr,
                seq_lens=seq_lens,
                seq_lens_q=seq_lens_q,
                max_token_per_sequence=max_token_per_sequence,
                max_sequence_kv=max_sequence_kv,
                v_indptr=v_indptr,
                o_indptr=o_indptr,
            )
        if not (custom_mask is packed_custom_mask is None):
            causal = False
        key = (
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal, pos_encoding_mode,
            window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, q_data_type,
            kv_data_type, o_data_type, fixed_split_size, disable_split_kv,
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
                "q_dtype": q_data_type,
                "kv_dtype": kv_data_type,
                "o_dtype": o_data_type,
                "fixed_split_size": fixed_split_size,
                "disable_split_kv": disable_split_kv,
                "fp8_accumulation": fp8_accumulation,
                **self._capacity(qo_indptr, kv_indptr),
            },
        )
        self._plan(
            attention,
            qo_indptr,
            kv_indptr,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            stream=stream,
        )

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: float | None = None,
        out: Array = None,
        lse: Array = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Array = None,
        sinks: Array = None,
        alibi_slopes: Array = None,
        kv_ready: bool = False,
        stream: Any = None,
    ) -> Any:
        """Compute the planned batch.

        Parameters
        ----------
        q : array [qo_indptr[-1], num_qo_heads, head_dim_qk]
            float32, float16, bfloat16 or float8_e4m3fn.
        k : array [kv_indptr[-1], num_kv_heads, head_dim_qk]
            The type of `q`, or unless that is float8 also float8_e4m3fn / float8_e5m2. HND: the
            first two dimensions swapped. Any strides but the last.
        v : array [kv_indptr[-1], num_kv_heads, head_dim_vo]
            Likewise.
        *args
            Not supported: extras have names here.
        q_scale, k_scale, v_scale : float or float32 array, optional
            Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first
            two multiply the logits, the third the output.
        o_scale : None
            Fold ``1 / o_scale`` into `v_scale`.
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
        kv_cache_sf : None
        sinks : float32 array [num_qo_heads], optional
            Learned logit per head that takes part in the softmax (and the LSE) and has no value.
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
        if args or not (o_scale is kv_cache_sf is None):
            reject(args=args, o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        return self._run(
            q, (k, v), out, lse, return_lse, q_scale, k_scale, v_scale, sinks, alibi_slopes,
            enable_pdl, kv_ready, stream,
        )  # fmt: skip

    def workspace_size(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> tuple[int, int]:
        """Bytes that a plan needs, without touching the current one.

        On the GPU of `backend`, the workspace or the current plan, otherwise on that of the index
        arrays, otherwise on the CPU.

        Parameters
        ----------
        qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk
            As for ``plan``.
        **options
            The further arguments of ``plan``, by name.

        Returns
        -------
        tuple of two int
            Workspace (partial results), and plan.
        """
        probe = self._probe()
        probe.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, **options)
        return probe._sizes()
