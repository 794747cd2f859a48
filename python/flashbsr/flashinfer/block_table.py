# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention from dense block tables, under the names that engines call it by.

Engines that keep ``(block_tables, seq_lens)`` need no other form: each function is
`Attention.plan_block_table` and a run. A function has no object to keep a plan in. So per thread
the last 16 engines are kept, by their options and workspace, and each plans when the lengths or the
table are not those of its last call; a layer after the first of a step only compares them. Lengths
and tables on a GPU are copied to the host for that, which waits for it, and such calls cannot be
captured in CUDA graphs: give them on the host, or use `Attention`, which plans once per step.

Scales are two: ``bmm1_scale`` multiplies the logits and has the softmax scale and those of q and k
in it, ``bmm2_scale`` multiplies the output. The peers return the LSE in base 2, which
``lse_base="2"`` gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import to_indices
from ..arrays.types import Array, DType, Scale
from ..errors import FlashbsrError, ShapeError, UnsupportedError
from .base import reject
from .tables import Call, check_most, lengths, query_indptr

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]

_SPELLING = {
    "q": "query",
    "kv": "kv_cache",
    "workspace": "workspace_buffer",
    "kv_lens": "seq_lens",
    "q_scale": "bmm1_scale",
    "v_scale": "bmm2_scale",
    "o_dtype": "out_dtype",
}


def _check_scale(o_scale: float) -> None:
    if o_scale != 1.0:
        raise UnsupportedError("o_scale", o_scale, "1: fold 1 / o_scale into bmm2_scale")


def _one_sink(sinks: Any) -> Any:
    """TensorRT-LLM's functions take a list of one array."""
    if not isinstance(sinks, (list, tuple)):
        return sinks
    if len(sinks) != 1:
        raise ShapeError("sinks", f"{len(sinks)} arrays", "one, [num_qo_heads]")
    return sinks[0]


