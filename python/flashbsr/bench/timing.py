# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Clocks: interleaved sides, medians, and the machine's own limits measured in the same run.

Sides that are compared take turns, so that a drift of the machine (frequency, neighbours) hits all
alike. A side's turn starts with a short rest: thread pools spin for a while after their work
(OpenMP's does) and would steal a core from the next side. Then comes an untimed call, unless calls
are long enough for a cold start not to show.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

__all__ = ["Budget", "Samples", "Side", "interleave", "matmul_gflops", "measure_bandwidth"]

REST_S = 0.02
LONG_CALL_S = 0.05
BANDWIDTH_BYTES = 256 << 20
MATMUL_SIZE = 2048


@dataclass(slots=True)
class Side:
    """What takes turns: `call(i)` is timed; `after(seconds)` is not and may look at statistics.

    `i` counts the calls of the side; use it to rotate over data sets.
    """

    call: Callable[[int], object]
    after: Callable[[float], None] | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: after `seconds` of timed calls on every side, but within the round limits."""

    seconds: float = 2.0
    min_rounds: int = 3
    max_rounds: int = 15
    calls_per_round: int = 3


@dataclass(slots=True)
class Samples:
    """Seconds of single calls."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Median, quartiles, extremes and count, in seconds."""
        values = sorted(self.seconds)
        quarter = len(values) // 4
        return {
            "median_s": self.median,
            "q1_s": values[quarter],
            "q3_s": values[-1 - quarter],
            "min_s": values[0],
            "max_s": values[-1],
            "calls": len(values),
        }


def interleave(
    sides: Mapping[str, Side],
    budget: Budget,
    *,
    tick: Callable[[float], None] | None = None,
) -> dict[str, Samples]:
    """Time the sides in turns.

    Parameters
    ----------
    sides : mapping of name to Side
    budget : Budget
    tick : callable, optional
        Called with the fraction done after every turn; for a progress bar.

    Returns
    -------
    dict of name to Samples
    """
    samples = {name: Samples() for name in sides}
    counters = dict.fromkeys(sides, 0)

    def one(name: str, timed: bool) -> float:
        side = sides[name]
        index = counters[name]
        counters[name] += 1
        start = time.perf_counter_ns()
        side.call(index)
        elapsed = (time.perf_counter_ns() - start) * 1e-9
        if timed:
            samples[name].seconds.append(elapsed)
            if side.after is not None:
                side.after(elapsed)
        return elapsed

    collecting = gc.isenabled()
    gc.disable()
    try:
        lengths = {name: one(name, timed=False) for name in sides}
        spent = dict.fromkeys(sides, 0.0)
        for round_ in range(budget.max_rounds):
            for name in sides:
                time.sleep(REST_S)
                if lengths[name] < LONG_CALL_S:
                    one(name, timed=False)
                for _ in range(budget.calls_per_round):
                    lengths[name] = one(name, timed=True)
                    spent[name] += lengths[name]
                    if lengths[name] * budget.calls_per_round > budget.seconds:
                        break  # one call of this length a round is enough
                if tick is not None:
                    tick(min(1.0, (round_ + 1) / budget.max_rounds))
            if round_ + 1 >= budget.min_rounds and min(spent.values()) >= budget.seconds:
                break
    finally:
        if collecting:
            gc.enable()
    return samples


def measure_bandwidth(threads: int) -> dict[str, float]:
    """Memory bandwidth in GB/s, best of a few passes over arrays far larger than caches, in C++.

    Returns
    -------
    dict
        ``triad_gbs``: STREAM triad ``a = b + s * c``, 3 bytes per byte of `a` as STREAM counts.
        ``read_gbs``: a sum over one array.
    """
    import flashbsr._core as _core

    found = _core.measure_bandwidth(BANDWIDTH_BYTES, threads)
    return {"triad_gbs": float(found["triad_gbs"]), "read_gbs": float(found["read_gbs"])}


def matmul_gflops(threads: int) -> dict[str, float]:
    """Rate of PyTorch's square matrix product per dtype in GFLOP/s; empty without PyTorch."""
    from .peers import torch_or_none

    torch = torch_or_none()
    if torch is None:
        return {}
    torch.set_num_threads(threads)
    size = MATMUL_SIZE
    rates: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        a = torch.randn(size, size).to(getattr(torch, dtype))
        b = torch.randn(size, size).to(getattr(torch, dtype))
        side = Side(partial(_product, torch, a, b))
        timed = interleave({"mm": side}, Budget(0.4, 2, 4, calls_per_round=4))
        rates[dtype] = 2 * size**3 / timed["mm"].median * 1e-9
    return rates


def _product(torch: Any, a: Any, b: Any, _: int) -> Any:
    return torch.mm(a, b)
