# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Two parts of a batch as one: page tables, rows of queries, keys and values in a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._check import check_int
from ..arrays import adapter_for, device_of, to_indices
from ..arrays.types import Array
from ..errors import DTypeError, FlashbsrError, ShapeError
from .layouts import BlockTable, Layout, Paged

__all__ = ["Part", "join_rows", "page_lens", "paged_layout", "pages_within", "same_cache"]

Indices = npt.NDArray[np.int64]


def page_lens(
    indptr: Array, last_page_len: Array, page_size: int, name: str = "last_page_len"
) -> Indices:
    """KV lengths of a page table in CSR form, on the host."""
    pages, last = np.diff(to_indices(indptr, "kv_indptr")), to_indices(last_page_len, name)
    if last.shape != pages.shape:
        raise ShapeError(name, f"shape {last.shape}", f"{pages.shape}: one per request")
    return np.where(pages > 0, (pages - 1) * page_size + last, 0)


@dataclass(frozen=True)
class Part:
    """Requests with their lengths and pages, on the host."""

    qo_indptr: Indices
    kv_indptr: Indices
    kv_indices: Indices
    last_page_len: Indices
    kv_lens: Indices

    @classmethod
    def of(
        cls, qo_indptr: Array, indptr: Array, indices: Array, last: Array, page_size: int,
        suffix: str,
    ) -> Part:  # fmt: skip
        """Read the arrays; names in messages have the `suffix`. No `qo_indptr`: decodes."""
        check_int("page_size", page_size, 1)
        names = [f"{x}{suffix}" for x in ("kv_indptr", "kv_indices", "last_page_len")]
        table = [
            to_indices(x, name) for x, name in zip((indptr, indices, last), names, strict=True)
        ]
        pages, kv_lens = np.diff(table[0]), page_lens(table[0], table[2], page_size, names[2])
        wrong = np.flatnonzero((pages > 0) & ((table[2] < 1) | (table[2] > page_size)))
        if wrong.size:
            at = int(wrong[0])
            expected = f"in [1, page_size = {page_size}]"
            raise FlashbsrError(f"{names[2]}[{at}]", table[2][at], expected)
        if qo_indptr is None:
            rows = np.arange(len(pages) + 1)
        else:
            rows = to_indices(qo_indptr, f"qo_indptr{suffix}")
            if rows.shape != (len(pages) + 1,):
                expected = f"({len(pages) + 1},): batch size + 1"
                raise ShapeError(f"qo_indptr{suffix}", f"shape {rows.shape}", expected)
        for name, offsets in ((f"qo_indptr{suffix}", rows), (names[0], table[0])):
            if not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 0).any():
                expected = "offsets from 0 on, none decreasing"
                raise FlashbsrError(name, offsets[:9].tolist(), expected)
        if table[1].size < table[0][-1]:
            raise ShapeError(names[1], f"length {table[1].size}", f"at least {table[0][-1]}")
        return cls(rows, table[0], table[1], table[2], kv_lens)

    def join(self, other: Part) -> tuple[tuple[Indices, ...], Indices]:
        """Make one batch of two: qo_indptr, kv_indptr and kv_indices; kv_lens."""
        arrays = (
            np.concatenate([self.qo_indptr, self.qo_indptr[-1] + other.qo_indptr[1:]]),
            np.concatenate([self.kv_indptr, self.kv_indptr[-1] + other.kv_indptr[1:]]),
            np.concatenate([self.kv_indices[: self.kv_indptr[-1]], other.kv_indices]),
        )
        return arrays, np.concatenate([self.kv_lens, other.kv_lens])


def join_rows(first: Array, second: Array, names: tuple[str, str]) -> Array:
    """One array with the rows of both, ``[n, heads, dim]``.

    A view where the second begins behind the last row of the first, with its strides; otherwise the
    framework copies both.
    """
    a, b = adapter_for(first, names[0]), adapter_for(second, names[1])
    for name, x in zip(names, (first, second), strict=True):
        if len(x.shape) != 3:
            raise ShapeError(name, f"shape {tuple(x.shape)}", "[rows, num_qo_heads, head_dim]")
    if a is not b:
        raise DTypeError(names[1], f"of {b.name}", f"an array of {a.name}, as {names[0]} is")
    types = a.dtype_name(first, names[0]), b.dtype_name(second, names[1])
    if types[0] != types[1]:
        raise DTypeError(names[1], types[1], f"{types[0]}, as {names[0]} is")
    if tuple(first.shape[1:]) != tuple(second.shape[1:]):
        raise ShapeError(
            names[1],
            f"shape {tuple(second.shape)}",
            f"heads and head_dim of {names[0]}, {tuple(first.shape[1:])}",
        )
    count = first.shape[0], second.shape[0]
    if not count[1]:
        return first
    if not count[0]:
        return second
    (start, strides), (behind, others) = a.address(first), b.address(second)
    if strides == others and behind == start + count[0] * strides[0]:
        whole = a.extend(first, sum(count))
        if whole is not None:
            return whole
    return a.join([first, second])


