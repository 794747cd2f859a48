# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs one workload: makes its data, checks a few rows, times the sides in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import flashbsr

from .codes import CodedDecode
from .data import Arrays, Pages, check_rows, page_table, share_first, supports, task_info
from .peers import as_torch, torch_decode, torch_or_none
from .prefill import run_chunk, run_latent, run_prefill
from .results import Result
from .session import Session
from .timing import Budget, Side, interleave
from .workloads import Workload, equal_lengths, kv_bytes

__all__ = ["run_workload", "time_plan"]

#: K/V that decode calls rotate over, so that it comes from memory, not from the CPU's caches.
ROTATE_BYTES = 512 << 20


def run_workload(workload: Workload, session: Session) -> Result:
    """Measure one workload.

    Raises
    ------
    RuntimeError
        A side computes something else than float64 attention.
    """
    if workload.kind != "plan" and not supports(workload.dtype):  # plan() sees no array of it
        return Result(workload, note="skipped: NumPy has no bfloat16 without the package ml_dtypes")
    if workload.arrays == "torch" and torch_or_none() is None:
        return Result(workload, note="skipped: PyTorch is not installed")
    return _RUNNERS[workload.kind](workload, session)


def _scale(workload: Workload) -> float:
    return float(workload.head_dim**-0.5)


@dataclass(slots=True)
class _Decode:
    """A planned decode batch over a rotation of paged caches."""

    workload: Workload
    kv_lens: tuple[int, ...]
    q: np.ndarray
    caches: list[np.ndarray]
    pages: Pages
    attention: flashbsr.Attention
    out: np.ndarray

    @classmethod
    def make(
        cls, w: Workload, kv_lens: tuple[int, ...], q: np.ndarray, caches: list[np.ndarray]
    ) -> _Decode:
        assert w.page_size is not None
        pages = page_table(kv_lens, w.page_size)
        attention = flashbsr.Attention(flashbsr.AttentionSpec(), task_info(w))
        attention.plan(pages.layout())
        return cls(w, kv_lens, q, caches, pages, attention, np.empty_like(q))

    def call(self, index: int) -> Any:
        return self.attention.run(self.q, self.caches[index % len(self.caches)], out=self.out)

    def check(self) -> None:
        """Compare two heads of the shortest and the longest request with float64 attention."""
        w = self.workload
        self.call(0)
        cache = self.caches[0]
        group = w.num_qo_heads // w.num_kv_heads
        picks, rows = [], []
        for request in {int(np.argmin(self.kv_lens)), int(np.argmax(self.kv_lens))}:
            page, slot = self.pages.tokens(request, self.kv_lens[request])
            for head in (0, w.num_qo_heads - 1):
                kv_head = head // group
                inner = (slot, kv_head) if w.kv_layout == "NHD" else (kv_head, slot)
                k, v = (cache[(page, side) + inner] for side in (0, 1))  # noqa: RUF005, 3.10 syntax
                picks.append(self.out[request, head])
                rows.append((self.q[request, head], k, v, np.float64(_scale(w))))
        check_rows("flashbsr", np.stack(picks), rows, w.dtype)


