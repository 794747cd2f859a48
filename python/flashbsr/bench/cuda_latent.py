# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs multi-head latent attention: one KV head of 512 + 64 dims, whose values are the 512."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import flashbsr

from .cuda_data import check_rows, normal, sample_rows, set_count
from .cuda_timing import Gpu, measure
from .data import page_table
from .results import Result
from .workloads import ITEMSIZE, Workload

__all__ = ["run_latent"]


def _latent(w: Workload) -> int:
    """Dims of the latent; what is behind them is the rotated key."""
    return min(w.head_dim, 512)


def _cache_bytes(w: Workload) -> int:
    return sum(w.kv_lens) * w.head_dim * ITEMSIZE[w.dtype]


def _planned(w: Workload, gpu: Gpu, page_size: int) -> tuple[Callable[[int], Any], int]:
    """Plan, run and check; the call, and its sets of caches."""
    pages = page_table(w.kv_lens, page_size)
    shape = (pages.count, page_size, w.head_dim)
    caches = [normal(gpu, shape, w.dtype) for _ in range(set_count(_cache_bytes(w)))]
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=w.causal, sm_scale=w.head_dim**-0.5),
        flashbsr.TaskInfo(
            w.num_qo_heads, 1, w.head_dim, head_dim_vo=_latent(w), latent=True, q_dtype=w.dtype,
            kv_dtype=w.dtype, backend=gpu.backend,
        ),
    )  # fmt: skip
    queries = None if max(w.q_lens) == 1 else np.cumsum([0, *w.q_lens]).astype(np.int32)
    lens = np.array(w.kv_lens, np.int32)
    attention.plan(
        flashbsr.Paged(queries, pages.indptr, pages.indices, kv_lens=lens, page_size=page_size)
    )
    q = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q[..., : _latent(w)], float("nan")).contiguous()

    def call(index: int) -> Any:
        return attention.run(q, caches[index], out=out)

    def kv_of(request: int) -> tuple[Any, Any]:
        page, slot = (x.tolist() for x in pages.tokens(request, w.kv_lens[request]))
        rows = caches[0][page, slot][:, None]
        return rows, rows[..., : _latent(w)]

    call(0)
    check_rows(gpu, "flashbsr", sample_rows(w, q, out, kv_of), w)
    return call, len(caches)


def run_latent(w: Workload, gpu: Gpu) -> Result:
    """Time a batch; with pages of one token beside pages of 64.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention.
    """
    assert w.page_size is not None
    times = {"flashbsr": measure(gpu.clock, *_planned(w, gpu, w.page_size))}
    seconds = times["flashbsr"].median
    pairs = sum(q * kv for q, kv in zip(w.q_lens, w.kv_lens, strict=True))
    metrics = {
        "us": seconds * 1e6,
        "gbs": _cache_bytes(w) / seconds * 1e-9,
        "tflops": 2 * pairs * w.num_qo_heads * (w.head_dim + _latent(w)) / seconds * 1e-12,
    }
    if w.page_size == 1:
        times["page 64"] = measure(gpu.clock, *_planned(w, gpu, 64))
        metrics["page_penalty"] = seconds / times["page 64"].median - 1
    return Result(w, times, metrics)
