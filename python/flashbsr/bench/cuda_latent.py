# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs multi-head latent attention: one KV head of 512 + 64 dims, whose values are the 512.

Caches of the type of q, of float8, or of rows of 656 bytes; all tokens, or chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import flashbsr
from flashbsr.arrays.dtypes import PACKED_LATENTS
from flashbsr.ops.latent import PACKED_BYTES
from flashbsr.ops.latent import TAIL as PACKED_TAIL

from .cuda_data import check_rows, normal, sample_rows, set_count
from .cuda_timing import Gpu, measure
from .data import Pages, page_table
from .results import Result
from .workloads import ITEMSIZE, Workload

__all__ = ["run_latent"]

_SOME = 4096  # packed tokens that differ


def _latent(w: Workload) -> int:
    """Dims of the latent; what is behind them is the rotated key."""
    return min(w.head_dim, 512)


def _row_bytes(w: Workload) -> int:
    """Bytes of a token."""
    if w.kv_dtype == PACKED_LATENTS:
        return PACKED_BYTES
    return w.head_dim * ITEMSIZE[w.kv_dtype or w.dtype]


def _read_bytes(w: Workload) -> int:
    return sum(w.kv_lens) * _row_bytes(w)


def _caches(w: Workload, gpu: Gpu, shape: tuple[int, int]) -> list[Any]:
    """Pages of numbers; packed rows of a few tokens, over and over: quantised on the host."""
    count = set_count(shape[0] * shape[1] * _row_bytes(w))
    if w.kv_dtype != PACKED_LATENTS:
        return [normal(gpu, (*shape, w.head_dim), w.kv_dtype or w.dtype) for _ in range(count)]
    torch = gpu.torch
    some = torch.empty((1, _SOME, PACKED_BYTES), dtype=torch.uint8)
    latent, rotated = torch.randn((_SOME, _latent(w))), torch.randn((_SOME, PACKED_TAIL))
    flashbsr.append_packed_latents(latent, rotated, cache=some, slot_mapping=torch.arange(_SOME))
    there = some[0].to(gpu.device)
    tokens = shape[0] * shape[1]
    return [
        there[torch.randint(_SOME, (tokens,), device=gpu.device)].view(*shape, PACKED_BYTES)
        for _ in range(count)
    ]


def _lists(w: Workload) -> tuple[Pages, int]:
    """Chosen tokens as pages of one, and how many there are to choose from."""
    assert w.chosen_from is not None
    caches, tokens = w.chosen_from
    rng, requests = np.random.default_rng(0), len(w.kv_lens)
    chosen = [
        rng.permutation(tokens)[:n] + i * caches // requests * tokens
        for i, n in enumerate(w.kv_lens)
    ]
    indptr = np.cumsum([0, *w.kv_lens]).astype(np.int32)
    last = np.ones(requests, np.int32)
    return Pages(indptr, np.concatenate(chosen).astype(np.int32), last, 1), caches * tokens


def _planned(w: Workload, gpu: Gpu, page_size: int) -> tuple[Callable[[int], Any], int]:
    """Plan, run and check; the call, and its sets of caches."""
    if w.chosen_from:
        pages, count = _lists(w)
    else:
        pages = page_table(w.kv_lens, page_size)
        count = pages.count
    caches = _caches(w, gpu, (count, page_size))
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=w.causal, sm_scale=w.head_dim**-0.5),
        flashbsr.TaskInfo(
            w.num_qo_heads, 1, w.head_dim, head_dim_vo=_latent(w), latent=True, q_dtype=w.dtype,
            kv_dtype=w.kv_dtype or w.dtype, backend=gpu.backend,
        ),
    )  # fmt: skip
    queries = None if max(w.q_lens) == 1 else np.cumsum([0, *w.q_lens]).astype(np.int32)
    lens = np.array(w.kv_lens, np.int32)
    late: dict[str, Any] = {}
    if w.chosen_from:  # lists as an indexer leaves them on the device
        attention.plan(flashbsr.Bounds(queries, lens, page_size=page_size))
        table = pages.indices.reshape(len(lens), -1)
        late = {
            name: gpu.torch.from_numpy(x).to(gpu.device)
            for name, x in (("kv_lens", lens), ("block_tables", table))
        }
    else:
        attention.plan(
            flashbsr.Paged(queries, pages.indptr, pages.indices, kv_lens=lens, page_size=page_size)
        )
    q = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q[..., : _latent(w)], float("nan")).contiguous()

    def call(index: int) -> Any:
        return attention.run(q, caches[index], out=out, **late)

    def kv_of(request: int) -> tuple[Any, Any]:
        page, slot = (x.tolist() for x in pages.tokens(request, w.kv_lens[request]))
        rows = caches[0].view(gpu.torch.uint8)[page, slot].view(caches[0].dtype)
        if w.kv_dtype == PACKED_LATENTS:
            rows = flashbsr.unpack_latents(rows[None].cpu())[0].to(gpu.device)
        rows = rows[:, None]
        return rows, rows[..., : _latent(w)]

    call(0)
    check_rows(gpu, "flashbsr", sample_rows(w, q, out, kv_of), w)
    return call, len(caches)


def run_latent(w: Workload, gpu: Gpu) -> Result:
    """Time a batch; pages of one token, which nobody chose, beside pages of 64.

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
        "gbs": _read_bytes(w) / seconds * 1e-9,
        "tflops": 2 * pairs * w.num_qo_heads * (w.head_dim + _latent(w)) / seconds * 1e-12,
    }
    if w.page_size == 1 and not w.chosen_from:
        times["page 64"] = measure(gpu.clock, *_planned(w, gpu, 64))
        metrics["page_penalty"] = seconds / times["page 64"].median - 1
    return Result(w, times, metrics)
