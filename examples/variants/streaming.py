# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming-LLM: the first tokens and the last ones, with positions inside the cache.

    keys = first pages, recent pages;    x_ij = sm_scale R(p) q_i . R(j) k_j

with R the rotation of RoPE and j counted along what is kept, not along the text: Xiao et al.,
arXiv:2309.17453, section 3.2. A key's position changes whenever a page is dropped, so the cache
holds keys as they came and they are rotated inside attention.

>>> import numpy as np
>>> from flashbsr import Attention, Paged, TaskInfo
>>> q, cache = np.ones((1, 4, 64), np.float32), np.ones((8, 2, 16, 2, 64), np.float32)
>>> indptr, indices = streaming_pages([0, 6], [5, 3, 1, 0, 2, 7], sink_pages=1, recent_pages=2)
>>> indices.tolist()
[5, 2, 7]
>>> attention = Attention(streaming(), TaskInfo(4, 2, 64))
>>> attention.plan(Paged(None, indptr, indices, last_page_len=[9], page_size=16))
>>> attention.run(q, cache).shape
(1, 4, 64)

A request that decodes forever needs no more than ``sink_pages + recent_pages`` pages: its newest
page takes the place of the oldest recent one, and `streaming_table` says in which order they are.

>>> k = np.arange(2 * 4 * 64, dtype=np.float32).reshape(1, 8, 64)[:, :2] / 512
>>> for length in range(1, 101):  # tokens so far, of which at most 16 + 32 stay
...     indptr, indices, last = streaming_table([length], 16, sink_pages=1, recent_pages=2)
...     page, at = streaming_slots([length], 16, sink_pages=1, recent_pages=2)
...     cache[page, 0, at], cache[page, 1, at] = k, k
...     attention.plan(Paged(None, indptr, indices, last_page_len=last, page_size=16))
...     out = attention.run(q, cache)
>>> indices.tolist(), last.tolist()
([0, 1, 2], [4])
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from flashbsr import AttentionSpec, FlashbsrError


def streaming(**fields: Any) -> AttentionSpec:
    """Rotate inside attention; `fields` are those of `AttentionSpec`, such as ``rope_theta``."""
    return AttentionSpec(causal=True, pos_encoding_mode="ROPE_LLAMA", **fields)


def streaming_pages(
    kv_indptr: Sequence[int], kv_indices: Sequence[int], *, sink_pages: int, recent_pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """Leave out the pages between; each request's last page stays, and so does its length."""
    if recent_pages < 1:
        raise FlashbsrError("recent_pages", recent_pages, "at least 1: the newest tokens' page")
    kept = []
    for first, last in itertools.pairwise(kv_indptr):
        recent = max(last - recent_pages, first)
        sinks = kv_indices[first : min(first + sink_pages, recent)]
        kept.append([*sinks, *kv_indices[recent:last]])
    return _joined(kept)


def streaming_table(
    lengths: Sequence[int], page_size: int, *, sink_pages: int, recent_pages: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Page table of requests that have seen so many tokens, the newest included.

    Request *b* owns the pages from ``b * (sink_pages + recent_pages)`` on, the sinks first. Returns
    ``kv_indptr``, ``kv_indices`` and ``last_page_len``.
    """
    kept = []
    for b, length in enumerate(lengths):
        count = -(-length // page_size)  # pages of the text, of which the last ones are left
        recent = range(max(sink_pages, count - recent_pages), count)
        numbers = [*range(min(sink_pages, count)), *recent]
        kept.append([_place(b, number, sink_pages, recent_pages) for number in numbers])
    last = [(length - 1) % page_size + 1 for length in lengths]
    return (*_joined(kept), np.array(last, np.int32))


def streaming_slots(
    lengths: Sequence[int], page_size: int, *, sink_pages: int, recent_pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """Page of the cache and place in it where each request's newest token goes."""
    number, place = np.divmod(np.array(lengths) - 1, page_size)
    pages = [_place(b, n, sink_pages, recent_pages) for b, n in enumerate(number)]
    return np.array(pages, np.int32), place


def _place(request: int, number: int, sink_pages: int, recent_pages: int) -> int:
    """Page of the cache that page `number` of the text is kept in: a ring behind the sinks."""
    if recent_pages < 1:
        raise FlashbsrError("recent_pages", recent_pages, "at least 1: the newest tokens' page")
    in_ring = number - sink_pages
    own = number if in_ring < 0 else sink_pages + in_ring % recent_pages
    return int(request * (sink_pages + recent_pages) + own)


def _joined(kept: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.cumsum([0, *(len(pages) for pages in kept)])
    return indptr.astype(np.int32), np.array([page for pages in kept for page in pages], np.int32)
