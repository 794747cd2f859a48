# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the workloads of a run on the CPU have in common."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .machine import describe_machine
from .peers import torch_or_none
from .results import Result
from .timing import Budget, matmul_gflops, measure_bandwidth
from .workloads import Workload

__all__ = ["Session", "usable_cores"]


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(slots=True)
class Session:
    """Settings and what is measured once per run.

    Attributes
    ----------
    quick : bool
        Shorter budgets.
    peer : bool
        Also time PyTorch where it is installed.
    threads : int
        Of both sides: the cores this process may use.
    bandwidth : list of dict
        Samples of `measure_bandwidth`, taken around every memory-bound workload.
    tick : callable
        Gets the fraction of the current workload that is done.
    """

    quick: bool = False
    peer: bool = True
    threads: int = field(default_factory=usable_cores)
    bandwidth: list[dict[str, float]] = field(default_factory=list)
    tick: Callable[[float], None] = field(default=lambda _: None)
    _matmul: dict[str, float] | None = None

    device = "cpu"

    def machine(self) -> dict[str, Any]:
        """Describe the machine."""
        return describe_machine(self.threads)

    def torch(self, workload: Workload) -> bool:
        """Whether this workload also times PyTorch."""
        return workload.peer and self.peer and torch_or_none() is not None

    def budget(self, seconds: float) -> Budget:
        """Give a time limit per side, a quarter of it with ``--quick``."""
        return Budget(seconds / 4, 2, 6) if self.quick else Budget(seconds, 3, 15)

    def sample_bandwidth(self) -> dict[str, float]:
        """Take one more sample of the memory bandwidth."""
        self.bandwidth.append(measure_bandwidth(self.threads))
        return self.bandwidth[-1]

    def limits(self) -> dict[str, Any]:
        """Sum up the machine: median bandwidths in GB/s, product rates in GFLOP/s."""
        if not self.bandwidth:
            self.sample_bandwidth()
        if self._matmul is None:
            self._matmul = matmul_gflops(self.threads) if self.peer else {}
        return {
            "triad_gbs": statistics.median(b["triad_gbs"] for b in self.bandwidth),
            "read_gbs": statistics.median(b["read_gbs"] for b in self.bandwidth),
            "matmul_gflops": self._matmul,
            "bandwidth_samples": self.bandwidth,
        }

    def finish(self, results: Iterable[Result]) -> None:
        """Add the fractions of the matrix rate, which is measured once everything has run."""
        limits = self.limits()
        for result in results:
            metrics = result.metrics
            rate = limits["matmul_gflops"].get(result.workload.dtype)
            if "gflops" in metrics and rate is not None:
                metrics["matmul_fraction"] = metrics["gflops"] / rate
