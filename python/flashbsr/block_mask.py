# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Mask functions give sparsity: blocks that nobody sees are not computed at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._check import check_int
from .adapters import to_numpy
from .attention import Attention
from .errors import ShapeError, UnsupportedError

__all__ = ["BlockMask", "block_mask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """What a mask function keeps, as a block-sparse matrix; `block_mask` makes it.

    Attributes
    ----------
    indptr : int32 array, shape (block rows + 1,)
    indices : int32 array, shape (nnz,)
        Block columns of which some pair is kept.
    mask : bool array, shape (nnz, R, C), or None
        Pairs within those blocks; None where every block is kept whole.
    partial : bool array, shape (nnz,)
        Blocks that are not kept whole.
    shape, block : tuple of 2 ints
        M query rows and N keys; R and C of a block.

    Examples
    --------
    >>> blocks = block_mask(lambda b, h, q, kv: kv <= q, 256, 256)
    >>> blocks.indices.tolist(), blocks.partial.tolist()
    ([0, 0, 1], [True, False, True])
    """

    indptr: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_] | None
    partial: npt.NDArray[np.bool_]
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def density(self) -> float:
        """Part of all blocks that is computed."""
        rows, columns = (-(-n // b) for n, b in zip(self.shape, self.block, strict=True))
        return len(self.indices) / max(rows * columns, 1)

    def plan(self, attention: Attention, *, stream: Any = None) -> None:
        """Plan an attention whose task has ``page_size = C``; k and v are ``(N / C, C, H, D)``.

        Raises
        ------
        As `Attention.plan_bsr`.
        """
        attention.plan_bsr(
            self.indptr, self.indices, *self.shape, *self.block, mask=self.mask, stream=stream
        )


def block_mask(
    mask_mod: Callable[..., Any],
    q_lens: int | Sequence[int],
    kv_lens: int | Sequence[int],
    *,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Evaluate a mask function for all pairs, block by block, on the host.

    Parameters
    ----------
    mask_mod : callable ``(b, h, q_idx, kv_idx) -> bool``
        As in `AttentionSpec.from_functions`, without extras; the same for all heads.
    q_lens, kv_lens : int or sequence of int
        Query tokens and keys of each request. Requests follow each other in blocks of their own:
        keys are multiples of C, and so are queries of R, but for the last request's.
    block_size : int or (R, C)
        Of a block: queries and keys.

    Returns
    -------
    BlockMask

    Raises
    ------
    ShapeError, UnsupportedError
        Lengths that are not whole blocks; a function of the head.

    Notes
    -----
    Takes time and, for a row of blocks, memory in proportion to all pairs, as FlexAttention's
    ``create_block_mask`` does: for masks that serve many runs.

    Examples
    --------
    >>> window = block_mask(lambda b, h, q, kv: (kv <= q) & (kv > q - 256), 1024, 1024)
    >>> window.indptr.tolist()
    [0, 1, 3, 6, 9, 12, 15, 18, 21]
    >>> int(window.partial.sum()), round(window.density, 2)
    (14, 0.33)
    """
    r, c = (
        check_int("block_size", n, 1)
        for n in (block_size if isinstance(block_size, tuple) else (block_size, block_size))
    )
    queries, keys = check_lengths(q_lens, kv_lens)
    for name, lens, size in (("q_lens", queries[:-1], r), ("kv_lens", keys, c)):
        for n in lens:
            if n % size:
                raise ShapeError(name, n, f"a multiple of the block size, {size}")
    seen_by = trace_for_all_heads(mask_mod)
    rows = [
        _block_row(seen_by, (b, q_len, kv_len), first, (r, c))
        for b, (q_len, kv_len) in enumerate(zip(queries, keys, strict=True))
        for first in range(0, q_len, r)
    ]
    offsets = np.cumsum([0, *keys]) // c
    indices = [found + offsets[b] for b, found, _ in rows]
    kept = np.concatenate([np.zeros((0, r, c), np.bool_), *(blocks for _, _, blocks in rows)])
    partial = np.logical_not(kept.all(axis=(1, 2)))
    return BlockMask(
        np.cumsum([0, *(len(found) for found in indices)]).astype(np.int32),
        np.concatenate([np.zeros(0, np.int32), *indices]).astype(np.int32),
        kept if partial.any() else None,
        partial,
        (sum(queries), sum(keys)),
        (r, c),
    )


def check_lengths(
    q_lens: int | Sequence[int], kv_lens: int | Sequence[int]
) -> tuple[list[int], list[int]]:
    """Lengths of each request; one number is one request."""
    queries, keys = (
        [check_int(name, n, 0) for n in ((lens,) if isinstance(lens, int) else lens)]
        for name, lens in (("q_lens", q_lens), ("kv_lens", kv_lens))
    )
    if len(queries) != len(keys):
        raise ShapeError("kv_lens", f"{len(keys)} lengths", f"{len(queries)}, as many as q_lens")
    return queries, keys


def trace_for_all_heads(
    mask_mod: Callable[..., Any],
) -> Callable[[tuple[int, int, int], int, int], npt.NDArray[np.bool_]]:
    """Trace a mask function; returns one of ((b, q_len, kv_len), first query, queries).

    It gives what those queries see, ``(queries, kv_len)``.
    """
    from .trace.build import trace_mask  # 10 ms, for those who need it
    from .trace.evaluate import evaluate

    root, captured = trace_mask(mask_mod)
    if root.deps & {"h", "kv_head"}:
        raise UnsupportedError(
            "mask_mod",
            "a function of the head",
            "one mask for all heads, or AttentionSpec.from_functions, which asks it per head",
        )
    arrays = {name: to_numpy(array, name) for name, array in captured.items()}

    def seen_by(request: tuple[int, int, int], first: int, count: int) -> npt.NDArray[np.bool_]:
        b, q_len, kv_len = request
        q_idx = np.arange(first, first + count, dtype=np.int64)[:, None]
        leaves = {
            "b": b,
            "q_idx": q_idx,
            "kv_idx": np.arange(kv_len, dtype=np.int64)[None, :],
            "q_position": q_idx + kv_len - q_len,
            "q_len": q_len,
            "kv_len": kv_len,
        }
        return np.broadcast_to(evaluate(root, leaves, arrays).astype(np.bool_), (count, kv_len))

    return seen_by


def _block_row(
    seen_by: Callable[..., npt.NDArray[np.bool_]],
    request: tuple[int, int, int],
    first: int,
    block: tuple[int, int],
) -> tuple[int, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Columns and contents of the blocks that queries from `first` on see some of."""
    (b, q_len, kv_len), (r, c) = request, block
    count = min(r, q_len - first)
    seen = seen_by(request, first, count)
    blocks = seen.reshape(count, kv_len // c, c).swapaxes(0, 1)
    found = np.flatnonzero(blocks.any(axis=(1, 2)))
    kept = np.ones((len(found), r, c), np.bool_)  # rows past the last query are not read
    kept[:, :count] = blocks[found]
    return b, found, kept
