# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices as SciPy keeps them, without SciPy: their arrays become blocks with masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_indices, to_numpy
from ..errors import DTypeError, FlashbsrError, IndexRangeError, ShapeError, UnsupportedError

__all__ = ["ScipyArrays", "from_elements", "pick_elements", "scipy_arrays"]

Ints = npt.NDArray[np.int64]
#: indptr, indices, mask and partial of a `BlockMask`.
Kept = tuple[
    npt.NDArray[np.int32],
    npt.NDArray[np.int32],
    "npt.NDArray[np.bool_] | None",
    npt.NDArray[np.bool_],
]


@dataclass(frozen=True, eq=False)
class ScipyArrays:
    """A checked matrix: blocks that are stored, by rows, and which of their elements are not zero.

    Attributes
    ----------
    row, column : int64 arrays, shape (blocks,)
    kept : bool array, shape (blocks, R, C)
    shape, block : tuple of 2 ints
    """

    row: Ints
    column: Ints
    kept: npt.NDArray[np.bool_]
    shape: tuple[int, int]
    block: tuple[int, int]


def scipy_arrays(matrix: Any) -> ScipyArrays:
    """Check a BSR or CSR matrix.

    Raises
    ------
    As `BlockMask.from_scipy`.
    """
    form = getattr(matrix, "format", None)
    if not isinstance(form, str):
        raise DTypeError(
            "matrix", type(matrix).__name__, "a scipy.sparse matrix in BSR or CSR form"
        )
    if form not in ("bsr", "csr"):
        raise UnsupportedError("matrix", f"form {form!r}", "'bsr' or 'csr': matrix.tocsr()")
    m, n = (int(size) for size in matrix.shape)
    data = to_numpy(matrix.data, "matrix.data")
    starts = to_indices(matrix.indptr, "matrix.indptr")
    columns = to_indices(matrix.indices, "matrix.indices")
    if data.ndim != (3 if form == "bsr" else 1) or len(data) != len(columns):
        raise ShapeError(
            "matrix.data", f"shape {data.shape}", f"{len(columns)} entries, as matrix.indices has"
        )
    r, c = data.shape[1:] if form == "bsr" else (1, 1)
    if r < 1 or c < 1 or m % r or n % c:
        raise ShapeError("matrix", f"shape ({m}, {n})", f"whole blocks of ({r}, {c})")
    rows, width = m // r, n // c
    if starts.shape != (rows + 1,):
        raise ShapeError("matrix.indptr", f"shape {starts.shape}", f"({rows + 1},)")
    if starts[0] != 0 or starts[-1] != columns.size or (np.diff(starts) < 0).any():
        raise IndexRangeError(
            "matrix.indptr",
            f"from {starts[0]} to {starts[-1]}",
            f"ascending from 0 to {columns.size}",
        )
    if columns.size and not 0 <= columns.min() <= columns.max() < width:
        at = int(np.flatnonzero((columns < 0) | (columns >= width))[0])
        raise IndexRangeError("matrix.indices", f"{columns[at]} at {at}", f"0 to {width - 1}")
    row = np.repeat(np.arange(rows), np.diff(starts))
    places, count = np.unique(row * width + columns, return_counts=True)
    if len(places) != len(columns):
        twice = int(places[count > 1][0])
        raise FlashbsrError(
            "matrix",
            f"several entries at {divmod(twice, width)}",
            "one: matrix.sum_duplicates() adds them up",
        )
    return ScipyArrays(row, columns, (data != 0).reshape(-1, r, c), (m, n), (r, c))


def pick_elements(parts: list[ScipyArrays]) -> Kept:
    """Blocks as they are stored, but for those without an element."""
    kept = np.concatenate([part.kept for part in parts])
    some = kept.any(axis=(1, 2))
    rows = parts[0].shape[0] // parts[0].block[0]
    row = np.concatenate([part.row + h * rows for h, part in enumerate(parts)])[some]
    indices = np.concatenate([part.column for part in parts])[some].astype(np.int32)
    kept = kept[some]
    partial = np.logical_not(kept.all(axis=(1, 2)))
    return _indptr(row, len(parts) * rows), indices, kept if partial.any() else None, partial


def from_elements(parts: list[ScipyArrays], size: tuple[int, int]) -> Kept:
    """Elements gathered into blocks of another size; the last ones may be short."""
    (m, n), (r, c) = parts[0].shape, size
    rows, width = -(-m // r), -(-n // c)
    q, k, head = [], [], []
    for h, part in enumerate(parts):
        block, i, j = np.nonzero(part.kept)
        q.append(part.row[block] * part.block[0] + i)
        k.append(part.column[block] * part.block[1] + j)
        head.append(np.full(len(block), h))
    query, key, kv_head = (np.concatenate(x) for x in (q, k, head))
    place = (kv_head * rows + query // r) * width + key // c
    blocks, nth = np.unique(place, return_inverse=True)
    row, column = np.divmod(blocks, max(width, 1))
    # What lies beyond the matrix is not read.
    beyond = (row[:, None] % max(rows, 1) * r + np.arange(r) >= m)[:, :, None]
    kept = beyond | (column[:, None] * c + np.arange(c) >= n)[:, None, :]
    kept[nth.reshape(-1), query % r, key % c] = True
    partial = np.logical_not(kept.all(axis=(1, 2)))
    return (
        _indptr(row, len(parts) * rows),
        column.astype(np.int32),
        kept if partial.any() else None,
        partial,
    )


def _indptr(row: npt.NDArray[Any], rows: int) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *np.bincount(row, minlength=rows)]).astype(np.int32)
