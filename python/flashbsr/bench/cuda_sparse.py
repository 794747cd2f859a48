# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the block-sparse workloads: a random pattern of blocks, the same for all heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import flashbsr

from .cuda_data import Row, check_rows, normal, set_count
from .cuda_timing import Gpu, measure
from .data import task_info
from .results import Result
from .workloads import Workload, kv_bytes

__all__ = ["run_sparse"]

_SEED = 7


def random_blocks(w: Workload) -> flashbsr.BlockMask:
    """Keep each block with the workload's probability."""
    assert w.block is not None
    (m,), (n,) = w.q_lens, w.kv_lens
    counts = [-(-length // size) for length, size in zip((m, n), w.block, strict=True)]
    kept = np.random.default_rng(_SEED).random(counts) < w.kept
    return flashbsr.BlockMask.from_block_map(kept, w.block, q_len=m, kv_len=n)


def sparse_flops(w: Workload, blocks: flashbsr.BlockMask) -> int:
    """Operations of both products over the pairs of the blocks that are kept."""
    (m, n), (r, c) = blocks.shape, blocks.block
    rows = np.minimum(r, m - r * np.arange(len(blocks.indptr) - 1))
    columns = np.minimum(c, n - c * blocks.indices.astype(np.int64))
    pairs = int((np.repeat(rows, np.diff(blocks.indptr)) * columns).sum())
    return 4 * pairs * w.head_dim * w.num_qo_heads


def _sample(w: Workload, blocks: flashbsr.BlockMask, q: Any, kv: Any, out: Any) -> list[Row]:
    """First, middle and last query, two heads, and the keys that they see."""
    (m, n), (r, c) = blocks.shape, blocks.block
    rows = []
    for token in sorted({0, m // 2, m - 1}):
        begin, end = blocks.indptr[token // r], blocks.indptr[token // r + 1]
        keys = (blocks.indices[begin:end, None].astype(np.int64) * c + np.arange(c)).reshape(-1)
        seen = keys[keys < n].tolist()
        for head in (0, w.num_qo_heads - 1):
            k, v = (x[seen, head // (w.num_qo_heads // w.num_kv_heads)] for x in kv)
            rows.append(Row(out[token, head], q[token, head], k, v, head))
    return rows


def _call(
    w: Workload, gpu: Gpu, blocks: flashbsr.BlockMask
) -> tuple[Callable[[int], Any], int, flashbsr.Attention]:
    """Plan, run and check; the call, its sets, and the engine."""
    m, n = blocks.shape
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w, gpu.backend))
    attention.plan(blocks.layout())
    q = normal(gpu, (m, w.num_qo_heads, w.head_dim), w.dtype)
    shape, count = (n, w.num_kv_heads, w.head_dim), set_count(kv_bytes(w))
    sets = [(normal(gpu, shape, w.dtype), normal(gpu, shape, w.dtype)) for _ in range(count)]
    out = gpu.torch.full_like(q, float("nan"))

    def call(index: int) -> Any:
        return attention.run(q, sets[index], out=out)

    call(0)
    check_rows(gpu, "flashbsr", _sample(w, blocks, q, sets[0], out), w)
    return call, count, attention


def run_sparse(w: Workload, gpu: Gpu) -> Result:
    """Time a block-sparse workload.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention over its blocks.
    """
    blocks = random_blocks(w)
    call, count, attention = _call(w, gpu, blocks)
    samples = measure(gpu.clock, call, count, compute_bound=True)
    tflops = sparse_flops(w, blocks) / samples.median * 1e-12
    metrics = {"us": samples.median * 1e6, "tflops": tflops}
    return Result(w, {"flashbsr": samples}, metrics, note=attention.explain().kernel)