def trtllm_batch_decode_with_kv_cache(
    query: Array,
    kv_cache: Array | tuple[Array, Array],
    workspace_buffer: Array | int | None,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Array = None,
    out_dtype: DType = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: Any = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: Any = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Array = None,
    skip_softmax_threshold_scale_factor: Any = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Array = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
    *,
    lse_base: str = "e",
) -> Any:
    """Attention of the last tokens of each request against a paged cache given by a block table.

    Parameters
    ----------
    query : array [tokens, num_qo_heads, head_dim]
        float32, float16, bfloat16 or float8_e4m3fn; `q_len_per_req` tokens of each request.
    kv_cache : array or tuple of two
        Stacked ``[pages, 2, num_kv_heads, page_size, head_dim]`` (NHD: ``page_size`` before
        ``num_kv_heads``), or ``(k, v)`` without the 2. Any strides but the last.
    workspace_buffer : None, int or uint8 array
        Scratch memory for partial results: None (owned), a size in bytes, or an array, which is
        kept as long as its engine. It need not be zero.
    block_tables : int32 or int64 array [B, max_pages]
        Page ids; those beyond a request's length are not read.
    seq_lens : int32, uint32 or int64 array [B]
        KV tokens of each request, the new ones included.
    max_seq_len : int
        No request is longer.
    bmm1_scale, bmm2_scale : float or float32 array, optional
        Of the logits, with ``1 / sqrt(head_dim)`` in it, and of the output. One number; or one per
        query head and one per KV head.
    window_left : int
        Keys kept behind the query, inclusive. -1: all.
    out : array [tokens, num_qo_heads, head_dim], optional
        Written and returned.
    out_dtype : data type, optional
        Default: that of `out`, otherwise of `query` (bfloat16 for float8).
    sinks : float32 array [num_qo_heads], or a list of it, optional
        Learned logit per head that takes part in the softmax (and the LSE) and has no value.
    kv_layout : {"HND", "NHD"}
    enable_pdl : bool, optional
        As in `Attention.run`.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    q_len_per_req : int
        Query tokens of each request; they see each other causally.
    o_scale : float
        Only 1.
    max_q_len, cum_seq_lens_q : int, and int32 or int64 array [B + 1], optional
        Different numbers of query tokens: offsets, and an upper limit.
    uses_shared_paged_kv_idx : bool
        Only True: K and V have one table.
    lse : float32 array [tokens, num_qo_heads], optional
        Written and returned.
    return_lse : bool
        Return ``(out, lse)``.
    mask, o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, kv_cache_sf : None
    bmm1_scale_log2, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode : None
    enable_block_sparse_attention : bool
        Only False.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.

    Returns
    -------
    out, or (out, lse)

    Raises
    ------
    ShapeError, DTypeError, IndexRangeError, DeviceError, UnsupportedError, FlashbsrError
        The argument, what it was, what is allowed.

    Examples
    --------
    A request of 3 tokens in page 1. Keys are zero, so that attention is the mean of the positions.

    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((2, 2, 1, 4, 64), np.float32)  # HND
    >>> cache[1, 1] = np.arange(4, dtype=np.float32)[:, None]
    >>> out = flashbsr.flashinfer.trtllm_batch_decode_with_kv_cache(
    ...     np.ones((1, 1, 64), np.float32), cache, None, np.array([[1]]), np.array([3]), 4,
    ...     bmm1_scale=0.125,
    ... )
    >>> out[0, 0, 0].item()
    1.0
    """
    reject(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, mask=mask,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf, bmm1_scale_log2=bmm1_scale_log2,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        enable_block_sparse_attention=enable_block_sparse_attention,
        bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
    )  # fmt: skip
    _check_scale(o_scale)
    _check_shared_table(uses_shared_paged_kv_idx)
    kv_lens = lengths(seq_lens, "seq_lens")
    check_most("max_seq_len", max_seq_len, kv_lens)
    qo_indptr = query_indptr(q_len_per_req, len(kv_lens))
    if cum_seq_lens_q is not None:
        if q_len_per_req != 1:
            raise FlashbsrError("q_len_per_req", q_len_per_req, "1 next to cum_seq_lens_q")
        qo_indptr = to_indices(cum_seq_lens_q, "cum_seq_lens_q")
    if max_q_len is not None:
        counts = [q_len_per_req] if cum_seq_lens_q is None else np.diff(to_indices(cum_seq_lens_q))
        check_most("max_q_len", max_q_len, np.asarray(counts))
    call = Call(
        query, kv_cache, block_tables, kv_lens, qo_indptr, causal=qo_indptr is not None,
        sm_scale=1.0, spelling=_SPELLING | _query_spelling(cum_seq_lens_q is not None),
        kv_layout=kv_layout, window_left=window_left, workspace=workspace_buffer, backend=backend,
        o_dtype=out_dtype, lse_base=lse_base,
    )  # fmt: skip
    scales = (bmm1_scale, None, bmm2_scale)
    return call.run(out, lse, return_lse, scales, _one_sink(sinks), enable_pdl)


def _query_spelling(given: bool) -> dict[str, str]:
    return {"qo_indptr": "cum_seq_lens_q" if given else "q_len_per_req"}


def _check_shared_table(uses_shared_paged_kv_idx: bool) -> None:
    if not uses_shared_paged_kv_idx:
        raise UnsupportedError(
            "uses_shared_paged_kv_idx",
            False,
            "True: K and V have one table; a tuple (k, v) may have arrays of its own",
        )


def xqa_batch_decode_with_kv_cache(
    query: Array,
    kv_cache: Array | tuple[Array, Array],
    workspace_buffer: Array | int | None,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Array = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int = 1,
    o_scale: float = 1.0,
    mask: Any = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Array = None,
) -> Array:
    """Attention of the last tokens of each request: `trtllm_batch_decode_with_kv_cache`, NHD.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale
        As there; so are the others.
    kv_layout : {"NHD", "HND"}
    q_cu_seq_lens : int32 or int64 array [B + 1], optional
        Its ``cum_seq_lens_q``.

    Returns
    -------
    array [tokens, num_qo_heads, head_dim]

    Raises
    ------
    As there.

    Examples
    --------
    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.ones((2, 2, 4, 1, 64), np.float32)
    >>> out = flashbsr.flashinfer.xqa_batch_decode_with_kv_cache(
    ...     np.ones((1, 1, 64), np.float32), cache, None, np.array([[1]]), np.array([3]), 4
    ... )
    >>> out[0, 0, 0].item()
    1.0
    """
    try:
        result: Array = trtllm_batch_decode_with_kv_cache(
            query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale,
            bmm2_scale, window_left, out, sinks=sinks, kv_layout=kv_layout, enable_pdl=enable_pdl,
            q_len_per_req=q_len_per_req, o_scale=o_scale, mask=mask, kv_cache_sf=kv_cache_sf,
            cum_seq_lens_q=q_cu_seq_lens,
        )  # fmt: skip
    except FlashbsrError as error:
        raise error.respell({"cum_seq_lens_q": "q_cu_seq_lens"}) from None
    return result


