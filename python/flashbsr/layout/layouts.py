# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Who meets whom, as values: `Attention.plan` takes any of them.

A layout names the caller's index arrays and nothing else. Arrays come from any framework; those on
a GPU are copied to the host by ``plan``, once each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from .._check import check_int
from ..arrays import device_of, to_values
from ..arrays.types import Array
from ..errors import IndexRangeError, ShapeError, UnsupportedError
from ..variant.spec import AttentionSpec

__all__ = [
    "BlockTable",
    "Bsr",
    "Layout",
    "Levels",
    "Paged",
    "Ragged",
    "checked_page_size",
    "given_arrays",
    "host_or_none",
]


class Layout:
    """What `Ragged`, `Paged`, `Padded`, `BlockTable`, `Bounds`, `Levels` and `Bsr` have.

    A new one that the core does not know is a class like these, a struct in
    ``cpp/api/layouts.h``, its reader in ``cpp/bind/layouts.cpp`` and a front-end in
    ``include/flashbsr/plan``.
    """

    __slots__ = ()

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        raise NotImplementedError

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:
        """Kind and fields on the host, in the order in which ``_core.Engine.plan`` takes them."""
        raise NotImplementedError

    def check(self, spec: AttentionSpec) -> None:
        """Raise `UnsupportedError` for what the layout has no meaning for."""

    def late(self) -> dict[str, Any]:
        """Arrays that the plan gets by ``update``, since the host does not look at them."""
        return {}

    def __repr__(self) -> str:
        shapes = (f"{name}{list(getattr(x, 'shape', (len(x),)))}" for name, x in self.arrays())
        return f"{type(self).__name__}({', '.join([*shapes, *self._numbers()])})"

    def _numbers(self) -> list[str]:
        return []


