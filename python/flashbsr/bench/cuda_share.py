# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the workloads of requests that begin with the same pages, with sharing and without."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import flashbsr

from .cuda_data import Row, check_rows, normal, set_count
from .cuda_timing import Gpu, measure
from .data import task_info
from .results import Result
from .workloads import ITEMSIZE, Workload

__all__ = ["run_share"]

_SEED = 11


def page_lists(w: Workload) -> tuple[list[Any], int]:
    """Pages of every request, permuted as those of a long-running server, and how many there are.

    Groups are neighbours; the order of the requests is not theirs.
    """
    page_size = w.page_size
    assert page_size is not None
    rng, batch, count = np.random.default_rng(_SEED), len(w.kv_lens), 0
    lists: list[list[int]] = [[] for _ in range(batch)]
    left = min(w.kv_lens) // page_size
    for groups, tokens in w.prefixes:
        length = min(tokens // page_size, left)
        left -= length
        for group in range(groups):
            pages = range(count, count + length)
            count += len(pages)
            for request in range(group * batch // groups, (group + 1) * batch // groups):
                lists[request].extend(pages)
    for request, kv_len in enumerate(w.kv_lens):
        own = -(-kv_len // page_size) - len(lists[request])
        lists[request].extend(range(count, count + own))
        count += own
    places = rng.permutation(count)
    return [places[lists[request]] for request in rng.permutation(batch)], count


def _sample(w: Workload, lists: list[Any], q: Any, cache: Any, out: Any) -> list[Row]:
    rows = []
    for request in (0, len(lists) - 1):
        kv = cache[lists[request].tolist()].transpose(1, 2).flatten(0, 1)[: w.kv_lens[request]]
        for head in (0, w.num_qo_heads - 1):
            k, v = kv[:, :, head // (w.num_qo_heads // w.num_kv_heads)].unbind(1)
            rows.append(Row(out[request, head], q[request, head], k, v, head))
    return rows


def _call(
    w: Workload, gpu: Gpu, lists: list[Any], caches: list[Any], share: str
) -> tuple[Callable[[int], Any], flashbsr.Attention]:
    assert w.page_size is not None
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    indices, lens = np.concatenate(lists).astype(np.int32), np.array(w.kv_lens, np.int32)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w, gpu.backend))
    layout = flashbsr.Paged(None, indptr, indices, kv_lens=lens, page_size=w.page_size)
    attention.plan(layout, share_prefixes=share)
    q = normal(gpu, (len(lists), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q, float("nan"))

    def call(index: int) -> Any:
        return attention.run(q, caches[index], out=out)

    call(0)
    check_rows(gpu, f"flashbsr, share_prefixes={share!r}", _sample(w, lists, q, caches[0], out), w)
    return call, attention


def run_share(w: Workload, gpu: Gpu) -> Result:
    """Time a decode batch with `share_prefixes` "auto" and "off".

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention over its pages.
    """
    lists, count = page_lists(w)
    assert w.page_size is not None
    shape = (count, 2, w.page_size, w.num_kv_heads, w.head_dim)
    sets = max(2, set_count(math.prod(shape) * ITEMSIZE[w.dtype]))
    caches = [normal(gpu, shape, w.dtype) for _ in range(sets)]
    call, attention = _call(w, gpu, lists, caches, "auto")
    shared = measure(gpu.clock, call, len(caches))
    kernel = attention.explain().kernel
    apart = measure(gpu.clock, _call(w, gpu, lists, caches, "off")[0], len(caches))
    metrics = {
        "us": shared.median * 1e6,
        "apart_us": apart.median * 1e6,
        "sharing_gain": apart.median / shared.median,
    }
    return Result(w, {"flashbsr": shared, "apart": apart}, metrics, note=kernel)
