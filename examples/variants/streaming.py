# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming-LLM: the first tokens and the last ones, with positions inside the cache.

    keys = first pages, recent pages;    x_ij = sm_scale R(p) q_i . R(j) k_j

with R the rotation of RoPE and j counted along what is kept, not along the text: Xiao et al.,
arXiv:2309.17453, section 3.2. A key's position changes whenever a page is dropped, so the cache
holds keys as they came and they are rotated inside attention.

>>> import numpy as np
>>> from flashbsr import Attention, TaskInfo
>>> q, cache = np.ones((1, 4, 64), np.float32), np.ones((8, 2, 16, 2, 64), np.float32)
>>> indptr, indices = streaming_pages([0, 6], [5, 3, 1, 0, 2, 7], sink_pages=1, recent_pages=2)
>>> indices.tolist()
[5, 2, 7]
>>> attention = Attention(streaming(), TaskInfo(4, 2, 64, page_size=16))
>>> attention.plan(None, indptr, indices, last_page_len=[9])
>>> attention.run(q, cache).shape
(1, 4, 64)
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
    indptr = np.cumsum([0, *(len(pages) for pages in kept)])
    return indptr.astype(np.int32), np.array([page for pages in kept for page in pages], np.int32)
