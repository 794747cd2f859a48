# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs batches of prefill chunks and decodes: in one launch, and each half by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flashbsr

from .cuda_data import check_rows, normal, paged_kv, paged_sets, sample_rows
from .cuda_decode import decode_call
from .cuda_prefill import prefill_call
from .cuda_timing import Gpu, measure
from .data import task_info
from .results import Result
from .timing import Samples
from .workloads import Workload

__all__ = ["run_mixed"]


def _half(w: Workload, *, decodes: bool) -> Workload:
    lens = zip(w.q_lens, w.kv_lens, strict=True)
    q_lens, kv_lens = zip(*((q, kv) for q, kv in lens if (q == 1) == decodes), strict=True)
    return replace(w, q_lens=q_lens, kv_lens=kv_lens)


def _together(w: Workload, gpu: Gpu) -> tuple[Callable[[int], Any], int, flashbsr.Attention]:
    """Plan, run and check all of it in one launch; the call, its sets, and the engine."""
    caches, pages = paged_sets(gpu, w)
    spec = flashbsr.AttentionSpec(causal=w.causal)
    attention = flashbsr.Attention(spec, task_info(w, gpu.backend))
    attention.plan(pages.layout(w.q_lens))
    q = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q, float("nan"))
    lse = gpu.torch.empty(q.shape[:2], dtype=gpu.torch.float32, device=gpu.device)

    def call(index: int) -> Any:
        return attention.run(q, caches[index], out=out, lse=lse)

    call(0)
    check_rows(gpu, "flashbsr", sample_rows(w, q, out, paged_kv(w, caches[0], pages)), w)
    return call, len(caches), attention


def run_mixed(w: Workload, gpu: Gpu) -> Result:
    """Time a mixed batch, its prefills and its decodes, all from the same power state.

    Raises
    ------
    RuntimeError
        A side computes something else than float64 attention.
    """

    def timed(call: Callable[[int], Any], sets: int) -> Samples:
        return measure(gpu.clock, call, sets, compute_bound=True)

    call, sets, attention = _together(w, gpu)
    together = timed(call, sets)
    prefills = timed(*prefill_call(_half(w, decodes=False), gpu))
    decodes = timed(*decode_call(_half(w, decodes=True), gpu))
    halves = prefills.median, decodes.median
    metrics = {
        "us": together.median * 1e6,
        "prefill_us": prefills.median * 1e6,
        "decode_us": decodes.median * 1e6,
        "apart_gain": sum(halves) / together.median,
        "over_larger": together.median / max(halves),
    }
    times = {"flashbsr": together, "prefills": prefills, "decodes": decodes}
    return Result(w, times, metrics, note=attention.explain().kernel)