def host_or_none(x: Array | None, name: str) -> Any:
    """Copy an array to the host, if it is given."""
    return None if x is None else to_values(x, name)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Ragged(Layout):
    """Queries and keys of consecutive token rows.

    Parameters
    ----------
    qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
        Rows of q of request b: ``qo_indptr[b]`` to ``qo_indptr[b + 1]``. None: one each (decode).
    kv_indptr : int32 or int64 array, shape (batch_size + 1,)
        Rows of k and v, likewise.

    Examples
    --------
    >>> import numpy as np
    >>> Ragged(np.array([0, 3, 5]), np.array([0, 10, 12]))
    Ragged(qo_indptr[3], kv_indptr[3])
    """

    qo_indptr: Array | None
    kv_indptr: Array

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        return given_arrays(self, "qo_indptr", "kv_indptr")

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Kind and fields on the host."""
        return (
            "ragged",
            host_or_none(self.qo_indptr, "qo_indptr"),
            to_values(self.kv_indptr, "kv_indptr"),
        )


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Paged(Layout):
    """Keys in pages, by a page table in CSR form.

    Parameters
    ----------
    qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
        As in `Ragged`.
    kv_indptr : int32 or int64 array, shape (batch_size + 1,)
        Entries of `kv_indices` of request b: ``kv_indptr[b]`` to ``kv_indptr[b + 1]``.
    kv_indices : int32 or int64 array, shape (>= kv_indptr[-1],)
        Page ids.
    last_page_len : int32 or int64 array, shape (batch_size,), optional
        Tokens in each request's last page, 1 to page_size. Ignored for requests without pages.
    kv_lens : int32 or int64 array, shape (batch_size,), optional
        Instead: tokens of each request; it may hold more pages than it needs.
    page_size : int
        Tokens of a page, at least 1.

    Examples
    --------
    >>> import numpy as np
    >>> Paged(None, np.array([0, 2]), np.array([5, 3]), kv_lens=np.array([20]), page_size=16)
    Paged(kv_indptr[2], kv_indices[2], kv_lens[1], page_size=16)
    """

    qo_indptr: Array | None
    kv_indptr: Array
    kv_indices: Array
    _: KW_ONLY
    last_page_len: Array | None = None
    kv_lens: Array | None = None
    page_size: int

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        return given_arrays(
            self, "qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "kv_lens"
        )

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Kind and fields on the host."""
        return (
            "paged",
            host_or_none(self.qo_indptr, "qo_indptr"),
            to_values(self.kv_indptr, "kv_indptr"),
            to_values(self.kv_indices, "kv_indices"),
            host_or_none(self.last_page_len, "last_page_len"),
            host_or_none(self.kv_lens, "kv_lens"),
            checked_page_size(self.page_size),
        )

    def _numbers(self) -> list[str]:
        return [f"page_size={self.page_size}"]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class BlockTable(Layout):
    """Keys in pages, by a dense table of them.

    A table on a GPU stays there: the host does not read it, so that no prefixes are found and page
    ids are checked under ``FLASHBSR_CHECK=1`` only. The plan has the ids of when it was made.

    Parameters
    ----------
    qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
        As in `Ragged`.
    block_tables : int32 or int64 array, shape (batch_size, max_pages)
        Page ids; entries beyond ``ceil(kv_len / page_size)`` are not used.
    kv_lens : int32 or int64 array, shape (batch_size,)
        Tokens of each request.
    page_size : int
        Tokens of a page, at least 1.

    Examples
    --------
    >>> import numpy as np
    >>> BlockTable(None, np.zeros((2, 4), np.int32), np.array([20, 64]), page_size=16)
    BlockTable(block_tables[2, 4], kv_lens[2], page_size=16)
    """

    qo_indptr: Array | None
    block_tables: Array
    kv_lens: Array
    _: KW_ONLY
    page_size: int

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        return given_arrays(self, "qo_indptr", "block_tables", "kv_lens")

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Kind and fields on the host."""
        queries = host_or_none(self.qo_indptr, "qo_indptr")
        lens = to_values(self.kv_lens, "kv_lens")
        page_size = checked_page_size(self.page_size)
        if self._on_device():
            room = self._columns(lens.size) * page_size
            if lens.size and int(lens.max()) > room:
                raise IndexRangeError(
                    "kv_lens", int(lens.max()), f"at most {room}, what a row of block_tables holds"
                )
            return "bounds", queries, lens, page_size, 0, 0
        tables = to_values(self.block_tables, "block_tables")
        return "block_table", queries, tables, lens, page_size

    def late(self) -> dict[str, Any]:
        """Lengths, and the table where it is on a device."""
        if not self._on_device():
            return {}
        return {"kv_lens": to_values(self.kv_lens, "kv_lens"), "block_tables": self.block_tables}

    def _columns(self, batch_size: int) -> int:
        """Of a table that the host does not read: its shape is all that is looked at."""
        shape = tuple(self.block_tables.shape)
        if len(shape) != 2 or shape[0] != batch_size:
            expected = f"({batch_size}, max_pages), a row for each of kv_lens"
            raise ShapeError("block_tables", f"shape {shape}", f"shape {expected}")
        return int(shape[1])

    def _on_device(self) -> bool:
        table = self.block_tables
        return type(table) is not np.ndarray and device_of(table, "block_tables") is not None

    def _numbers(self) -> list[str]:
        return [f"page_size={self.page_size}"]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Levels(Layout):
    """Keys in pages that requests share, given level by level.

    The queries of a group see the group's pages on every level, one level after another; causality
    is that of the last level. Each level's KV is loaded once per group, in one launch with the
    others.

    Parameters
    ----------
    qo_indptr : sequence of int32 or int64 arrays, shape (num_groups + 1,)
        Rows of q of the groups of a level; level 0 has the largest groups, the last level the
        requests. Groups are made of whole groups of the next level.
    kv_indptr, kv_indices, last_page_len : sequences of int32 or int64 arrays
        The page table of every level, as in `Paged`.
    page_size : int
        Tokens of a page, at least 1.

    Examples
    --------
    >>> import numpy as np
    >>> first = np.array([0, 4]), np.array([0, 2]), np.array([7, 1]), np.array([16])
    >>> own = np.arange(5), np.arange(5), np.array([2, 3, 4, 5]), np.array([1, 9, 16, 4])
    >>> Levels(*zip(first, own), page_size=16)
    Levels(2 levels, page_size=16)
    """

    qo_indptr: Sequence[Array]
    kv_indptr: Sequence[Array]
    kv_indices: Sequence[Array]
    last_page_len: Sequence[Array]
    _: KW_ONLY
    page_size: int

    _NAMES: ClassVar = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices."""
        return ((name, x) for name in self._NAMES for x in getattr(self, name))

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Kind and fields on the host; the levels are tuples of their four arrays."""
        count = len(self.qo_indptr)
        for name in self._NAMES:
            if len(getattr(self, name)) != count or not count:
                raise ShapeError(
                    name,
                    f"{len(getattr(self, name))} arrays",
                    f"one per level, {count or 'at least 1'}",
                )
        levels = zip(
            *([to_values(x, name) for x in getattr(self, name)] for name in self._NAMES),
            strict=True,
        )
        return "levels", tuple(levels), checked_page_size(self.page_size)

    def __repr__(self) -> str:
        return f"Levels({len(self.qo_indptr)} levels, page_size={self.page_size})"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Bsr(Layout):
    """A block-sparse matrix of query rows and KV columns; `block_mask` makes it of a function.

    ``run`` takes k and v as tokens, ``(N, num_kv_heads, head_dim)``, or as pages of C tokens. A
    matrix has no positions: causality, windows and position encodings raise, and belong into the
    blocks and the mask.

    Parameters
    ----------
    indptr : int32 or int64 array, shape (block rows + 1,)
        Blocks of each block row.
    indices : int32 or int64 array, shape (indptr[-1],)
        Block columns, each below ``ceil(N / C)``, in any order.
    shape : (M, N)
        Query tokens and KV tokens. Where `N` is no multiple of `C` the last block column is short,
        and at most once in a block row.
    block : (R, C)
        Of a block. R: its height, the last block row may be short; or, an int32 or int64 array of
        shape (block rows + 1,), where block rows begin, from 0 to `M`. C: its width.
    mask : bool or uint8 array, shape (indptr[-1], R, C), optional
        True keeps; rows past `M` and columns past `N` are ignored.
    packed_mask : uint8 array, shape (ceil(indptr[-1] * R * C / 8),), optional
        The same flattened, as little-endian bits without gaps.
    per_head : bool
        Each KV head has a matrix of its own: `indptr` has the block rows of all heads, head after
        head, and an array of heights has shape (num_kv_heads, block rows + 1).

    Examples
    --------
    >>> import numpy as np
    >>> Bsr(np.array([0, 1, 3]), np.array([0, 0, 1]), (256, 256), (128, 128))
    Bsr(indptr[3], indices[3], shape=(256, 256), block=(128, 128))
    """

    indptr: Array
    indices: Array
    shape: tuple[int, int]
    block: tuple[int | Array, int]
    _: KW_ONLY
    mask: Array | None = None
    packed_mask: Array | None = None
    per_head: bool = False

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices and masks that are given."""
        return given_arrays(self, "indptr", "indices", "mask", "packed_mask")

    def check(self, spec: AttentionSpec) -> None:
        """Raise `UnsupportedError` for positions, which a matrix does not have."""
        for name, on in (
            ("causal", spec.causal),
            ("window_left", spec.window_left >= 0),
            ("pos_encoding_mode", spec.pos_encoding_mode != "NONE"),
        ):
            if on:
                raise UnsupportedError(
                    name,
                    getattr(spec, name),
                    "the default with Bsr: write it into the blocks and the mask "
                    "(flashbsr.block_mask), rotate with apply_rope first",
                )
        if spec.variant is not None and spec.variant.uses_positions:
            raise UnsupportedError(
                "variant",
                f"{spec.variant.name}, which asks for positions or the request",
                "one that does not with Bsr, whose rows count along their own blocks: write the "
                "mask into the blocks (flashbsr.block_mask)",
            )

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:
        """Kind and fields on the host: where rows begin, or None and R in the sizes."""
        (m, n), (r, c) = self.shape, self.block
        heads = num_kv_heads if self.per_head else 0
        starts = None
        if not isinstance(r, (int, np.integer)):
            for name in ("mask", "packed_mask"):
                if getattr(self, name) is not None:
                    raise UnsupportedError(
                        name,
                        "an array",
                        "None with an array of rows: blocks of one height have masks",
                    )
            starts = to_values(r, "R")
            if starts.ndim != (2 if heads else 1) or (heads and len(starts) != heads):
                rows = f"({heads}, block rows + 1)" if heads else "(block rows + 1,)"
                raise ShapeError("R", f"shape {starts.shape}", rows)
            starts = starts.reshape(-1)
        return (
            "bsr",
            starts,
            to_values(self.indptr, "indptr"),
            to_values(self.indices, "indices"),
            (
                check_int("M", m, 0),
                check_int("N", n, 0),
                check_int("R", r if starts is None else 1, 1),
                check_int("C", c, 1),
            ),
            heads,
            host_or_none(self.mask, "mask"),
            host_or_none(self.packed_mask, "packed_mask"),
        )

    def _numbers(self) -> list[str]:
        r, c = self.block
        rows = r if isinstance(r, (int, np.integer)) else "rows"
        numbers = [f"shape={tuple(self.shape)}", f"block=({rows}, {c})"]
        return [*numbers, "per_head=True"] if self.per_head else numbers


def given_arrays(layout: Layout, *names: str) -> Iterator[tuple[str, Array]]:
    """Those of the fields that are not None."""
    return ((name, x) for name in names if (x := getattr(layout, name)) is not None)


def checked_page_size(value: int) -> int:
    """Check for a positive int32."""
    # Plans are made every step: the plain case takes a tenth of the check.
    return value if type(value) is int and 0 < value < 2**31 else check_int("page_size", value, 1)
