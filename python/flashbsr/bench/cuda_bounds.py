# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs steps of layers whose lengths and page tables are on the device, beside plans of lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import flashbsr

from .cuda_data import check_rows, normal, paged_kv, paged_sets, sample_rows
from .cuda_timing import Gpu, measure
from .data import Pages, page_table, task_info
from .results import Result
from .timing import Budget, Samples, Side, interleave
from .workloads import Workload

__all__ = ["run_bounds", "run_bounds_plan", "run_update"]

#: Runs of a step, which has one update.
LAYERS = 32


def _queries(w: Workload) -> np.ndarray | None:
    return None if max(w.q_lens) == 1 else np.cumsum([0, *w.q_lens]).astype(np.int32)


def _table(w: Workload, pages: Pages) -> np.ndarray:
    """Dense, as engines have it, with an id behind each row that is no page."""
    counts = np.diff(pages.indptr)
    table = np.full((len(w.kv_lens), int(counts.max()) + 1), -1, np.int32)
    for row, begin, count in zip(table, pages.indptr, counts, strict=False):
        row[:count] = pages.indices[begin : begin + count]
    return table


class _Steps:
    """An attention of the workload, and steps of its layers."""

    def __init__(self, w: Workload, gpu: Gpu, data: tuple[Any, list[Any], Pages]) -> None:
        self.w, self.gpu = w, gpu
        self.q, self.caches, self.pages = data
        spec = flashbsr.AttentionSpec(causal=w.causal)
        self.attention = flashbsr.Attention(spec, task_info(w, gpu.backend))
        self.out = gpu.torch.full_like(self.q, float("nan"))

    def run(self, layer: int, **lengths: Any) -> None:
        cache = self.caches[layer % len(self.caches)]
        self.attention.run(self.q, cache, out=self.out, **lengths)

    def seconds(self, step: Callable[[int], None], lens: np.ndarray) -> Samples:
        """Check the first layer, then time a layer of a step."""
        step(0)
        self.run(0)
        shorter = replace(self.w, kv_lens=tuple(lens.tolist()))
        kv = paged_kv(shorter, self.caches[0], self.pages)
        check_rows(self.gpu, "flashbsr", sample_rows(shorter, self.q, self.out, kv), shorter)
        samples = measure(self.gpu.clock, step)
        return Samples([s / LAYERS for s in samples.seconds])


def run_bounds(w: Workload, gpu: Gpu) -> Result:
    """Time a layer of a step: one update and `LAYERS` runs, or an update with every run.

    Twice: with lengths that are the bounds, and with random ones from half of them on; each beside
    a plan of those lengths.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention.
    """
    caches, pages = paged_sets(gpu, w)
    data = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype), caches, pages
    bounds = np.array(w.kv_lens, np.int32)
    half = np.random.default_rng(0).integers(bounds // 2, bounds + 1, dtype=np.int32)
    there = gpu.torch.from_numpy
    table = there(_table(w, pages)).to(gpu.device)
    times: dict[str, Samples] = {}
    for name, lens in (("", bounds), ("half ", half)):
        device_lens = there(lens).to(gpu.device)
        planned, late = _Steps(w, gpu, data), _Steps(w, gpu, data)
        size, queries = pages.page_size, _queries(w)
        planned.attention.plan(
            flashbsr.Paged(queries, pages.indptr, pages.indices, kv_lens=lens, page_size=size)
        )
        late.attention.plan(flashbsr.Bounds(queries, bounds, page_size=size))

        def host(_: int, steps: _Steps = planned) -> None:
            for layer in range(LAYERS):
                steps.run(layer)

        def once(_: int, steps: _Steps = late, lens: Any = device_lens) -> None:
            steps.attention.update(lens, table)
            for layer in range(LAYERS):
                steps.run(layer)

        def each(_: int, steps: _Steps = late, lens: Any = device_lens) -> None:
            for layer in range(LAYERS):
                steps.run(layer, kv_lens=lens, block_tables=table)

        times[f"{name}planned"] = planned.seconds(host, lens)
        times[f"{name}flashbsr"] = late.seconds(once, lens)
        if not name:
            times["each"] = late.seconds(each, lens)
    us = {name: samples.median * 1e6 for name, samples in times.items()}
    metrics = {
        "us": us["flashbsr"],
        "planned_us": us["planned"],
        "over_planned": us["flashbsr"] / us["planned"] - 1,
        "each_us": us["each"],
        "half_us": us["half flashbsr"],
        "over_planned_half": us["half flashbsr"] / us["half planned"] - 1,
    }
    return Result(w, times, metrics)


def run_update(w: Workload, gpu: Gpu, tick: Callable[[float], None]) -> Result:
    """Time `Attention.update` with arrays on the host, what the caller waits for."""
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w, gpu.backend))
    lens = np.array(w.kv_lens, np.int32)
    assert w.page_size is not None
    pages = page_table(w.kv_lens, w.page_size)
    attention.plan(flashbsr.Bounds(None, lens + 512, page_size=w.page_size))
    table = _table(w, pages)
    side = Side(lambda _: attention.update(lens, table))
    times = interleave({"flashbsr": side}, Budget(0.5, 4, 20, calls_per_round=40), tick=tick)
    return Result(w, times, {"update_us": times["flashbsr"].median * 1e6})


def run_bounds_plan(w: Workload, gpu: Gpu, tick: Callable[[float], None]) -> Result:
    """Time `Attention.plan` of bounds that change from step to step."""
    size = w.page_size
    assert size is not None
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w, gpu.backend))
    layouts = [
        flashbsr.Bounds(None, np.roll(np.array(w.kv_lens, np.int32), i), page_size=size)
        for i in range(8)
    ]
    side = Side(lambda i: attention.plan(layouts[i % len(layouts)]))
    times = interleave({"flashbsr": side}, Budget(0.5, 4, 20, calls_per_round=40), tick=tick)
    return Result(w, times, {"plan_us": times["flashbsr"].median * 1e6})
