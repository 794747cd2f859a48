# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Two parts of a batch as one: rows of queries, masks, a KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import adapter_for, to_values
from ..arrays.types import Array
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..ops.bits import segment_packbits

__all__ = ["Part", "join_masks", "join_rows", "pages_within", "same_cache"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Requests with their lengths, and the suffix that the caller's arguments have."""

    suffix: str
    q_lens: Indices
    kv_lens: Indices

    def name(self, argument: str) -> str:
        """Spell an argument of this part."""
        return argument + self.suffix


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


def join_masks(parts: list[Part], masks: dict[str, Array], causal: bool) -> npt.NDArray[np.uint8]:
    """Bits of all parts, where some have a mask; `causal` is the first part's, where it has none.

    `masks` are the caller's, ``custom_mask*`` and ``packed_custom_mask*``, by name.
    """
    joined = []
    for part in parts:
        sizes = part.q_lens * part.kv_lens
        ends = np.concatenate([[0], np.cumsum(sizes)])
        plain, packed = (masks[part.name(kind)] for kind in ("custom_mask", "packed_custom_mask"))
        if plain is not None and packed is not None:
            raise DTypeError(part.name("packed_custom_mask"), "both masks", "one of the two")
        if packed is not None:
            bits = to_values(packed, part.name("packed_custom_mask")).reshape(-1)
            expected, name = int((-(-sizes // 8)).sum()), part.name("packed_custom_mask")
            if bits.dtype != np.uint8:
                raise DTypeError(name, bits.dtype, "uint8")
        else:
            kept = _causal(part, causal and part is parts[0])
            name = part.name("custom_mask")
            if plain is not None:
                kept = to_values(plain, name).reshape(-1)
            expected = int(ends[-1])
            bits = kept
        if bits.size != expected:
            raise ShapeError(name, f"{bits.size} elements", f"{expected}: sum of q_len * kv_len")
        if packed is None:
            bits, _ = segment_packbits(bits, ends, bitorder="little")
        joined.append(bits)
    return np.concatenate(joined)


def _causal(part: Part, causal: bool) -> npt.NDArray[np.bool_]:
    """Everything, or what bottom-right aligned causality keeps."""
    rows = [np.zeros(0, bool)]
    for q_len, kv_len in zip(part.q_lens.tolist(), part.kv_lens.tolist(), strict=True):
        last = kv_len - q_len + np.arange(q_len)[:, None] if causal else kv_len
        rows.append(np.broadcast_to(np.arange(kv_len) <= last, (q_len, kv_len)).ravel())
    return np.concatenate(rows)


def same_cache(first: Any, second: Any) -> bool:
    """Whether two KV caches, stacked or tuples, are views of the same elements."""
    if first is second:
        return True
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
    """K or V of a paged cache: where it begins, its pages, and strides in bytes."""

    address: int
    pages: int
    page: int
    token: int
    head: int


def _half(cache: Any, at: int, kv_layout: str) -> _Half:
    x = cache[at] if isinstance(cache, tuple) else cache
    address, strides = adapter_for(x, "kv").address(x)
    shape = tuple(x.shape)
    if not isinstance(cache, tuple):
        address += at * strides[1]
        shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    page, first, second = (strides[0], *strides[1:3]) if len(shape) == 4 else (strides[0],) * 3
    if len(shape) == 3:  # page_size 1 without its dimension
        return _Half(address, shape[0], page, page, strides[1])
    token, head = (first, second) if kv_layout == "NHD" else (second, first)
    return _Half(address, shape[0], page, token, head)


def pages_within(
    kv: dict[str, Array], layout: str, cache: Any, page_size: int, cache_layout: str
) -> tuple[int, int]:
    """First page, and tokens, of contiguous K and V, by name, that are views of a paged cache.

    Raises
    ------
    UnsupportedError
        They are not: one plan has one cache.
    """
    found = [
        _first_page(name, x, layout, _half(cache, at, cache_layout), page_size)
        for at, (name, x) in enumerate(kv.items())
    ]
    if found[0] != found[1]:
        k, v = kv
        raise UnsupportedError(v, f"at page {found[1][0]}", f"at page {found[0][0]}, as {k} is")
    return found[0]


def _first_page(name: str, x: Array, layout: str, half: _Half, page_size: int) -> tuple[int, int]:
    shape = tuple(x.shape)
    if len(shape) != 3:
        axes = "[kv_len, heads, dim]" if layout == "NHD" else "[heads, kv_len, dim]"
        raise ShapeError(name, f"shape {shape}", axes)
    address, strides = adapter_for(x, name).address(x)
    tokens, token = shape[0], strides[0]
    heads, head = shape[1], strides[1]
    if layout == "HND":
        (tokens, token), (heads, head) = (heads, head), (tokens, token)
    page, rest = divmod(address - half.address, half.page)
    count = -(-tokens // page_size)
    within = (
        rest == 0
        and 0 <= page <= half.pages - count
        and (heads == 1 or head == half.head)
        and (min(tokens, page_size) < 2 or token == half.token)
        and (count < 2 or half.page == page_size * token)
    )
    if tokens and not within:
        raise UnsupportedError(
            name,
            "an array beside the paged cache",
            "a view of pages of the cache, one behind the other: one plan has one cache. Write "
            "keys and values into pages (append_paged_kv_cache), whose numbers BatchAttention, "
            "BatchPODWithPagedKVCacheWrapper and MultiLevelCascadeAttentionWrapper take",
        )
    return (page if tokens else 0), tokens
