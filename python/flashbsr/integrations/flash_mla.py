# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's two functions: absorbed multi-head latent attention, dense and over chosen tokens.

Their names, arguments and results are FlashMLA's (github.com/deepseek-ai/FlashMLA). Arrays of every
framework serve, on a GPU of compute capability 9.0 and on the CPU. A plan is made for the lengths
that `get_mla_metadata` was given; pages, and on a GPU lengths, are read where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..arrays import adapter_for, device_of, to_numpy, to_values
from ..arrays.dtypes import PACKED_LATENTS
from ..arrays.types import Array
from ..engine.kept import planned
from ..errors import FlashbsrError, PlanError, ShapeError, UnsupportedError
from ..layout.bounds import Bounds
from ..ops.latent import PACKED_BYTES

__all__ = ["MlaMetadata", "flash_mla_with_kvcache", "get_mla_metadata"]


BYTES = ("uint8", "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class MlaMetadata:
    """What `flash_mla_with_kvcache` plans from: lengths on the host, or tokens chosen per query."""

    kv_lens: npt.NDArray[Any] | None
    topk: int | None


def get_mla_metadata(
    cache_seqlens: Array | None = None,
    num_q_tokens_per_head_k: int | None = None,  # noqa: ARG001
    num_heads_k: int = 1,
    num_heads_q: int | None = None,  # noqa: ARG001
    is_fp8_kvcache: bool = False,  # noqa: ARG001
    topk: int | None = None,
) -> tuple[MlaMetadata, None]:
    """Take the lengths of a step; once for all its layers.

    Parameters
    ----------
    cache_seqlens : int32 or int64 array, shape (B,), optional
        KV tokens of each request, or bounds of them. On a GPU they are copied to the host, which
        waits for them. Not read with `topk`.
    num_q_tokens_per_head_k, num_heads_q : int, optional
        Read by nobody: the arrays say it.
    num_heads_k : int
        Only 1.
    is_fp8_kvcache : bool
        Read by nobody: the cache says it.
    topk : int, optional
        Tokens chosen for each query, where `flash_mla_with_kvcache` is given ``indices``.

    Returns
    -------
    (metadata, None)
        The second stands for FlashMLA's ``num_splits``.

    Raises
    ------
    UnsupportedError
        Several KV heads.
    """
    if check_int("num_heads_k", num_heads_k, 1) != 1:
        raise UnsupportedError("num_heads_k", num_heads_k, "1: latents are one KV head")
    if topk is None and cache_seqlens is None:
        raise FlashbsrError("cache_seqlens", None, "an array, or topk")
    lens = None
    if topk is None:
        lens = to_values(cache_seqlens, "cache_seqlens").astype(np.int64)
    return MlaMetadata(lens, None if topk is None else check_int("topk", topk, 1)), None


def flash_mla_with_kvcache(
    q: Array,
    k_cache: Array,
    block_table: Array | None,
    cache_seqlens: Array | None,
    head_dim_v: int,
    tile_scheduler_metadata: MlaMetadata,
    num_splits: None = None,  # noqa: ARG001
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Array | None = None,
    attn_sink: Array | None = None,
) -> tuple[Array, Array]:
    """Attend to a cache of latents, of which the first `head_dim_v` dims are the values.

    Parameters
    ----------
    q : array, shape (B, s_q, num_heads, head_dim)
        Absorbed queries with their rotated part behind: 512 + 64 dims.
    k_cache : array, shape (pages, page_size, 1, head_dim)
        Of the type of q. With `is_fp8_kvcache` float8_e4m3fn, one number of which counts as
        itself; or float8_e4m3fn or uint8 with 656 bytes in place of head_dim: 512 codes of e4m3,
        four float32 scales of 128 codes each, 64 bfloat16.
    block_table : int32 or int64 array, shape (B, max_pages)
        Not read with `indices`.
    cache_seqlens : int32 or int64 array, shape (B,)
        KV tokens of each request, at most what `get_mla_metadata` was given. Likewise.
    head_dim_v : int
        512.
    tile_scheduler_metadata : MlaMetadata
        Of `get_mla_metadata`.
    num_splits : None
        Read by nobody.
    softmax_scale : float, optional
        Of the logits; default ``1 / sqrt(head_dim)`` as FlashMLA has it: give that of the heads
        before absorption.
    causal : bool
        Among the s_q tokens of a request, which are its last.
    is_fp8_kvcache : bool
        Whether `k_cache` has 8 bits.
    indices : int32 array, shape (B, s_q, topk), optional
        Tokens of the cache that each query attends to, ``page * page_size + offset``; -1: none.
        `block_table`, `cache_seqlens` and `causal` have no meaning then.
    attn_sink : float32 array, shape (num_heads,), optional
        A logit per head that takes part in the softmax.

    Returns
    -------
    out : array, shape (B, s_q, num_heads, head_dim_v)
    lse : float32 array, shape (B, num_heads, s_q)
        Natural. With `attn_sink` it includes the sink, which FlashMLA's leaves out; -inf, where
        FlashMLA has +inf, if no token is seen.

    Raises
    ------
    PlanError
        Metadata that do not fit: of other lengths, or without the `topk` of the indices.
    ShapeError, DTypeError, DeviceError, UnsupportedError
        Arrays that do not fit each other; no kernel for this on the GPU.
    """
    if len(q.shape) != 4 or len(k_cache.shape) != 4:
        wrong = "q" if len(q.shape) != 4 else "k_cache"
        shape = tuple(q.shape if wrong == "q" else k_cache.shape)
        axes = (
            "(B, s_q, num_heads, head_dim)" if wrong == "q" else "(pages, page_size, 1, head_dim)"
        )
        raise ShapeError(wrong, f"shape {shape}", axes)
    batch, q_len, heads, dim = tuple(q.shape)
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    spec = {"causal": bool(causal) and indices is None, "sm_scale": scale}
    row, kv_dtype = int(k_cache.shape[-1]), None
    if is_fp8_kvcache:
        kv_dtype = PACKED_LATENTS if row == PACKED_BYTES else "float8_e4m3fn"
    elif adapter_for(k_cache, "k_cache").dtype_name(k_cache, "k_cache") in BYTES:
        raise FlashbsrError("is_fp8_kvcache", False, "True with a cache of 8 bits")
    task = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim_qk": dim, "latent": True,
            "head_dim_vo": head_dim_v, "kv_dtype": kv_dtype}  # fmt: skip
    meta = tile_scheduler_metadata
    if indices is None:
        if meta.kv_lens is None or len(meta.kv_lens) != batch:
            raise PlanError(
                "tile_scheduler_metadata", meta, f"get_mla_metadata of the {batch} lengths"
            )
        page_size, bounds, rows = int(k_cache.shape[1]), meta.kv_lens, q_len
        tables, lens, cache = block_table, cache_seqlens, k_cache
    else:
        if meta.topk is None or int(indices.shape[-1]) > meta.topk:
            raise PlanError("tile_scheduler_metadata", meta, f"topk={int(indices.shape[-1])}")
        if len(indices.shape) != 3 or tuple(indices.shape[:2]) != (batch, q_len):
            raise ShapeError(
                "indices", f"shape {tuple(indices.shape)}", f"({batch}, {q_len}, topk)"
            )
        if k_cache.shape[2] != 1:
            raise ShapeError("k_cache", f"{k_cache.shape[2]} heads", "1")
        page_size, bounds, rows = 1, np.full(batch * q_len, meta.topk, np.int64), 1
        tables, lens = _chosen(indices, batch * q_len)
        cache = k_cache.reshape(-1, 1, row)
    qo_indptr = None if rows == 1 else np.arange(len(bounds) + 1) * rows
    attention = planned(
        q, (*spec.values(), *task.values()), lambda: (spec, task), (bounds, rows, page_size),
        lambda: Bounds(qo_indptr, bounds, page_size=page_size), {},
    )  # fmt: skip
    out, lse = attention.run(
        q.reshape(batch * q_len, heads, dim), cache, return_lse=True, sinks=attn_sink,
        kv_lens=lens, block_tables=tables,
    )  # fmt: skip
    lse = lse.reshape(batch, q_len, heads)
    return out.reshape(batch, q_len, heads, head_dim_v), lse.swapaxes(1, 2)


def _chosen(indices: Array, rows: int) -> tuple[Array, Array]:
    """Sort each row of indices: those that are none behind the others; and count the others."""
    flat = indices.reshape(rows, -1)
    if device_of(flat, "indices") is None:
        host = to_numpy(flat, "indices")
        none = host < 0
        order = np.argsort(none, axis=1, kind="stable")
        return np.take_along_axis(host, order, 1), (~none).sum(1)
    if adapter_for(flat, "indices").name != "torch":
        raise UnsupportedError("indices", type(flat).__name__, "a torch tensor on a GPU")
    none = flat < 0
    order = none.argsort(dim=1, stable=True)
    return flat.gather(1, order), (~none).sum(1)
