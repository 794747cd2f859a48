# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of one request with contiguous keys and values.

The engines are kept (per thread, by their options), so that a call allocates nothing but its
result, and plans only when the lengths or a mask changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._check import check_backend, check_name
from ..arrays import adapter_for, to_numpy
from ..arrays.types import Array, DType, Scale
from ..engine.attention import Attention
from ..errors import FlashbsrError, ShapeError
from .base import reject
from .engines import Engines

__all__ = ["single_decode_with_kv_cache", "single_prefill_with_kv_cache"]

_engines = Engines()  # their notes: the (query, KV) lengths of the plan


def _planned(
    key: tuple[Any, ...],
    spec: dict[str, Any],
    task: dict[str, Any],
    lengths: tuple[int, int],
    custom_mask: Array,
    packed_custom_mask: Array,
    q: Array,
) -> Attention:
    entry = _engines.find(key, spec, task, q)
    attention = entry.attention
    masked = custom_mask is not None or packed_custom_mask is not None
    if masked or entry.planned != lengths:
        entry.planned = None  # stays so if plan raises
        attention.plan(
            np.array((0, lengths[0])),
            np.array((0, lengths[1])),
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
        )
        entry.planned = None if masked else lengths
    return attention


def _shapes(q: Array, k: Array, v: Array, kv_layout: str) -> tuple[tuple[int, ...], int, int, int]:
    """Shape of q, and KV length, KV heads and head_dim_vo."""
    check_name("kv_layout", kv_layout, ("NHD", "HND"))
    for name, x in (("q", q), ("k", k), ("v", v)):
        adapter_for(x, name)
    q_shape, k_shape, v_shape = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    axes = "[kv_len, num_kv_heads, head_dim]"
    if kv_layout == "HND":
        axes = "[num_kv_heads, kv_len, head_dim]"
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if len(shape) != 3:
            raise ShapeError(name, f"shape {shape}", axes)
    if k_shape[:2] != v_shape[:2]:
        raise ShapeError("v", f"shape {v_shape}", f"tokens and heads of k, which has {k_shape}")
    kv_len, heads = k_shape[:2] if kv_layout == "NHD" else k_shape[1::-1]
    if q_shape[-1] != k_shape[2]:
        raise ShapeError("k", f"head_dim {k_shape[2]}", f"that of q, {q_shape[-1]}")
    return q_shape, kv_len, heads, v_shape[2]


