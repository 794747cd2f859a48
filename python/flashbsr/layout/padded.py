# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Dense caches, one row of tokens for each request, whatever of a row is in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_name
from ..arrays import adapter_for, to_values
from ..arrays.types import Array
from ..errors import IndexRangeError, ShapeError, UnsupportedError
from .bounds import Bounds
from .layouts import Layout, given_arrays, host_or_none

__all__ = ["Padded"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """How the rows of a cache lie: what all layers of a model have in common."""

    count: int
    capacity: int  # tokens of a row
    pitch: int | None  # tokens from one row to the next in memory; None: not a whole number


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Padded(Layout):
    """Keys in a dense cache with unused tokens: before a request's own, behind them, or both.

    A dense cache is a page table: where all requests begin at the first token, a row is a page;
    otherwise pages are as large as the places where requests begin allow, and may be single tokens.
    Nothing is copied, and unused tokens are not read into a result.

    Parameters
    ----------
    qo_indptr : int32 or int64 array, shape (num_requests + 1,), or None
        As in `Ragged`. Rows of q that are padding are requests without keys.
    kv_lens : int32 or int64 array, shape (num_requests,)
        Tokens of each request.
    kv : tuple of two arrays
        K and V of any layer, ``(num_rows, capacity, H_kv, D)`` (NHD) or
        ``(num_rows, H_kv, capacity, D)`` (HND), of any strides but for the last. Only their shapes
        and strides are read.
    kv_layout : {"NHD", "HND"}
        Which of the two; that of `TaskInfo` as well.
    kv_begin : int32 or int64 array, shape (num_requests,), optional
        The first token of each request in its row (left padding). Default: 0.
    rows : int32 or int64 array, shape (num_requests,), optional
        The row of each request. Default: one after another.

    Attributes
    ----------
    page_size : int
        Tokens of a page of `pages`.
    block_tables : int32 NumPy array, shape (num_requests, max_pages)
        Pages of each request, for ``update`` after a plan of `bounds`.

    Raises
    ------
    ShapeError, DTypeError
        Shapes that do not fit each other.
    IndexRangeError
        Requests that end behind their row; rows that are not there.
    UnsupportedError
        With `kv_begin`: rows of K and of V are not the same whole number of tokens apart in memory,
        so that they share no page table.

    Examples
    --------
    >>> import numpy as np
    >>> from flashbsr import Attention, AttentionSpec, Padded, TaskInfo
    >>> attention = Attention(AttentionSpec(causal=True), TaskInfo(4, 2, 64, kv_layout="HND"))
    >>> k = v = np.ones((3, 2, 48, 64), np.float32)
    >>> layout = Padded(
    ...     None, np.array([16, 5, 40]), kv=(k, v), kv_layout="HND", kv_begin=np.array([32, 40, 8])
    ... )
    >>> layout
    Padded(kv_lens[3], kv_begin[3], rows of 48 tokens, page_size=8)
    >>> attention.plan(layout)
    >>> attention.run(np.ones((3, 4, 64), np.float32), layout.pages(k, v)).shape
    (3, 4, 64)
    """

    qo_indptr: Array | None
    kv_lens: Array
    _: KW_ONLY
    kv: InitVar[tuple[Array, Array]]
    kv_layout: str = "NHD"
    kv_begin: Array | None = None
    rows: Array | None = None
    page_size: int = field(init=False)
    block_tables: npt.NDArray[np.int32] = field(init=False)
    _rows: _Rows = field(init=False)

    def __post_init__(self, kv: tuple[Array, Array]) -> None:
        check_name("kv_layout", self.kv_layout, ("NHD", "HND"))
        found = self._rows_of(kv[0], "k")
        if self._rows_of(kv[1], "v") != found:
            found = _Rows(found.count, found.capacity, None)
        lens = to_values(self.kv_lens, "kv_lens")
        rows = np.arange(lens.size).reshape(lens.shape)
        _check_range("kv_lens", lens, found.capacity)
        if self.rows is not None:
            rows = _numbers(self.rows, "rows", lens)
        _check_range("rows", rows[lens > 0], found.count - 1)
        size, first = max(found.capacity, 1), rows
        if self.kv_begin is not None:
            begins = _numbers(self.kv_begin, "kv_begin", lens)
            size, first = _cut(found, begins, lens, rows)
        width = -(-int(lens.max(initial=0)) // size)
        # Behind a request's last page there may be anything; 0 is one of the cache's.
        each = np.arange(max(width, 1), dtype=np.int64)
        tables = np.where(each < -(-lens[:, None] // size), first[:, None] + each, 0)
        for name, value in (
            ("page_size", size),
            ("block_tables", tables.astype(np.int32)),
            ("_rows", found),
        ):
            object.__setattr__(self, name, value)

    def pages(self, k: Array, v: Array) -> tuple[Array, Array]:
        """View K and V of a layer as pages, for ``Attention.run``.

        Parameters
        ----------
        k, v : arrays
            Of the shapes and strides that `kv` had, up to the number of heads and their dims.

        Returns
        -------
        tuple of two arrays
            Views ``(pages, page_size, H_kv, D)`` or ``(pages, H_kv, page_size, D)`` of the same
            memory. They are for reading: with `kv_begin` their pages may lie within each other.

        Raises
        ------
        ShapeError
            Rows of another number or capacity.
        UnsupportedError
            Rows that lie elsewhere; arrays of a framework without such views (JAX).
        """
        return self._pages(k, "k"), self._pages(v, "v")

    def bounds(self) -> Bounds:
        """Make a layout of the same requests whose lengths come later, on the device.

        The lengths of this layout are their bounds, and `block_tables` their tables.
        """
        return Bounds(self.qo_indptr, self.kv_lens, page_size=self.page_size)

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        return given_arrays(self, "qo_indptr", "kv_lens", "kv_begin", "rows")

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Kind and fields on the host: those of `BlockTable`."""
        queries = host_or_none(self.qo_indptr, "qo_indptr")
        lens = to_values(self.kv_lens, "kv_lens")
        return "block_table", queries, self.block_tables, lens, self.page_size

    def _rows_of(self, x: Array, name: str) -> _Rows:
        if len(x.shape) != 4:
            order = "capacity, H_kv" if self.kv_layout == "NHD" else "H_kv, capacity"
            raise ShapeError(name, f"shape {tuple(x.shape)}", f"(num_rows, {order}, D)")
        count, capacity = int(x.shape[0]), int(x.shape[self._tokens])
        strides = adapter_for(x, name).strides(x)
        row, token = strides[0], strides[self._tokens]
        # Of one there is no next, whatever its stride is.
        pitch = 0 if count == 1 else row // token if token > 0 and row % token == 0 else None
        if capacity == 1 and count > 1:
            pitch = None
        return _Rows(count, capacity, pitch)

    @property
    def _tokens(self) -> int:
        """The axis of tokens."""
        return 1 if self.kv_layout == "NHD" else 2

    def _pages(self, x: Array, name: str) -> Array:
        held, shape = self._rows, x.shape
        whole = self.page_size == held.capacity and len(shape) == 4
        if whole and (shape[0], shape[self._tokens]) == (held.count, held.capacity):
            return x  # a page is a row, wherever the next one is: strides are not asked for
        found = self._rows_of(x, name)
        if (found.count, found.capacity) != (held.count, held.capacity):
            raise ShapeError(
                name,
                f"{found.count} rows of {found.capacity} tokens",
                f"{held.count} rows of {held.capacity}, as planned",
            )
        if found.pitch is None or found.pitch != held.pitch:
            raise UnsupportedError(
                name,
                f"rows {found.pitch} tokens apart in memory",
                f"{held.pitch}, as planned",
            )
        adapter = adapter_for(x, name)
        page = x[:1, : self.page_size] if self._tokens == 1 else x[:1, :, : self.page_size]
        count = ((found.count - 1) * found.pitch + found.capacity) // self.page_size
        view = adapter.extend(page, count, self.page_size * adapter.strides(x)[self._tokens])
        if view is None:
            raise UnsupportedError(
                name, f"an array of {adapter.name}", "one that has strided views, with kv_begin"
            )
        return view

    def _numbers(self) -> list[str]:
        return [f"rows of {self._rows.capacity} tokens", f"page_size={self.page_size}"]


def _numbers(x: Array, name: str, lens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Numbers of the requests, as int64."""
    values = to_values(x, name)
    if values.shape != lens.shape:
        raise ShapeError(name, f"shape {values.shape}", f"{lens.shape}, as kv_lens")
    return values.astype(np.int64)


def _cut(
    found: _Rows, begins: npt.NDArray[Any], lens: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Find the largest pages that all requests begin with, and the first page of each."""
    _check_range("kv_begin", begins, found.capacity)
    _check_range("kv_begin + kv_lens", begins + lens, found.capacity)
    used = lens > 0
    if not (begins * used).any():
        return max(found.capacity, 1), rows
    if found.pitch is None:
        raise UnsupportedError(
            "kv_begin",
            "an array, with rows of K and V that lie differently",
            "rows of both the same whole number of tokens apart, as those of contiguous "
            "arrays are; or None",
        )
    size = gcd(found.pitch, max(found.capacity, 1), *begins[used].tolist())
    return size, (rows * found.pitch + begins) // size


def _check_range(name: str, values: npt.NDArray[Any], most: int) -> None:
    for found in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= found <= max(most, 0):
            raise IndexRangeError(name, int(found), f"0 to {most}")
