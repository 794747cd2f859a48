# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Threads of the engine in a worker of vLLM whose main thread is bound to one core."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import framework

framework("torch")
cores = importlib.import_module("flashbsr.integrations.vllm.cores")

WORKER = """
import os, sys
from flashbsr.integrations.vllm.cores import spread
mine = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, mine[:1])
os.environ["GOMP_CPU_AFFINITY"] = f"{mine[0]} {mine[1]}"
before = set(os.listdir("/proc/self/task"))
spread(2)
made = set(os.listdir("/proc/self/task")) - before
assert sorted(os.sched_getaffinity(0)) == mine[:1], "the main thread stays where it was"
print(len(made), *(sorted(os.sched_getaffinity(int(t))) == mine for t in made))
"""


def threads() -> list[str]:
    """Threads of this process, where the system lists them."""
    tasks = Path("/proc/self/task")
    return sorted(path.name for path in tasks.iterdir()) if tasks.exists() else []


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[4,5,7]"}, {4, 5, 7}),
        ({"KMP_AFFINITY": "granularity=core2,compact"}, set()),
        ({"GOMP_CPU_AFFINITY": "0 2 8-10"}, {0, 2, 8, 9, 10}),
        ({"OMP_PLACES": "{1,3}"}, {1, 3}),
        ({"OMP_PLACES": "cores"}, set()),
        ({}, set()),
    ],
)
def test_what_openmp_was_told(environment: dict[str, str], found: set[int]) -> None:
    assert cores.worker_cores(environment) == found


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="takes two cores",
)
def test_threads_have_the_cores_of_the_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_nothing_is_made_where_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cores.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = threads()
    cores.spread(10**6)
    assert before == threads()