def same_cache(first: Any, second: Any) -> bool:
    """Whether two KV caches, stacked or tuples, are views of the same elements."""
    if first is second:
        return True
    first, second = (tuple(x) if isinstance(x, list) else x for x in (first, second))
    if isinstance(first, tuple) != isinstance(second, tuple):
        return False
    if isinstance(first, tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(same_cache(a, b) for a, b in pairs)
    a, b = adapter_for(first, "kv"), adapter_for(second, "kv")
    return (
        a is b
        and tuple(first.shape) == tuple(second.shape)
        and a.dtype_name(first) == b.dtype_name(second)
        and a.address(first) == b.address(second)
    )


@dataclass(frozen=True)
class _Half:
    """K or V of a paged cache: where it begins, its pages, and strides in bytes; what a row is."""

    address: int
    pages: int
    page: int
    token: int
    head: int
    row: tuple[int, int, str]  # heads, dim, element type


def _half(cache: Any, at: int, kv_layout: str) -> _Half | None:
    if isinstance(cache, tuple) and len(cache) != 2:
        return None  # who reads it says what is wrong
    x = cache[at] if isinstance(cache, tuple) else cache
    adapter = adapter_for(x, "paged_kv_cache")
    address, strides = adapter.address(x)
    shape = tuple(x.shape)
    if len(shape) not in ((3, 4) if isinstance(cache, tuple) else (4, 5)):
        return None
    if not isinstance(cache, tuple):
        address += at * strides[1]
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    page, first, second = (strides[0], *strides[1:3]) if len(shape) == 4 else (strides[0],) * 3
    dtype = adapter.dtype_name(x, "paged_kv_cache")
    if len(shape) == 3:  # page_size 1 without its dimension
        return _Half(address, shape[0], page, page, strides[1], (*shape[1:], dtype))
    token, head = (first, second) if kv_layout == "NHD" else (second, first)
    row = shape[2 if kv_layout == "NHD" else 1], shape[3], dtype
    return _Half(address, shape[0], page, token, head, row)


def pages_within(
    kv: dict[str, Array], layout: str, cache: Any, page_size: int, cache_layout: str
) -> tuple[int, int] | None:
    """First page, and tokens, of contiguous K and V, by name, that are views of a paged cache.

    None: at least one is not, or they are views of different pages.
    """
    cache = tuple(cache) if isinstance(cache, list) else cache
    k, v = (
        _first_page(name, x, layout, _half(cache, at, cache_layout), page_size)
        for at, (name, x) in enumerate(kv.items())
    )
    return k if k == v else None


def _first_page(
    name: str, x: Array, layout: str, half: _Half | None, page_size: int
) -> tuple[int, int] | None:
    shape = tuple(x.shape)
    if len(shape) != 3:
        axes = "[kv_len, heads, dim]" if layout == "NHD" else "[heads, kv_len, dim]"
        raise ShapeError(name, f"shape {shape}", axes)
    adapter = adapter_for(x, name)
    address, strides = adapter.address(x)
    tokens, token = shape[0], strides[0]
    heads, head = shape[1], strides[1]
    if layout == "HND":
        (tokens, token), (heads, head) = (heads, head), (tokens, token)
    if half is None or (heads, shape[2], adapter.dtype_name(x, name)) != half.row:
        return None  # what is no view of whole rows is another array, and checked as such
    page, rest = divmod(address - half.address, half.page)
    count = -(-tokens // page_size)
    within = (
        rest == 0
        and 0 <= page <= half.pages - count
        and (heads == 1 or head == half.head)
        and (min(tokens, page_size) < 2 or token == half.token)
        and (count < 2 or half.page == page_size * token)
    )
    return (page, tokens) if tokens and within else None


def paged_layout(
    qo_indptr: Array, indptr: Array, indices: Array, last_page_len: Array, seq_lens: Array,
    block_tables: Array, page_size: int,
) -> Layout:  # fmt: skip
    """Make the layout of a page table, in either form.

    Both ways to say the lengths must agree on the host; on a GPU those beside others are not read.
    """
    if indptr is None and block_tables is not None:
        if seq_lens is None:
            raise FlashbsrError("seq_lens", None, "the lengths that block_tables needs")
        return BlockTable(qo_indptr, block_tables, seq_lens, page_size=page_size)
    if last_page_len is not None and seq_lens is not None:
        if device_of(seq_lens, "seq_lens") is None and device_of(last_page_len) is None:
            expected = page_lens(indptr, last_page_len, page_size)
            lens = to_indices(seq_lens, "seq_lens")
            if lens.shape != expected.shape:
                raise ShapeError("seq_lens", f"shape {lens.shape}", f"{expected.shape}: as pages")
            wrong = (expected > 0) & (lens != expected)  # those without pages may be padded
            if wrong.any():
                at = int(np.argmax(wrong))
                said = f"{expected[at]}, as the page table says (give one of the two)"
                raise FlashbsrError("seq_lens", f"{lens[at]} for request {at}", said)
        seq_lens = None
    return Paged(
        qo_indptr, indptr, indices, last_page_len=last_page_len, kv_lens=seq_lens,
        page_size=page_size,
    )  # fmt: skip
