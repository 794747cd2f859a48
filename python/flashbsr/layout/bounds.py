# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Requests whose lengths and pages are known later, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..arrays import to_values
from ..arrays.types import Array
from ..errors import ShapeError
from .layouts import Layout, checked_page_size, given_arrays, host_or_none

__all__ = ["Bounds"]


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Bounds(Layout):
    """Pages whose tables, and requests whose lengths, come when the plan runs.

    It is planned from bounds: the most KV tokens that each request may have. ``update``, or
    ``run(kv_lens=, block_tables=)``, then takes the lengths and the page tables where they are, on
    a GPU without a look at them by the host; the plan need not be made again while the bounds hold.
    Causality, windows, position encodings and trees go by the lengths.

    Parameters
    ----------
    qo_indptr : int32 or int64 array, shape (batch_size + 1,), or None
        As in `Ragged`; the most query tokens that there may be, if ``update`` is given fewer.
    kv_lens : int32 or int64 array, shape (batch_size,) or (batch_size, num_kv_heads)
        The bounds. Of two dimensions: each KV head has a length and a page table of its own.
    page_size : int
        Tokens of a page, at least 1.
    common_prefix : int
        KV tokens that all requests begin with, in the same pages: whole pages, and what bounds
        leave beside the query tokens. Where it pays they are loaded once for all requests
        (`docs/sharing.md`); they are read from the pages of the first request that has queries.
        Lengths are then at least ``common_prefix`` and the request's query tokens, and ``update``
        takes no ``qo_indptr``. Requests whose bound is 0 have no keys and no part in it. Not with
        lengths per KV head. Default: 0.

    Notes
    -----
    The work is cut for the bounds, and the cuts move with the lengths: batches half as long as
    their bounds take about half as long, but are dealt less evenly than a plan of their lengths
    would deal them. No prefixes are looked for. Custom masks have no meaning here (trees do), and
    fixed splits none beside a window.

    Examples
    --------
    >>> import numpy as np
    >>> from flashbsr import Attention, AttentionSpec, Bounds, TaskInfo
    >>> attention = Attention(AttentionSpec(), TaskInfo(4, 2, 64))
    >>> attention.plan(Bounds(None, np.array([4096, 4096]), page_size=16))
    >>> cache = np.ones((8, 2, 16, 2, 64), np.float32)
    >>> tables = np.arange(8).reshape(2, 4)
    >>> q = np.ones((2, 4, 64), np.float32)
    >>> attention.run(q, cache, kv_lens=np.array([20, 64]), block_tables=tables).shape
    (2, 4, 64)
    """

    qo_indptr: Array | None
    kv_lens: Array
    _: KW_ONLY
    page_size: int
    common_prefix: int = 0

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the indices that are given."""
        return given_arrays(self, "qo_indptr", "kv_lens")

    def views(self, num_kv_heads: int) -> tuple[Any, ...]:
        """Kind and fields on the host."""
        bounds = to_values(self.kv_lens, "kv_lens")
        heads = 0
        if bounds.ndim == 2:
            heads = num_kv_heads
            if bounds.shape[1] != heads:
                raise ShapeError(
                    "kv_lens", f"shape {bounds.shape}", f"(batch_size,) or (batch_size, {heads})"
                )
            bounds = bounds.reshape(-1)
        page_size = checked_page_size(self.page_size)
        queries = host_or_none(self.qo_indptr, "qo_indptr")
        return "bounds", queries, bounds, page_size, heads, int(self.common_prefix)

    def _numbers(self) -> list[str]:
        common = [f"common_prefix={self.common_prefix}"] if self.common_prefix else []
        return [f"page_size={self.page_size}", *common]