def _caches(
    w: Workload, arrays: Arrays, num_pages: int, *, rotate: bool = True
) -> list[np.ndarray]:
    """Paged caches, as many as it takes to leave the CPU's caches behind."""
    assert w.page_size is not None
    inner = (w.page_size, w.num_kv_heads) if w.kv_layout == "NHD" else (w.num_kv_heads, w.page_size)
    count = -(-ROTATE_BYTES // kv_bytes(w)) if rotate else 1
    return [arrays.normal((num_pages, 2, *inner, w.head_dim)) for _ in range(count)]


def _add_torch_decode(
    w: Workload, session: Session, arrays: Arrays, q: np.ndarray, sides: dict[str, Side]
) -> str:
    """Add PyTorch over padded K/V to `sides`; returns how it was called."""
    longest = max(w.kv_lens)
    shape = (len(w.kv_lens), w.num_kv_heads, longest, w.head_dim)
    padded_bytes = kv_bytes(w, (longest,) * len(w.kv_lens))
    sets = [
        (arrays.normal(shape), arrays.normal(shape))
        for _ in range(-(-ROTATE_BYTES // padded_bytes))
    ]
    peer = torch_decode(
        as_torch(q), [(as_torch(k), as_torch(v)) for k, v in sets], w.kv_lens, session.threads
    )
    request, head = len(w.kv_lens) - 1, w.num_qo_heads - 1
    k, v = (x[request, -1, : w.kv_lens[request]] for x in sets[0])
    row = (q[request, head], k, v, np.float64(_scale(w)))
    check_rows("torch", peer.output()[None, request, head], [row], w.dtype)
    sides["torch"] = Side(peer.call)
    return f"torch: {peer.form}"


def _memory_metrics(result: Result) -> None:
    """KV bytes, each counted once, over time, in GB/s; the ratio to torch."""
    size = kv_bytes(result.workload)
    metrics, times = result.metrics, result.times
    metrics["kv_gbs"] = size / times["flashbsr"].median * 1e-9
    if "torch" in times:
        metrics["torch_kv_gbs"] = size / times["torch"].median * 1e-9
        metrics["speedup"] = times["torch"].median / times["flashbsr"].median


def _run_decode(w: Workload, session: Session) -> Result:
    assert w.page_size is not None
    arrays = Arrays(w.dtype)
    q = arrays.normal((len(w.kv_lens), w.num_qo_heads, w.head_dim))
    variants = {"flashbsr": w.kv_lens}
    if w.kind == "skew":
        variants["equal"] = equal_lengths(w.kv_lens)
    num_pages = max(page_table(lens, w.page_size).count for lens in variants.values())
    wide = replace(w, kv_dtype=None) if w.kind == "codes" else w
    caches = _caches(wide, arrays, num_pages)
    decodes: dict[str, _Decode | CodedDecode] = {
        name: _Decode.make(wide, lens, q, caches) for name, lens in variants.items()
    }
    if w.kind == "codes":
        coded = CodedDecode.make(w, q, -(-ROTATE_BYTES // kv_bytes(w)))
        decodes = {"flashbsr": coded, "bf16": decodes["flashbsr"]}
    gaps: list[float] = []

    def busy(_: float) -> None:
        seconds = decodes["flashbsr"].attention.run_stats()["busy_s"]
        gaps.append(1.0 - min(seconds) / max(seconds))

    sides: dict[str, Side] = {}
    for name, decode in decodes.items():
        decode.check()
        sides[name] = Side(decode.call, busy if name == "flashbsr" else None)
    result = Result(w)
    if session.torch(w):
        result.note = _add_torch_decode(w, session, arrays, q, sides)
    before = session.sample_bandwidth()
    result.times = interleave(sides, session.budget(1.0), tick=session.tick)
    after = session.sample_bandwidth()
    _memory_metrics(result)
    # Against the samples on either side: a shared host's bandwidth can halve within a run.
    for limit in ("triad", "read"):
        rate = statistics.fmean(sample[f"{limit}_gbs"] for sample in (before, after))
        result.metrics[f"{limit}_gbs"] = rate
        result.metrics[f"{limit}_fraction"] = result.metrics["kv_gbs"] / rate
    result.metrics["busy_gap"] = statistics.median(gaps)
    if "bf16" in result.times:
        result.metrics["over_bf16"] = result.times["bf16"].median / result.times["flashbsr"].median
    if "equal" in result.times:
        times = result.times
        result.metrics["skew_penalty"] = times["flashbsr"].median / times["equal"].median - 1.0
    return result


def time_plan(w: Workload, backend: str, tick: Callable[[float], None]) -> Result:
    """Median of `plan()` over page tables that differ, so that nothing can be remembered."""
    assert w.page_size is not None
    tables = [
        page_table(w.kv_lens[shift:] + w.kv_lens[:shift], w.page_size, seed=shift)
        for shift in range(8)
    ]
    starts: list[np.ndarray | None] = [None] * len(tables)
    for shift, pages in enumerate(tables):
        share_first(pages, sum(tokens for _, tokens in w.prefixes))
        if max(w.q_lens) > 1:
            q_lens = w.q_lens[shift:] + w.q_lens[:shift]
            starts[shift] = np.cumsum([0, *q_lens]).astype(np.int32)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=w.causal), task_info(w, backend))

    def call(i: int) -> None:
        nth = i % len(tables)
        attention.plan(tables[nth].layout(starts[nth]))

    side = Side(call)
    budget = Budget(0.5, 4, 20, calls_per_round=40)
    times = interleave({"flashbsr": side}, budget, tick=tick)
    return Result(w, times, {"plan_us": times["flashbsr"].median * 1e6})


def _run_plan(w: Workload, session: Session) -> Result:
    return time_plan(w, "cpu", session.tick)


def _run_overhead(w: Workload, session: Session) -> Result:
    """Wall time of `run()` on the smallest problem minus the time inside the kernel."""
    assert w.page_size is not None
    arrays = Arrays(w.dtype)
    decode = _Decode.make(
        w,
        w.kv_lens,
        arrays.normal((1, w.num_qo_heads, w.head_dim)),
        _caches(w, arrays, 1, rotate=False),
    )
    decode.check()
    q: Any = decode.q
    cache: Any = decode.caches[0]
    out: Any = decode.out
    if w.arrays == "torch":
        q, cache, out = as_torch(decode.q), as_torch(decode.caches[0]), as_torch(decode.out)
    kernel: list[float] = []
    above: list[float] = []

    def after(elapsed: float) -> None:
        seconds = decode.attention.run_stats()["kernel_s"]
        kernel.append(seconds)
        above.append(elapsed - seconds)

    side = Side(lambda _: decode.attention.run(q, cache, out=out), after)
    budget = Budget(0.5, 4, 20, calls_per_round=100)
    times = interleave({"flashbsr": side}, budget, tick=session.tick)
    metrics = {
        "overhead_us": statistics.median(above) * 1e6,
        "kernel_us": statistics.median(kernel) * 1e6,
        "wall_us": times["flashbsr"].median * 1e6,
    }
    return Result(w, times, metrics)


_RUNNERS: dict[str, Callable[[Workload, Session], Result]] = {
    "prefill": run_prefill,
    "chunk": run_chunk,
    "latent": run_latent,
    "decode": _run_decode,
    "skew": _run_decode,
    "balance": _run_decode,
    "codes": _run_decode,
    "plan": _run_plan,
    "overhead": _run_overhead,
}
