# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""On the CPU vLLM binds a worker's threads of OpenMP to a core each, its main thread among them.

Threads inherit that core from the one that makes them. So those of the engine are made while the
worker may run on all of its cores; otherwise they would share the main thread's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import numpy as np

from ...engine.attention import Attention
from ...engine.task import TaskInfo
from ...layout.layouts import Ragged
from ...variant.spec import AttentionSpec

__all__ = ["spread", "worker_cores"]

# What vLLM tells OpenMP, by the library that it finds.
VARIABLES = "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PLACES"
# Work that is worth waking threads for: 2 ms on one core.
TOKENS = 512


def worker_cores(environment: Mapping[str, str]) -> set[int]:
    """Read a worker's cores from what OpenMP was told; empty: nothing was."""
    for name in VARIABLES:
        text = environment.get(name, "")
        if name == "KMP_AFFINITY":
            text = text.partition("proclist=")[2]
        cores: set[int] = set()
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
            cores.update(range(int(first), int(last or first) + 1))
        if cores:
            return cores
    return set()


def spread(threads: int) -> None:
    """Make the engine's threads, on the worker's cores; they serve all engines of the process."""
    if threads <= 1 or not hasattr(os, "sched_setaffinity"):
        return
    mine, cores = os.sched_getaffinity(0), worker_cores(os.environ)
    if len(mine) >= threads or not cores - mine:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # cores that a container has not; threads stay where the main thread is
        return
    try:
        task = TaskInfo(4, 4, 64, q_dtype="float32", backend="cpu", num_threads=threads)
        attention = Attention(AttentionSpec(), task)
        attention.plan(Ragged([0, TOKENS], [0, TOKENS]))
        rows = np.zeros((TOKENS, 4, 64), np.float32)
        attention.run(rows, (rows, rows))
    finally:
        os.sched_setaffinity(0, mine)
