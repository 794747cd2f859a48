# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions (flash-attn 2.8): their names, argument orders and defaults.

::

    from flashbsr.integrations.flash_attn import flash_attn_func, flash_attn_with_kvcache

Arrays of every framework serve, on the CPU too. There are no gradients and no dropout: what trains
raises. `window_size` is (left, right); right is -1, or 0 for causal. LSEs are natural.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import adapter_for, device_of, to_values
from ..arrays.types import Array
from ..engine.call import attention
from ..engine.kept import planned
from ..errors import FlashbsrError, IndexRangeError, ShapeError, UnsupportedError
from ..layout.bounds import Bounds
from ..layout.layouts import BlockTable
from ..ops.page import append_paged_kv_cache
from ..variant.spec import AttentionSpec

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func", "flash_attn_with_kvcache",
]  # fmt: skip


def flash_attn_func(
    q: Array, k: Array, v: Array, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,  # noqa: ARG001
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention over a dense batch.

    Parameters
    ----------
    q : array, shape (B, S_q, H_q, D)
    k, v : array, shape (B, S_k, H_kv, D)
        H_q is a multiple of H_kv; D of v may differ.
    dropout_p : float
        Only 0.
    softmax_scale : float, optional
        Default ``1 / sqrt(D)``.
    causal : bool
        Aligned at the end: the last query sees all keys.
    window_size : tuple of two int
        Keys before and after a query that it sees; -1: all. After it -1, or 0.
    softcap : float
        ``softcap * tanh(x / softcap)`` of the scaled logits; 0: off.
    alibi_slopes : float32 array, shape (H_q,), optional
        With `causal` only: FlashAttention's bias is of the distance, which has no sign there.
    deterministic : bool
        Read by nobody: results always are.
    return_attn_probs : bool
        Return (out, lse, None).

    Returns
    -------
    out, or (out, lse, None)
        Shapes of q with v's D, and (B, H_q, S_q).

    Raises
    ------
    UnsupportedError
        Dropout, a window after the query, slopes per request or without `causal`.
    ShapeError, DTypeError, DeviceError
        Arrays that do not fit each other.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.ones((2, 3, 4, 64), np.float32), np.ones((2, 7, 2, 64), np.float32)
    >>> flash_attn_func(q, k, k, causal=True).shape
    (2, 3, 4, 64)
    """
    spec = _spec(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    found = attention(
        q, k, v, spec=AttentionSpec(**spec), return_lse=return_attn_probs,
        **({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}),
    )  # fmt: skip
    return (found[0], found[1].swapaxes(1, 2), None) if return_attn_probs else found


def flash_attn_qkvpacked_func(qkv: Array, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of one array (B, S, 3, H, D)."""
    _packed(qkv, "qkv", 3)
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **options)


