# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's `flex_attention` over its own block masks; forward only.

A `BlockMask` is a block-sparse matrix: its full blocks are taken as they are, its partial ones with
the bits that its ``mask_mod`` gives. The plan is kept with the mask, so that layers and steps that
have the same mask plan once.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import create_mask

from .._check import check_float
from ..engine.attention import Attention
from ..engine.call import attention
from ..engine.task import TaskInfo
from ..errors import ShapeError, UnsupportedError
from ..layout.layouts import Bsr
from ..variant.spec import AttentionSpec

__all__ = ["flex_attention"]

_planned: weakref.WeakKeyDictionary[Any, dict[Any, Attention]] = weakref.WeakKeyDictionary()


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,  # noqa: ARG001
) -> Any:
    """Attention over the pairs that a block mask keeps.

    Parameters
    ----------
    query : tensor, shape (B, H_q, S_q, D)
    key, value : tensor, shape (B, H_kv, S_kv, D) and (B, H_kv, S_kv, D_v)
    score_mod
        Only None: scores are changed by an `AttentionSpec` (soft cap, ALiBi) or a variant of it.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        One for all heads; None: every query sees every key. It is read once, on the host.
    scale : float, optional
        Default ``1 / sqrt(D)``.
    enable_gqa : bool
        Needed where H_q is not H_kv.
    return_lse : bool
        Return (out, lse).
    kernel_options
        Read by nobody.

    Returns
    -------
    out, or (out, lse)
        (B, H_q, S_q, D_v), and (B, H_q, S_q) in float32, natural. Rows that see no key are 0.

    Raises
    ------
    UnsupportedError
        A `score_mod`; a mask for each head; requests whose lengths are no multiple of a block,
        where there are several.
    ShapeError
        A mask of other lengths; H_q that is not H_kv without `enable_gqa`.
    """
    if score_mod is not None:
        raise UnsupportedError(
            "score_mod", getattr(score_mod, "__name__", "a function"),
            "None: AttentionSpec has a soft cap and ALiBi, AttentionSpec.variant your own",
        )  # fmt: skip
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError("query", f"{query.shape[1]} heads", f"{key.shape[1]}, or enable_gqa=True")
    if block_mask is None:
        found = attention(
            *(x.transpose(1, 2) for x in (query, key, value)), sm_scale=scale, return_lse=return_lse
        )
        out, lse = found if return_lse else (found, None)
        out = out.transpose(1, 2)
        return out if lse is None else (out, lse.transpose(1, 2))
    _check(query, key, value)
    scale = None if scale is None else check_float("scale", scale)  # a tensor is known by address
    (batch, heads, q_len, dim), kv_len = query.shape, key.shape[2]
    dims = batch, heads, key.shape[1], q_len, kv_len, dim, value.shape[3]
    what = (*dims, query.dtype, query.device, scale)
    engines = _planned.setdefault(block_mask, {})
    engine = engines.get(what)
    if engine is None:
        engine = engines[what] = _plan(block_mask, query, dims, scale)
    # One matrix of all requests: their tokens behind each other.
    q, k, v = (x.transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (query, key, value))
    found = engine.run(q, (k, v), return_lse=return_lse)
    out, lse = found if return_lse else (found, None)
    out = out.view(batch, q_len, heads, dims[6]).transpose(1, 2)
    return out if lse is None else (out, lse.view(batch, q_len, heads).transpose(1, 2))


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise for shapes that do not fit: as rows of one matrix they might."""
    if len(query.shape) != 4:
        raise ShapeError("query", f"shape {tuple(query.shape)}", "(B, H_q, S_q, D)")
    expected = f"({query.shape[0]}, H_kv, S_kv, D)"
    if len(key.shape) != 4 or key.shape[0] != query.shape[0]:
        raise ShapeError("key", f"shape {tuple(key.shape)}", expected)
    if len(value.shape) != 4 or value.shape[:3] != key.shape[:3]:
        raise ShapeError("value", f"shape {tuple(value.shape)}", f"{(*key.shape[:3],)} and D_v")


def _plan(
    block_mask: Any, query: torch.Tensor, dims: tuple[int, ...], scale: float | None
) -> Attention:
    batch, heads, kv_heads, q_len, kv_len, dim, dim_vo = dims
    engine = Attention(
        AttentionSpec(sm_scale=scale),
        TaskInfo(heads, kv_heads, dim, head_dim_vo=dim_vo),
    )
    engine.settle(query, "query")
    engine.plan(_matrix(block_mask, batch, q_len, kv_len))
    return engine


def _matrix(block_mask: Any, batch: int, q_len: int, kv_len: int) -> Bsr:
    """All requests on the diagonal of one matrix."""
    if tuple(block_mask.seq_lengths) != (q_len, kv_len):
        raise ShapeError(
            "block_mask", f"{tuple(block_mask.seq_lengths)} tokens", f"{(q_len, kv_len)}"
        )
    of_batch, of_heads = block_mask.kv_num_blocks.shape[:2]
    if of_heads != 1:
        raise UnsupportedError("block_mask", f"masks of {of_heads} heads", "one for all: H=None")
    if of_batch not in (1, batch):
        raise ShapeError("block_mask", f"masks of {of_batch} requests", f"1 or {batch}")
    rows, columns = block_mask.BLOCK_SIZE
    if batch > 1 and (q_len % rows or kv_len % columns):
        raise UnsupportedError(
            "block_mask",
            f"blocks of {rows} x {columns} over {batch} requests of {q_len} x {kv_len}",
            "lengths that are multiples of the blocks, or one request at a time",
        )  # fmt: skip
    counts, indices, masks = [], [], []
    for request in range(batch):
        first = request * -(-kv_len // columns)
        for row, (partial, full) in enumerate(_blocks(block_mask, min(request, of_batch - 1))):
            counts.append(len(partial) + len(full))
            indices.append(first + np.concatenate([partial, full]))
            masks += [_bits(block_mask, request, row, column) for column in partial]
            masks += [np.ones((rows, columns), bool)] * len(full)
    mask = np.stack(masks) if masks else np.zeros((0, rows, columns), bool)
    return Bsr(
        np.cumsum([0, *counts]), np.concatenate([*indices, np.zeros(0, np.int64)]).astype(np.int64),
        (batch * q_len, batch * kv_len), (rows, columns), mask=mask,
    )  # fmt: skip


def _blocks(block_mask: Any, request: int) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Partial and full blocks of each row of blocks."""
    lists = []
    for counts, indices in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if counts is None:
            lists.append([np.zeros(0, np.int64)] * block_mask.kv_num_blocks.shape[2])
            continue
        n, at = (x[request, 0].numpy(force=True) for x in (counts, indices))
        lists.append([row[:count] for row, count in zip(at, n, strict=True)])
    return list(zip(*lists, strict=True))


def _bits(block_mask: Any, request: int, row: int, column: int) -> npt.NDArray[np.bool_]:
    """Ask the mask's function what it keeps of a block."""
    rows, columns = block_mask.BLOCK_SIZE
    q_len, kv_len = block_mask.seq_lengths
    first, begin = row * rows, int(column) * columns
    # As PyTorch asks: one pair at a time (vmap), and none behind the ends.
    kept = create_mask(
        lambda b, h, q, kv: block_mask.mask_mod(b + request, h, q + first, kv + begin),
        1, 1, min(rows, q_len - first), min(columns, kv_len - begin), block_mask.kv_indices.device,
    )[0, 0].numpy(force=True)  # fmt: skip
    bits = np.zeros((rows, columns), bool)
    bits[: kept.shape[0], : kept.shape[1]] = kept
    return bits