def trtllm_batch_context_with_kv_cache(
    query: Array,
    kv_cache: Array | tuple[Array, Array],
    workspace_buffer: Array | int | None,
    block_tables: Array,
    seq_lens: Array,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: Array,
    cum_seq_lens_kv: Array,  # noqa: ARG001
    window_left: int = -1,
    out: Array = None,
    out_dtype: DType = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Array = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Any = None,
    use_fp16_softmax: Any = None,
    uses_spcompress: Any = None,
    *,
    backend: str = "auto",
    lse_base: str = "e",
    fp8_accumulation: str = "default",
) -> Any:
    """Attention of the new tokens of prompts against a paged cache given by a block table.

    Parameters
    ----------
    query, kv_cache, workspace_buffer, block_tables, seq_lens, bmm1_scale, bmm2_scale
        As in `trtllm_batch_decode_with_kv_cache`; so is what is not named here.
    max_q_len, max_kv_len : int
        No request has more query tokens, or KV.
    batch_size : int
        That of `seq_lens`.
    cum_seq_lens_q : int32 or int64 array [B + 1]
        Request *i* has the rows ``query[cum_seq_lens_q[i]:cum_seq_lens_q[i + 1]]``.
    cum_seq_lens_kv : array [B + 1]
        Without effect: `seq_lens` says it. (Engines pass offsets of tokens or of pages.)
    causal : bool
        Bottom-right aligned: key *j* is visible to query *i* iff ``j <= i + kv_len - q_len``.
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    fp8_accumulation : {"default", "fast"}
        As in `TaskInfo`.
    use_fp16_softmax, uses_spcompress : None

    Returns
    -------
    out, or (out, lse)

    Raises
    ------
    ShapeError, DTypeError, IndexRangeError, DeviceError, UnsupportedError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> import flashbsr
    >>> cache = np.zeros((2, 2, 1, 4, 64), np.float32)  # HND
    >>> cache[1, 1] = np.arange(4, dtype=np.float32)[:, None]
    >>> out = flashbsr.flashinfer.trtllm_batch_context_with_kv_cache(
    ...     np.ones((2, 1, 64), np.float32), cache, None, np.array([[1]]), np.array([3]), 2, 4,
    ...     0.125, 1.0, 1, np.array([0, 2]), np.array([0, 3]),
    ... )
    >>> out[:, 0, 0].tolist()
    [0.5, 1.0]
    """
    reject(
        o_sf_scale=o_sf_scale, o_sf_vec_size=o_sf_vec_size, kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
        use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
    )  # fmt: skip
    _check_shared_table(uses_shared_paged_kv_idx)
    kv_lens = lengths(seq_lens, "seq_lens")
    if len(kv_lens) != batch_size:
        raise FlashbsrError("batch_size", batch_size, f"{len(kv_lens)}, the lengths in seq_lens")
    qo_indptr = to_indices(cum_seq_lens_q, "cum_seq_lens_q")
    check_most("max_kv_len", max_kv_len, kv_lens)
    check_most("max_q_len", max_q_len, np.diff(qo_indptr))
    call = Call(
        query, kv_cache, block_tables, kv_lens, qo_indptr, causal=causal, sm_scale=1.0,
        spelling=_SPELLING | _query_spelling(True), kv_layout=kv_layout, window_left=window_left,
        workspace=workspace_buffer, backend=backend, o_dtype=out_dtype, lse_base=lse_base,
        fp8_accumulation=fp8_accumulation,
    )  # fmt: skip
    scales = (bmm1_scale, None, bmm2_scale)
    return call.run(out, lse, return_lse, scales, _one_sink(sinks), enable_pdl)
