# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Several Python threads at once, and processes that fork."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cases
import flashbsr
import numpy as np
import pytest
from cases import BF16, Case
from harness import attention_for, check_case, compare, execute
from reference import Variant

WORK = Case(
    "threads",
    (1, 30, 1, 1),
    (900, 200, 60, 400),
    heads=(8, 2),
    layout="paged",
    variant=Variant(causal=True),
    task={"num_threads": 2},
)


def together(jobs: list[Callable[[], None]]) -> None:
    """Run the jobs at once and raise what any of them raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def work(job: Callable[[], None]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def test_different_objects() -> None:
    """Each thread plans and runs its own object, of its own problem."""

    def job(seed: int) -> Callable[[], None]:
        problem = cases.build(WORK.but("own", seed=seed, dtypes=BF16 if seed % 2 else cases.F32))
        attention = attention_for(problem)
        results = []

        def run() -> None:
            results.extend(execute(problem, attention) for _ in range(10))
            for out, lse in results:
                compare(problem, out, lse)

        return run

    together([job(seed) for seed in range(4)])


def test_one_object() -> None:
    """Concurrent `run`s of one planned object, with different queries, do not mix."""
    first = cases.build(WORK)
    attention = attention_for(first)
    first.plan(attention)
    assert attention.plan_info.header.num_merges > 0

    def job(seed: int) -> Callable[[], None]:
        problem = cases.build(WORK.but("same", gain=1 + seed / 2))

        def run() -> None:
            for _ in range(10):
                compare(problem, *execute(problem, attention, plan=False))

        return run

    together([job(seed) for seed in range(4)])


REPLAN = """
import sys, threading
sys.path.insert(0, {here!r})
import cases
from harness import attention_for, execute
problems = [
    cases.build(cases.Case("replan", 40 * (1,), 40 * (n,), heads=(8, 2), layout="paged",
                           task={{"num_threads": 2, "num_workers": w}}))
    for n, w in ((300, 4), (40, 4))]
# Both plans fit both caches and both have 40 query rows, so either may be the current one.
problems[1].kv, problems[1].q = problems[0].kv, problems[0].q
attention = attention_for(problems[0])
expected = set()
for problem in problems:
    problem.plan(attention)
    expected.add(attention.run(problem.q, problem.kv).tobytes())
assert len(expected) == 2
stop = False
def plans():
    while not stop:
        for problem in problems:
            problem.plan(attention)
thread = threading.Thread(target=plans)
thread.start()
try:
    for _ in range(300):
        assert attention.run(problems[0].q, problems[0].kv).tobytes() in expected
finally:
    stop = True
    thread.join()
"""


def test_plan_while_another_thread_runs() -> None:
    """A run uses one plan from beginning to end, whoever plans meanwhile."""
    result = subprocess.run(
        [sys.executable, "-c", REPLAN.format(here=str(Path(__file__).parents[1]))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_one_call() -> None:
    """`flashbsr.attention` shares nothing that a second caller could disturb."""

    def job(seed: int) -> Callable[[], None]:
        problem = cases.build(Case("single", (20,), (100 + seed,), seed=seed))
        k, v = problem.kv

        def run() -> None:
            for _ in range(20):
                out, lse = flashbsr.attention(problem.q[None], k[None], v[None], return_lse=True)
                compare(problem, out[0], lse[0])

        return run

    together([job(seed) for seed in range(4)])


@pytest.mark.parametrize("dtypes", [cases.F32, BF16], ids=lambda dtypes: dtypes[0])
def test_scratch_of_a_fresh_thread(dtypes: tuple[str, str, str]) -> None:
    """Each thread keeps its scratch and only grows it, so a larger case hides what a smaller one
    lacks. Here each head dim meets a thread without any (a sanitizer would see it overrun).
    """
    for dim in range(8, 257, 8):
        for base in (cases.PREFILL, cases.DECODE):
            case = base.but(f"dim{dim}", dtypes=dtypes, dims=(dim, dim), task={"num_threads": 1})
            together([functools.partial(check_case, case)])


def test_garbage_collection_between_runs() -> None:
    """Objects die while others run: their threads and memory go with them."""

    def job() -> None:
        problem = cases.build(WORK)
        for _ in range(30):
            attention = attention_for(problem)
            execute(problem, attention)
            del attention

    before = len(list(Path("/proc/self/task").iterdir())) if sys.platform == "linux" else 0
    together([job] * 3)
    if sys.platform == "linux":
        after = len(list(Path("/proc/self/task").iterdir()))
        assert after <= before + 8


FORK = """
import os, sys, signal
sys.path.insert(0, {here!r})
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the point of this test
import cases
from harness import attention_for, execute
case = cases.Case("fork", (1, 1, 40), (3000, 20, 100), heads=(8, 2), layout="paged",
                  task={{"num_threads": 4, "num_workers": 8}})
problem = cases.build(case)
attention = attention_for(problem)
expected = [x.tobytes() for x in execute(problem, attention)]
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        old = [x.tobytes() for x in execute(problem, attention)] == expected
        new = [x.tobytes() for x in execute(problem, attention_for(problem))] == expected
        os._exit(0 if old and new else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert [x.tobytes() for x in execute(problem, attention)] == expected
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no fork")
def test_fork() -> None:
    """After a run in the parent, parent and child both go on, with old objects and new ones."""
    result = subprocess.run(
        [sys.executable, "-c", FORK.format(here=str(Path(__file__).parents[1]))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_interpreter_exits_cleanly() -> None:
    """Threads of the engine do not hold the process up or crash it on the way out."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import cases\n"
        "from harness import attention_for, execute\n"
        "problem = cases.build(cases.DECODE)\n"
        "attention = attention_for(problem, num_threads=4)\n"
        "execute(problem, attention)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "leak" not in result.stderr


def test_outputs_of_concurrent_new_arrays() -> None:
    """Without `out` each call makes its own array."""
    problem = cases.build(WORK)
    attention = attention_for(problem)
    problem.plan(attention)
    outs: list[np.ndarray] = []

    def job() -> None:
        outs.extend(attention.run(problem.q, problem.kv) for _ in range(20))

    together([job] * 3)
    assert len({out.ctypes.data for out in outs}) == len(outs) == 60
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