def flash_attn_kvpacked_func(q: Array, kv: Array, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of q and one array (B, S_k, 2, H_kv, D)."""
    _packed(kv, "kv", 2)
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **options)


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array,
    max_seqlen_q: int | None = None,  # noqa: ARG001
    max_seqlen_k: int | None = None,  # noqa: ARG001
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,  # noqa: ARG001
    return_attn_probs: bool = False, block_table: Array | None = None,
) -> Any:  # fmt: skip
    """Attention over sequences one after another, or over a paged cache.

    Parameters
    ----------
    q : array, shape (tokens_q, H_q, D)
    k, v : array, shape (tokens_k, H_kv, D), or with `block_table` (pages, page_size, H_kv, D)
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array, shape (B + 1,)
        Rows of each sequence; with `block_table` only differences of the second matter. Arrays on
        a GPU are copied to the host, which waits for them.
    max_seqlen_q, max_seqlen_k : int, optional
        Read by nobody.
    block_table : int32 or int64 array, shape (B, max_pages), optional
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out, or (out, lse, None)
        Shapes of q with v's D, and (H_q, tokens_q).

    Raises
    ------
    UnsupportedError, ShapeError, DTypeError, DeviceError, IndexRangeError
        As for `flash_attn_func`; sequences that end behind their array.
    """
    spec = _spec(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    slopes = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}
    if block_table is None:
        found = attention(
            q, k, v, spec=AttentionSpec(**spec), cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, return_lse=return_attn_probs, **slopes,
        )  # fmt: skip
    else:
        rows = to_values(cu_seqlens_q, "cu_seqlens_q").astype(np.int64)
        lens = np.diff(to_values(cu_seqlens_k, "cu_seqlens_k").astype(np.int64))
        tables, page_size = to_values(block_table, "block_table"), int(k.shape[1])
        task = _task(q, k, v)
        engine = planned(
            q, (*spec.values(), *task.values()), lambda: (spec, task),
            (rows, tables, lens, page_size),
            lambda: BlockTable(rows, tables, lens, page_size=page_size), {},
        )  # fmt: skip
        found = engine.run(q, (k, v), return_lse=return_attn_probs, **slopes)
    return (found[0], found[1].swapaxes(0, 1), None) if return_attn_probs else found


def flash_attn_with_kvcache(
    q: Array, k_cache: Array, v_cache: Array, k: Array | None = None, v: Array | None = None,
    rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array | None = None, cache_leftpad: Array | None = None,
    block_table: Array | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True,  # noqa: ARG001
    alibi_slopes: Array | None = None,
    num_splits: int = 0,  # noqa: ARG001
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Write new keys and values into a cache, and attend to it. Lengths and pages stay on a GPU.

    Parameters
    ----------
    q : array, shape (B, S_q, H_q, D)
    k_cache, v_cache : array, shape (B_cache, S, H_kv, D), or paged (pages, page_size, H_kv, D)
    k, v : array, shape (B, S_new, H_kv, D), optional
        Written behind each request's tokens.
    rotary_cos, rotary_sin
        Only None: rotate with `apply_rope_with_cos_sin_cache`, or rotate and write with
        `rope_append_paged_kv_cache`.
    cache_seqlens : int32 or int64 array, shape (B,), or int, optional
        Tokens of each request, without the new ones. Default: all of a row.
    cache_batch_idx : int array, shape (B,), optional
        Row of the cache of each request.
    cache_leftpad
        Only None: `Padded` takes a first token for each row.
    block_table : int32 or int64 array, shape (B, max_pages), optional
        Pages of each request; the cache is paged then.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As for `flash_attn_func`.
    rotary_interleaved, num_splits
        Read by nobody.
    return_softmax_lse : bool

    Returns
    -------
    out, or (out, lse)
        Shapes of q with v's D, and (B, H_q, S_q).

    Raises
    ------
    UnsupportedError, ShapeError, DTypeError, DeviceError
        As for `flash_attn_func`.
    """
    for name, given, way in (
        ("rotary_cos", rotary_cos, "None: apply_rope_with_cos_sin_cache before"),
        ("rotary_sin", rotary_sin, "None: apply_rope_with_cos_sin_cache before"),
        ("cache_leftpad", cache_leftpad, "None: flashbsr.Padded has a first token for each row"),
    ):
        if given is not None:
            raise UnsupportedError(name, "an array", way)
    if (k is None) != (v is None):
        raise FlashbsrError("v" if v is None else "k", None, "both k and v, or neither")
    if len(q.shape) != 4 or len(k_cache.shape) != 4:
        wrong = "q" if len(q.shape) != 4 else "k_cache"
        shape = tuple(q.shape if wrong == "q" else k_cache.shape)
        raise ShapeError(wrong, f"shape {shape}", "4 dimensions")
    spec = _spec(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    batch, q_len, heads, dim = tuple(q.shape)
    page_size = int(k_cache.shape[1])
    if block_table is not None and cache_batch_idx is not None:
        raise UnsupportedError("cache_batch_idx", "an array", "None with block_table")
    tables = _rows(q, batch, cache_batch_idx) if block_table is None else block_table
    capacity = int(tables.shape[1]) * page_size
    lens = _lens(q, batch, capacity if cache_seqlens is None else cache_seqlens)
    if k is not None and v is not None:
        _check_new(k, v, lens, batch)
        lens = _append(k, v, (k_cache, v_cache), lens, tables, page_size)
    flat = q.reshape(batch * q_len, heads, dim)
    bounds = np.full(batch, capacity, np.int64)
    rows = None if q_len == 1 else np.arange(batch + 1) * q_len
    task = _task(flat, k_cache, v_cache)
    engine = planned(
        q, (*spec.values(), *task.values()), lambda: (spec, task), (bounds, q_len, page_size),
        lambda: Bounds(rows, bounds, page_size=page_size), {},
    )  # fmt: skip
    found = engine.run(
        flat, (k_cache, v_cache), kv_lens=lens, block_tables=tables,
        return_lse=return_softmax_lse, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    out, lse = found if return_softmax_lse else (found, None)
    out = out.reshape(batch, q_len, heads, int(v_cache.shape[3]))
    return out if lse is None else (out, lse.reshape(batch, q_len, heads).swapaxes(1, 2))


def _spec(
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
    softcap: float, alibi_slopes: Array | None,
) -> dict[str, Any]:  # fmt: skip
    """Fields of `AttentionSpec`."""
    if dropout_p:
        raise UnsupportedError("dropout_p", dropout_p, "0: flashbsr is for inference")
    left, right = window_size
    if right > 0 or (right < 0 and left >= 0 and not causal):
        raise UnsupportedError(
            "window_size", (left, right), "(left, 0), (left, -1) with causal=True, or (-1, -1)"
        )
    if alibi_slopes is not None and len(alibi_slopes.shape) != 1:
        raise UnsupportedError("alibi_slopes", f"shape {tuple(alibi_slopes.shape)}", "(H_q,)")
    causal = bool(causal) or right == 0
    if alibi_slopes is not None and not causal:
        raise UnsupportedError("alibi_slopes", "an array without causal", "causal=True")
    spec: dict[str, Any] = {"causal": causal, "window_left": int(left) if left >= 0 else -1}
    spec |= {"sm_scale": softmax_scale, "logits_soft_cap": softcap or None}
    spec["pos_encoding_mode"] = "NONE" if alibi_slopes is None else "ALIBI"
    return spec


def _task(q: Array, k: Array, v: Array) -> dict[str, Any]:
    """Fields of `TaskInfo`, of q (tokens, heads, dim) and pages."""
    return {
        "num_qo_heads": int(q.shape[1]),
        "num_kv_heads": int(k.shape[2]),
        "head_dim_qk": int(q.shape[2]),
        "head_dim_vo": int(v.shape[3]),
    }


def _packed(x: Array, name: str, parts: int) -> None:
    if len(x.shape) != 5 or x.shape[2] != parts:
        raise ShapeError(name, f"shape {tuple(x.shape)}", f"(B, S, {parts}, H, D)")


def _rows(q: Array, batch: int, cache_batch_idx: Array | None) -> Any:
    """Each row of a dense cache is a page."""
    if cache_batch_idx is not None:
        return cache_batch_idx.reshape(batch, 1)
    return _there(np.arange(batch, dtype=np.int32)[:, None], q)


def _lens(q: Array, batch: int, lens: Any) -> Any:
    if isinstance(lens, (int, np.integer)):
        return _there(np.full(batch, lens, np.int32), q)
    return lens


def _there(x: npt.NDArray[Any], like: Array) -> Any:
    """Small numbers where the computation is, PyTorch's on a GPU."""
    if device_of(like, "q") is None:
        return x
    if adapter_for(like, "q").name != "torch":
        raise UnsupportedError("cache_seqlens", "None", "an array, and a block_table")
    import torch

    return torch.from_numpy(x).to(like.device)


def _check_new(k: Array, v: Array, lens: Any, batch: int) -> None:
    """Raise for new tokens, or lengths, that are not those of the requests."""
    if len(k.shape) != 4 or k.shape[0] != batch:
        raise ShapeError("k", f"shape {tuple(k.shape)}", f"({batch}, S_new, H_kv, D)")
    if len(v.shape) != 4 or tuple(v.shape[:3]) != tuple(k.shape[:3]):
        expected = ", ".join(map(str, (*k.shape[:3], "D_v")))
        raise ShapeError("v", f"shape {tuple(v.shape)}", f"({expected})")
    if np.shape(lens) != (batch,):
        raise ShapeError("cache_seqlens", f"shape {tuple(np.shape(lens))}", f"({batch},)")


def _append(
    k: Array, v: Array, cache: tuple[Array, Array], lens: Any, tables: Any, page_size: int
) -> Any:
    """Write new tokens; the lengths with them."""
    batch, count, heads = tuple(k.shape)[:3]
    host = device_of(lens, "cache_seqlens") is None
    if host:
        lens, tables = to_values(lens, "cache_seqlens"), to_values(tables, "block_table")
        capacity = int(tables.shape[1]) * page_size
        if batch and count and not 0 <= int(lens.min()) <= int(lens.max()) <= capacity - count:
            raise IndexRangeError(
                "cache_seqlens", f"{int(lens.min())} to {int(lens.max())}, and {count} new tokens",
                f"0 to {capacity - count}: requests have room for {capacity}",
            )  # fmt: skip
    positions = lens[:, None] + _there(np.arange(count, dtype=np.int64), k)
    if host:
        page = np.take_along_axis(tables, positions // page_size, 1)
    else:
        page = tables.gather(1, positions // page_size)
    slots = page * page_size + positions % page_size
    append_paged_kv_cache(
        k.reshape(batch * count, heads, k.shape[3]), v.reshape(batch * count, heads, v.shape[3]),
        paged_kv_cache=cache, slot_mapping=slots.reshape(-1),
    )  # fmt: skip
    return lens + count
