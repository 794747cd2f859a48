# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse matrices from mask functions, maps of blocks and SciPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..arrays import to_numpy
from ..errors import DTypeError, ShapeError, UnsupportedError
from .block_builders import from_elements, pick_elements, scipy_arrays
from .layouts import Bsr

__all__ = ["BlockMask", "block_mask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block-sparse matrix, or one for each KV head, with what is kept within its blocks.

    `block_mask` makes it of a mask function, `from_block_map` of booleans for blocks, `from_scipy`
    of a sparse matrix. ``attention.plan(blocks.layout())`` plans it.

    Attributes
    ----------
    indptr : int32 array, shape (block rows + 1,), or (KV heads x block rows + 1,)
    indices : int32 array, shape (nnz,)
        Block columns of which some pair is kept.
    mask : bool array, shape (nnz, R, C), or None
        Pairs within those blocks; None where every block is kept whole.
    partial : bool array, shape (nnz,)
        Blocks that are not kept whole.
    shape, block : tuple of 2 ints
        M query rows and N keys; R and C of a block.
    per_head : bool
        Each KV head has a matrix of its own, one after another.

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
    per_head: bool = False

    @classmethod
    def from_block_map(
        cls,
        block_map: Any,
        block_size: tuple[int, int],
        *,
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> BlockMask:
        """Take booleans that say which blocks are seen.

        Parameters
        ----------
        block_map : bool array, shape (MB, NB) or (num_kv_heads, MB, NB)
            The second: a map for each KV head.
        block_size : (R, C)
        q_len, kv_len : int, optional
            M and N where the last block row or column is short. Default: ``MB R``, ``NB C``.

        Raises
        ------
        ShapeError, DTypeError, FlashbsrError
            Not such an array; lengths that do not have MB and NB blocks.

        Examples
        --------
        >>> import numpy as np
        >>> blocks = BlockMask.from_block_map(np.eye(3, dtype=bool), (16, 64), kv_len=150)
        >>> blocks.indptr.tolist(), blocks.indices.tolist(), blocks.shape
        ([0, 1, 2, 3], [0, 1, 2], (48, 150))
        """
        seen = to_numpy(block_map, "block_map")
        if seen.dtype not in (np.bool_, np.uint8):
            raise DTypeError("block_map", seen.dtype, "bool or uint8")
        if seen.ndim not in (2, 3):
            raise ShapeError("block_map", f"shape {seen.shape}", "(MB, NB) or (heads, MB, NB)")
        size = check_block(block_size)
        shape = []
        for name, length, blocks, step in (
            ("q_len", q_len, seen.shape[-2], size[0]),
            ("kv_len", kv_len, seen.shape[-1], size[1]),
        ):
            length = check_int(name, blocks * step if length is None else length, 0)
            if -(-length // step) != blocks:
                raise ShapeError(name, length, f"a length of {blocks} blocks of {step}")
            shape.append(length)
        rows = seen.reshape(-1, seen.shape[-1])
        indices = np.nonzero(rows)[1].astype(np.int32)
        counts = np.count_nonzero(rows, axis=1)
        return cls(
            np.cumsum([0, *counts]).astype(np.int32),
            indices,
            None,
            np.zeros(len(indices), np.bool_),
            (shape[0], shape[1]),
            size,
            seen.ndim == 3,
        )

    @classmethod
    def from_scipy(
        cls, matrix: Any, *, block_size: int | tuple[int, int] | None = None
    ) -> BlockMask:
        """Take a SciPy matrix of M queries by N keys; entries that are not zero are kept.

        Parameters
        ----------
        matrix : scipy.sparse array or matrix in BSR or CSR form, or a sequence of them
            Or what has their ``format``, ``shape``, ``indptr``, ``indices`` and ``data``. A
            sequence: one for each KV head.
        block_size : int or (R, C), optional
            To gather the entries into. Default: of BSR its own, of CSR (1, 1). Larger blocks than
            the entries fill are masked: CSR entries that cluster are faster so.

        Raises
        ------
        UnsupportedError, DTypeError, ShapeError, IndexRangeError, FlashbsrError
            Another form; two entries at one place (``sum_duplicates``); matrices that differ in
            shape; index arrays that are none.

        Examples
        --------
        >>> from types import SimpleNamespace
        >>> import numpy as np
        >>> csr = SimpleNamespace(
        ...     format="csr", shape=(2, 6), data=np.ones(4),
        ...     indptr=np.array([0, 3, 4]), indices=np.array([0, 1, 5, 1]),
        ... )
        >>> blocks = BlockMask.from_scipy(csr, block_size=(2, 2))
        >>> blocks.indices.tolist(), blocks.mask.astype(int).tolist()
        ([0, 2], [[[1, 1], [0, 1]], [[0, 1], [0, 0]]])
        """
        several = isinstance(matrix, (list, tuple))
        parts = [scipy_arrays(m) for m in (matrix if several else [matrix])]
        if not parts:
            raise ShapeError("matrix", "an empty sequence", "a matrix for each KV head")
        first = parts[0]
        for part in parts[1:]:
            if (part.shape, part.block) != (first.shape, first.block):
                raise ShapeError(
                    "matrix",
                    f"shapes {first.shape} and {part.shape}, blocks {first.block} and {part.block}",
                    "the same for every head",
                )
        size = first.block if block_size is None else check_block(block_size)
        kept = pick_elements(parts) if size == first.block else from_elements(parts, size)
        return cls(*kept, first.shape, size, several)

    @property
    def density(self) -> float:
        """Part of all blocks that is computed."""
        columns = -(-self.shape[1] // self.block[1])
        return len(self.indices) / max((len(self.indptr) - 1) * columns, 1)

    def layout(self) -> Bsr:
        """Make the layout to plan. Its k and v are ``(N, H, D)``, or pages ``(n, C, H, D)``."""
        return Bsr(
            self.indptr,
            self.indices,
            self.shape,
            self.block,
            mask=self.mask,
            per_head=self.per_head,
        )


def block_mask(
    mask_mod: Callable[..., Any],
    q_lens: int | Sequence[int],
    kv_lens: int | Sequence[int],
    *,
    block_size: int | tuple[int, int] = 128,
    heads: tuple[int, int] | None = None,
) -> BlockMask:
    """Evaluate a mask function for all pairs, block by block, on the host.

    Parameters
    ----------
    mask_mod : callable ``(b, h, q_idx, kv_idx) -> bool``
        As in `AttentionSpec.from_functions`, without extras; the same for the query heads of a KV
        head.
    q_lens, kv_lens : int or sequence of int
        Query tokens and keys of each request. Requests follow each other in blocks of their own:
        queries are multiples of R and keys of C, but for the last request's.
    block_size : int or (R, C)
        Of a block: queries and keys.
    heads : (num_qo_heads, num_kv_heads), optional
        For a function of the head: evaluated for each KV head, which gets a matrix of its own.

    Returns
    -------
    BlockMask

    Raises
    ------
    ShapeError, UnsupportedError
        Lengths that are not whole blocks; a function of the head without `heads`, or one that
        tells the query heads of a KV head apart.

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
    >>> bands = block_mask(
    ...     lambda b, h, q, kv: q // 128 - kv // 128 == h, 256, 256, heads=(2, 2)
    ... )
    >>> bands.per_head, bands.indptr.tolist(), bands.indices.tolist()
    (True, [0, 1, 2, 2, 3], [0, 1, 0])
    """
    r, c = check_block(block_size)
    queries, keys = check_lengths(q_lens, kv_lens)
    for name, lens, size in (("q_lens", queries[:-1], r), ("kv_lens", keys[:-1], c)):
        for n in lens:
            if n % size:
                raise ShapeError(name, n, f"a multiple of the block size, {size}")
    seen_by, of_heads = trace_for_heads(mask_mod, heads)
    rows = [
        _block_row(seen_by, (b, q_len, kv_len), first, (r, c), kv_head)
        for kv_head in range(of_heads)
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
        of_heads > 1,
    )


def check_block(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """R and C."""
    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2:
        raise ShapeError("block_size", f"{len(sizes)} numbers", "a number or (R, C)")
    return check_int("block_size", sizes[0], 1), check_int("block_size", sizes[1], 1)


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


#: What queries of a request see: ((b, q_len, kv_len), first query, queries, KV head).
SeenBy = Callable[[tuple[int, int, int], int, int, int], npt.NDArray[np.bool_]]


def trace_for_heads(
    mask_mod: Callable[..., Any], heads: tuple[int, int] | None = None
) -> tuple[SeenBy, int]:
    """Trace a mask function; returns one that evaluates it, and the KV heads to ask it for.

    The function gives what the queries see, ``(queries, kv_len)``. One KV head: all are alike.
    """
    from ..variant.trace.build import trace_mask  # 10 ms, for those who need it
    from ..variant.trace.evaluate import evaluate

    root, captured = trace_mask(mask_mod)
    asks = bool(root.deps & {"h", "kv_head"})
    if asks and heads is None:
        raise UnsupportedError(
            "mask_mod",
            "a function of the head",
            "one mask for all heads; heads=(num_qo_heads, num_kv_heads) in block_mask; or "
            "AttentionSpec.from_functions, which asks it per head",
        )
    group, count = 1, 1
    if heads is not None:
        qo, kv = (check_int("heads", n, 1) for n in heads)
        if qo % kv:
            raise ShapeError("heads", heads, "query heads that are a multiple of the KV heads")
        group, count = (qo // kv, kv) if asks else (1, 1)
    arrays = {name: to_numpy(array, name) for name, array in captured.items()}

    def seen_by(
        request: tuple[int, int, int], first: int, queries: int, kv_head: int
    ) -> npt.NDArray[np.bool_]:
        b, q_len, kv_len = request
        q_idx = np.arange(first, first + queries, dtype=np.int64)[:, None]
        leaves = {
            "b": b,
            "kv_head": kv_head,
            "q_idx": q_idx,
            "kv_idx": np.arange(kv_len, dtype=np.int64)[None, :],
            "q_position": q_idx + kv_len - q_len,
            "q_len": q_len,
            "kv_len": kv_len,
        }
        found = None
        for h in range(kv_head * group, (kv_head + 1) * group):
            value = evaluate(root, {**leaves, "h": h}, arrays).astype(np.bool_)
            seen = np.broadcast_to(value, (queries, kv_len))
            if found is not None and not np.array_equal(seen, found):
                raise UnsupportedError(
                    "mask_mod",
                    f"a function that tells query heads {h - 1} and {h} of KV head {kv_head} apart",
                    "the same blocks for them, or AttentionSpec.from_functions",
                )
            found = seen
        assert found is not None
        return found

    return seen_by, count


def _block_row(
    seen_by: SeenBy, request: tuple[int, int, int], first: int, block: tuple[int, int], kv_head: int
) -> tuple[int, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Columns and contents of the blocks that queries from `first` on see some of."""
    (b, q_len, kv_len), (r, c) = request, block
    count, columns = min(r, q_len - first), -(-kv_len // c)
    seen = np.zeros((count, columns * c), np.bool_)
    seen[:, :kv_len] = seen_by(request, first, count, kv_head)
    blocks = seen.reshape(count, columns, c).swapaxes(0, 1)
    found = np.flatnonzero(blocks.any(axis=(1, 2)))
    kept = np.ones((len(found), r, c), np.bool_)  # rows past the last query are not read
    kept[:, :count] = blocks[found]
    if kv_len % c:  # nor are keys past the last
        kept[found == columns - 1, :, kv_len % c :] = True
    return b, found, kept