def single_decode_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    sinks: Array = None,
    alibi_slopes: Array = None,
    lse_base: str = "e",
) -> Any:
    """Attention of one query token, the last of its sequence.

    Parameters
    ----------
    q : array [num_qo_heads, head_dim]
        float32, float16, bfloat16 or float8_e4m3fn.
    k, v : array [kv_len, num_kv_heads, head_dim]
        HND: ``[num_kv_heads, kv_len, head_dim]``. The type of `q`, or unless that is float8 also
        float8_e4m3fn / float8_e5m2. Any strides but the last; the head dim of `v` may differ.
    kv_layout : {"NHD", "HND"}
    pos_encoding_mode : {"NONE", "ROPE_LLAMA", "ALIBI"}
    use_tensor_cores : bool
        Only False: one kernel serves every head ratio.
    q_scale, k_scale, v_scale : float or float32 array, optional
        Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first two
        multiply the logits, the third the output.
    window_left : int
        Keys kept behind the query, inclusive. -1: all.
    logits_soft_cap : float, optional
        ``cap * tanh(x / cap)`` on the scaled logits. None or 0: off.
    sm_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    rope_scale, rope_theta : float, optional
        Default 1 and 10000.
    return_lse : bool
        Return ``(out, lse)``.
    sinks : float32 array [num_qo_heads], optional
        Learned logit per head that takes part in the softmax (and the LSE) and has no value.
    alibi_slopes : float32 array [num_qo_heads], optional
        For ``pos_encoding_mode="ALIBI"``. Default: the standard ones.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.

    Returns
    -------
    out : array [num_qo_heads, head_dim]
        Of the caller's kind; the type of `q`, bfloat16 for float8.
    lse : float32 array [num_qo_heads]
        Only with ``return_lse=True``.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, UnsupportedError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> q = np.ones((2, 32), np.float32)
    >>> k = np.zeros((3, 1, 32), np.float32)
    >>> v = k + np.array([0, 1, 5], np.float32)[:, None, None]
    >>> out, lse = single_decode_with_kv_cache(q, k, v, return_lse=True)
    >>> out[:, 0].tolist(), np.exp(lse).round(4).tolist()
    ([2.0, 2.0], [3.0, 3.0])
    """
    if use_tensor_cores:
        reject(use_tensor_cores=use_tensor_cores)
    if len(getattr(q, "shape", (0, 0))) != 2:
        raise ShapeError("q", f"shape {tuple(q.shape)}", "[num_qo_heads, head_dim]")
    q_shape, kv_len, kv_heads, head_dim_vo = _shapes(q, k, v, kv_layout)
    key = (
        q_shape, kv_heads, head_dim_vo, kv_layout, pos_encoding_mode, window_left,
        logits_soft_cap, sm_scale, rope_scale, rope_theta, lse_base,
    )  # fmt: skip
    attention = _planned(
        key,
        {
            "window_left": window_left,
            "sm_scale": sm_scale,
            "logits_soft_cap": logits_soft_cap,
            "pos_encoding_mode": pos_encoding_mode,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
        },
        {
            "num_qo_heads": q_shape[0],
            "num_kv_heads": kv_heads,
            "head_dim_qk": q_shape[1],
            "head_dim_vo": head_dim_vo,
            "kv_layout": kv_layout,
            "lse_base": lse_base,
        },
        (1, kv_len),
        None,
        None,
        q,
    )
    result = attention.run(
        q[None],
        (k, v),
        return_lse=return_lse,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    return (result[0][0], result[1][0]) if return_lse else result[0]


def single_prefill_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    o_dtype: DType = None,
    custom_mask: Array = None,
    packed_custom_mask: Array = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    *,
    sinks: Array = None,
    alibi_slopes: Array = None,
    lse_base: str = "e",
    fp8_accumulation: str = "default",
) -> Any:
    """Attention of several query tokens, the last of their sequence.

    Parameters
    ----------
    q : array [qo_len, num_qo_heads, head_dim_qk]
        float32, float16, bfloat16 or float8_e4m3fn.
    k : array [kv_len, num_kv_heads, head_dim_qk]
        HND: ``[num_kv_heads, kv_len, head_dim_qk]``. The type of `q`, or unless that is float8 also
        float8_e4m3fn / float8_e5m2. Any strides but the last.
    v : array [kv_len, num_kv_heads, head_dim_vo]
        Likewise.
    scale_q, scale_k, scale_v : float or float32 array, optional
        Per tensor or per head (q: ``[num_qo_heads]``, k and v: ``[num_kv_heads]``). The first two
        multiply the logits, the third the output.
    o_dtype : data type, optional
        float32, float16 or bfloat16. Default: that of `q`, bfloat16 for float8.
    custom_mask : bool array [qo_len, kv_len], optional
        True keeps. Replaces `causal`; `window_left` still holds.
    packed_custom_mask : uint8 array [ceil(qo_len * kv_len / 8)], optional
        The same, flattened, in little-endian bits.
    causal : bool
        Bottom-right aligned: key *j* is visible to query *i* iff ``j <= i + kv_len - qo_len``.
    kv_layout : {"NHD", "HND"}
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
    backend : {"auto", "cpu", "cuda", "fa2", "fa3"}
        As in `TaskInfo`.
    return_lse : bool
        Return ``(out, lse)``.
    kv_cache_sf : None
    k_scale, v_scale : float or float32 array, optional
        Other names of `scale_k` and `scale_v`.
    sinks : float32 array [num_qo_heads], optional
        Learned logit per head that takes part in the softmax (and the LSE) and has no value.
    alibi_slopes : float32 array [num_qo_heads], optional
        For ``pos_encoding_mode="ALIBI"``. Default: the standard ones.
    lse_base : {"e", "2"}
        Base of the LSE. FlashInfer's is 2.
    fp8_accumulation : {"default", "fast"}
        As in `TaskInfo`.

    Returns
    -------
    out : array [qo_len, num_qo_heads, head_dim_vo]
        Of the caller's kind. A row that sees no key gives 0.
    lse : float32 array [qo_len, num_qo_heads]
        Only with ``return_lse=True``. ``-inf`` for a row that sees no key.

    Raises
    ------
    ShapeError, DTypeError, DeviceError, UnsupportedError, FlashbsrError

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.ones((3, 2, 32), np.float32), np.zeros((3, 1, 32), np.float32)
    >>> v = k + np.arange(3, dtype=np.float32)[:, None, None]
    >>> single_prefill_with_kv_cache(q, k, v, causal=True)[:, 0, 0].tolist()
    [0.0, 0.5, 1.0]
    """
    if use_fp16_qk_reduction or kv_cache_sf is not None:
        reject(use_fp16_qk_reduction=use_fp16_qk_reduction, kv_cache_sf=kv_cache_sf)
    check_backend(backend)
    scale_k = _either("k_scale", k_scale, scale_k)
    scale_v = _either("v_scale", v_scale, scale_v)
    if len(getattr(q, "shape", (0, 0, 0))) != 3:
        raise ShapeError("q", f"shape {tuple(q.shape)}", "[qo_len, num_qo_heads, head_dim]")
    q_shape, kv_len, kv_heads, head_dim_vo = _shapes(q, k, v, kv_layout)
    if custom_mask is not None:
        custom_mask = to_numpy(custom_mask, "custom_mask")
        if custom_mask.shape != (q_shape[0], kv_len):
            raise ShapeError(
                "custom_mask", f"shape {custom_mask.shape}", f"({q_shape[0]}, {kv_len})"
            )
        custom_mask = custom_mask.reshape(-1)
    causal = causal and custom_mask is None and packed_custom_mask is None
    key = (
        q_shape[1:], kv_heads, head_dim_vo, o_dtype, causal, kv_layout, pos_encoding_mode,
        sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, lse_base, backend,
        fp8_accumulation,
    )  # fmt: skip
    attention = _planned(
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
            "num_qo_heads": q_shape[1],
            "num_kv_heads": kv_heads,
            "head_dim_qk": q_shape[2],
            "head_dim_vo": head_dim_vo,
            "kv_layout": kv_layout,
            "o_dtype": o_dtype,
            "lse_base": lse_base,
            "backend": backend,
            "fp8_accumulation": fp8_accumulation,
        },
        (q_shape[0], kv_len),
        custom_mask,
        packed_custom_mask,
        q,
    )
    return attention.run(
        q,
        (k, v),
        return_lse=return_lse,
        q_scale=scale_q,
        k_scale=scale_k,
        v_scale=scale_v,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )


def _either(name: str, value: Scale, other: Scale) -> Scale:
    if value is not None and other is not None:
        raise FlashbsrError(name, type(value).__name__, "None next to its other name")
    return other if value is None else value
