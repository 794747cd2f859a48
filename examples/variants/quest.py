# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Quest: decode over the pages whose keys can have the largest logits.

    importance(page) = max over the group's q of sum_d max(q_d lower_d, q_d upper_d)

with lower and upper the bounds of the page's keys: no key of it has a larger q . k. Tang et al.,
arXiv:2406.10774, section 3. Each KV head chooses for itself: in an HND cache every (page, head)
is a block of memory, which makes (request, head) a request of one KV head.

>>> import numpy as np
>>> from flashbsr import Attention, AttentionSpec, Paged, TaskInfo
>>> q, k, v = (np.ones(s, np.float32) for s in ((1, 4, 64), (8, 2, 16, 64), (8, 2, 16, 64)))
>>> indptr, indices = choose_pages(q, page_bounds(k), [0, 6], [5, 3, 1, 0, 2, 7], keep=3)
>>> attention = Attention(AttentionSpec(), TaskInfo(2, 1, 64, kv_layout="HND"))
>>> last = np.repeat([9], 2)
>>> attention.plan(Paged(None, indptr, indices, last_page_len=last, page_size=16))
>>> kv = k.reshape(16, 1, 16, 64), v.reshape(16, 1, 16, 64)
>>> attention.run(q.reshape(2, 2, 64), kv).reshape(1, 4, 64).shape
(1, 4, 64)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from flashbsr import FlashbsrError


def page_bounds(k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Smallest and largest of each dimension, ``(pages, heads, dim)``, updated as pages fill up."""
    return k.min(axis=2), k.max(axis=2)  # k: (pages, heads, page_size, dim)


def choose_pages(
    q: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    kv_indptr: Sequence[int],
    kv_indices: Sequence[int],
    *,
    keep: int,
) -> tuple[np.ndarray, np.ndarray]:
    """`kv_indptr` and `kv_indices` of requests (b, head), head fastest: at most `keep` each.

    On the host, as every plan is. A request's last page is always one of them: it has the newest
    tokens, and may not be full.
    """
    if keep < 1:
        raise FlashbsrError("keep", keep, "at least 1: the newest tokens' page")
    heads = bounds[0].shape[1]
    chosen = [np.zeros(0, np.int32)]
    for row, (first, last) in zip(q, itertools.pairwise(kv_indptr), strict=True):
        own = np.array(kv_indices[first:last], np.int32)
        lower, upper = (x[own[:-1]].transpose(1, 2, 0).astype(np.float32) for x in bounds)
        group = row.reshape(heads, -1, row.shape[-1]).astype(np.float32)
        # The larger of two products is the one with the bound on q's own side.
        most = np.maximum(group, 0) @ upper + np.minimum(group, 0) @ lower
        for head, importance in enumerate(most.max(axis=1)):
            best = np.sort(np.argsort(-importance, kind="stable")[: keep - 1])
            chosen.append(np.append(own[best], own[-1:]) * heads + head)
    indptr = np.cumsum([len(pages) for pages in chosen]).astype(np.int32)
    return indptr, np.concatenate(chosen).astype(np.int32)
