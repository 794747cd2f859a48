# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of `Bsr` made of others: with causality written in, with columns of any widths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..arrays import to_indices, to_numpy, to_values
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, IndexRangeError, ShapeError
from .layouts import Bsr

__all__ = ["block_pages", "causal_blocks", "variable_blocks"]

Ints = npt.NDArray[np.int64]


def causal_blocks(
    indptr: Array,
    indices: Array,
    m: int,
    n: int,
    r: int,
    c: int,
    mask: Array,
    packed_mask: Array,
    heads: int = 1,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Write causality into a BSR matrix: drop invisible blocks, mask the partial ones.

    Parameters
    ----------
    indptr, indices, m, n, r, c, mask, packed_mask
        As `Bsr` has them: ``(m, n)`` the shape, ``(r, c)`` the block.
    heads : int
        Matrices, one after another.

    Returns
    -------
    indptr : int64 array [heads ceil(m / r) + 1]
    indices : int64 array [nnz']
        Blocks with a visible element.
    mask : bool array [nnz', r, c] or None
        None if every block that is left counts whole.

    Raises
    ------
    ShapeError, IndexRangeError, FlashbsrError
        A matrix that is none.

    Examples
    --------
    >>> import numpy as np
    >>> indptr, indices, mask = causal_blocks(
    ...     np.array([0, 2, 4]), np.array([0, 1, 0, 1]), 4, 4, 2, 2, None, None
    ... )
    >>> indptr.tolist(), indices.tolist()
    ([0, 1, 3], [0, 0, 1])
    >>> mask.astype(int).tolist()
    [[[1, 0], [1, 1]], [[1, 1], [1, 1]], [[1, 0], [1, 1]]]
    """
    m, n = check_int("M", m, 0), check_int("N", n, 0)
    r, c = check_int("R", r, 1), check_int("C", c, 1)
    starts, columns = to_indices(indptr, "indptr"), to_indices(indices, "indices")
    rows, width = heads * -(-m // r), -(-n // c)
    if starts.shape != (rows + 1,):
        raise ShapeError("indptr", f"shape {starts.shape}", f"({rows + 1},): block rows + 1")
    if starts[0] != 0 or starts[-1] != columns.size or (np.diff(starts) < 0).any():
        raise IndexRangeError(
            "indptr", f"from {starts[0]} to {starts[-1]}", f"ascending from 0 to {columns.size}"
        )
    if columns.size and not 0 <= columns.min() <= columns.max() < width:
        at = int(np.flatnonzero((columns < 0) | (columns >= width))[0])
        raise IndexRangeError(
            "indices", f"{columns[at]} at {at}", f"0 to ceil(N / C) - 1 = {width - 1}"
        )
    shape = (columns.size, r, c)
    kept = None
    if mask is not None and packed_mask is not None:
        raise FlashbsrError("packed_mask", type(packed_mask).__name__, "None next to mask")
    if mask is not None:
        kept = to_numpy(mask, "mask")
        if kept.shape != shape:
            raise ShapeError("mask", f"shape {kept.shape}", f"{shape}: (nnz, R, C)")
        if kept.dtype not in (np.bool_, np.uint8):
            raise DTypeError("mask", kept.dtype, "bool or uint8")
        kept = kept.astype(np.bool_)
    elif packed_mask is not None:
        packed = to_values(packed_mask, "packed_mask")
        count = columns.size * r * c
        if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):
            raise ShapeError(
                "packed_mask", f"{packed.dtype} {packed.shape}", f"uint8 ({-(-count // 8)},)"
            )
        kept = np.unpackbits(packed, count=count, bitorder="little").reshape(shape).astype(np.bool_)

    row_of = np.repeat(np.arange(rows), np.diff(starts))  # row block of each block
    first_query = row_of % max(rows // heads, 1) * r
    last_query = np.minimum(first_query + r, m) - 1
    first_key = columns * c
    visible = first_key <= last_query + n - m
    whole = np.minimum(first_key + c, n) - 1 <= first_query + n - m
    new_starts = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row_of[visible], minlength=rows), out=new_starts[1:])
    if kept is None and bool(whole[visible].all()):
        return new_starts, columns[visible], None
    query = first_query[visible, None, None] + np.arange(r)[:, None]
    key = first_key[visible, None, None] + np.arange(c)
    seen = key <= query + n - m
    return new_starts, columns[visible], seen if kept is None else seen & kept[visible]


def block_pages(seen: npt.NDArray[np.bool_], column_indptr: Ints) -> tuple[int, Ints, Ints]:
    """Block columns of any widths as pages of one size.

    Columns that all rows of a head see alike are one; a page then is as many tokens as divide the
    places between them, but for the end of all.

    Parameters
    ----------
    seen : bool array [heads, block rows, block columns]
    column_indptr : int64 array [heads, block columns + 1]
        Where columns begin.

    Returns
    -------
    page_size : int
    indptr : int64 array [heads x block rows + 1]
    indices : int64 array [indptr[-1]]
        Pages of each block row, head after head.

    Examples
    --------
    >>> import numpy as np
    >>> seen = np.array([[[True, True, False], [False, False, True]]])
    >>> page_size, indptr, indices = block_pages(seen, np.array([[0, 5, 8, 21]]))
    >>> page_size, indptr.tolist(), indices.tolist()
    (8, [0, 1, 3], [0, 1, 2])
    """
    heads, rows, _ = seen.shape
    tokens = int(column_indptr[0, -1])
    parts: list[tuple[Ints, npt.NDArray[np.bool_]]] = []  # where columns begin; who sees them
    for h in range(heads):
        some = np.diff(column_indptr[h]) > 0
        begins, columns = column_indptr[h, :-1][some], seen[h][:, some]
        first = np.ones(len(begins), np.bool_)
        first[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        parts.append((begins[first], columns[:, first]))
    page = math.gcd(*(int(np.gcd.reduce(begins)) for begins, _ in parts)) or max(tokens, 1)
    counts, indices = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for begins, columns in parts:
        first_page = begins // page
        pages = np.diff(first_page, append=-(-tokens // page))
        row, column = np.nonzero(columns)
        each = pages[column]
        counts.append(np.bincount(row, each, minlength=rows).astype(np.int64))
        nth = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        indices.append(np.repeat(first_page[column], each) + nth)
    return page, np.cumsum(np.concatenate(counts)), np.concatenate(indices)


def variable_blocks(
    block_mask_map: Array, block_row_sz: Array, block_col_sz: Array, heads: int
) -> Bsr:
    """Make the matrix of each KV head of blocks of any sizes; block columns become pages.

    Parameters
    ----------
    block_mask_map : bool array [heads, MB, NB]
        Which block of queries meets which block of keys.
    block_row_sz, block_col_sz : integer array [heads, MB], [heads, NB]
        Tokens of each block, the same sum in every head.
    heads : int
        KV heads.

    Raises
    ------
    ShapeError, DTypeError, IndexRangeError, FlashbsrError
        Arrays that do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> seen = np.array([[[True, True, False], [False, False, True]]])
    >>> variable_blocks(seen, np.array([[2, 2]]), np.array([[5, 3, 13]]), 1)
    Bsr(indptr[3], indices[3], shape=(4, 21), block=(rows, 8), per_head=True)
    """
    seen = _map(block_mask_map, heads)
    rows = _offsets("block_row_sz", block_row_sz, (heads, seen.shape[1]))
    columns = _offsets("block_col_sz", block_col_sz, (heads, seen.shape[2]))
    page, indptr, indices = block_pages(seen, columns)
    shape = int(rows[0, -1]), int(columns[0, -1])
    return Bsr(indptr, indices, shape, (rows, page), per_head=True)


def _map(block_mask_map: Array, heads: int) -> npt.NDArray[np.bool_]:
    seen = to_numpy(block_mask_map, "block_mask_map")
    if seen.dtype not in (np.bool_, np.uint8):
        raise DTypeError("block_mask_map", seen.dtype, "bool or uint8")
    if seen.ndim != 3 or seen.shape[0] != heads:
        raise ShapeError("block_mask_map", f"shape {seen.shape}", f"({heads}, MB, NB)")
    return seen.astype(np.bool_, copy=False)


def _offsets(name: str, sizes: Array, shape: tuple[int, int]) -> Ints:
    """Offsets of blocks in each head, ``(heads, blocks + 1)``."""
    counts = to_numpy(sizes, name)
    if counts.shape != shape:
        raise ShapeError(name, f"shape {counts.shape}", f"{shape}, as block_mask_map has blocks")
    if counts.dtype.kind not in "iu" and counts.size:
        raise DTypeError(name, counts.dtype, "integers")
    if counts.size and counts.min() < 0:
        at = tuple(int(i) for i in np.argwhere(counts < 0)[0])
        raise IndexRangeError(name, f"{counts[at]} at {at}", "0 or more")
    offsets = np.zeros((shape[0], shape[1] + 1), np.int64)
    np.cumsum(counts, axis=1, out=offsets[:, 1:])
    if (offsets[:, -1] != offsets[0, -1]).any():
        head = int(np.argmax(offsets[:, -1] != offsets[0, -1]))
        raise FlashbsrError(
            name,
            f"a sum of {offsets[head, -1]} in head {head}",
            f"{offsets[0, -1]}, that of head 0",
        )
    return offsets
