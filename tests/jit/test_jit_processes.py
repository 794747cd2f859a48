# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Processes that want the same new variant at once, with the machine's own compiler: how often it
is started, who is killed while it works, and what everybody else gets."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flashbsr.jit import cache, cxx

# Says that it is there, waits for its turn, and prints the bits of its result.
PROGRAM = '''
import sys
import numpy as np
from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
TEXT = """struct Wavy : flashbsr::VariantBase {
  static constexpr bool use_softmax = false;
  template <class M> auto activation(typename M::Float x) const {
    return M::sigmoid(x * slope) - 0.25f;
  }
};"""
q, k, v = np.load(sys.argv[1])
spec = AttentionSpec.from_source(TEXT, extras={"slope": "float32"})
attention = Attention(spec, TaskInfo(2, 2, 16))
attention.plan(Ragged([0, 7], [0, 7]))
print("ready", flush=True)
sys.stdin.readline()
print(attention.run(q, (k, v), slope=0.75).tobytes().hex())
'''


class Workplace:
    """A cache, a compiler that writes down when it starts, and the programs that use them."""

    def __init__(self, folder: Path) -> None:
        real = cxx.compiler()
        self.log = folder / "compilations"
        # The name tells g++ from clang, and exec leaves one process: the compiler.
        self.compiler = folder / f"logged-{Path(real[0]).resolve().name}"
        self.compiler.write_text(
            f'#!/bin/sh\necho $$ >> {self.log}\nexec {shlex.join(real)} "$@"\n'
        )
        self.compiler.chmod(0o755)
        self.environment = {**os.environ, "CXX": str(self.compiler), "FLASHBSR_QUIET": "0"}
        self.environment["FLASHBSR_CACHE_DIR"] = str(folder / "cache")
        self.environment["CCACHE_DISABLE"] = "1"  # where $CXX is one: compile each time
        self.arrays = np.random.default_rng(5).standard_normal((3, 7, 2, 16), np.float32)
        np.save(folder / "arrays.npy", self.arrays)
        self.command = [sys.executable, "-c", PROGRAM, str(folder / "arrays.npy")]
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        """A program in a process group of its own; its compiler has another."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            self.command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def go(self, *processes: subprocess.Popen[str]) -> None:
        """Let programs run that have come to the line before."""
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def compilations(self) -> list[int]:
        return [int(pid) for pid in self.log.read_text().split()] if self.log.exists() else []

    def wait_for_compiler(self, process: subprocess.Popen[str]) -> int:
        while not self.compilations():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        return self.compilations()[0]

    def check(self, process: subprocess.Popen[str]) -> tuple[str, int]:
        """The program's result is right; returns its bits, and its notices of compiling."""
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        q, k, v = self.arrays.astype(np.float64)
        weights = 1 / (1 + np.exp(-0.75 * np.einsum("ihd,jhd->hij", q, k) / 4)) - 0.25
        expected = np.einsum("hij,jhd->ihd", weights, v)
        got = np.frombuffer(bytes.fromhex(out), np.float32).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, atol=2e-6)
        return out, errors.count("compiling Wavy")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path / "cache"))
    here = Workplace(tmp_path)
    yield here
    for process in here.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_sixteen_processes_compile_once(workplace: Workplace) -> None:
    racing = [workplace.start() for _ in range(16)]
    workplace.go(*racing)
    results, notices = zip(*(workplace.check(process) for process in racing), strict=True)
    assert len(set(results)) == 1 and sum(notices) == 1
    assert len(workplace.compilations()) == 1
    assert len(cache.entries()) == 1


@pytest.mark.parametrize("whom", ["program", "program and compiler"])
def test_a_kill_while_the_compiler_works(workplace: Workplace, whom: str) -> None:
    victim, waiting = workplace.start(), workplace.start()
    workplace.go(victim)
    workplace.wait_for_compiler(victim)
    workplace.go(waiting)
    time.sleep(0.3)  # of the two seconds that it takes
    assert victim.poll() is None and waiting.poll() is None
    assert not cache.entries()
    if whom == "program":
        victim.kill()  # its compiler ends as well (test_jit_orphans.py)
    else:
        os.killpg(victim.pid, signal.SIGKILL)
    workplace.check(waiting)
    assert len(workplace.compilations()) == 2 and len(cache.entries()) == 1
    late = workplace.start()
    workplace.go(late)
    workplace.check(late)
    assert len(workplace.compilations()) == 2


def test_a_killed_compiler(workplace: Workplace) -> None:
    """As where memory runs out: its program says so, and the one after it compiles."""
    victim, late = workplace.start(), workplace.start()
    workplace.go(victim)
    os.kill(workplace.wait_for_compiler(victim), signal.SIGKILL)
    errors = victim.communicate(timeout=120)[1]
    assert victim.returncode == 1
    assert "FlashbsrError: CXX: got a compiler that was killed by signal 9" in errors
    assert str(workplace.compiler) in errors
    assert not cache.entries()
    workplace.go(late)
    workplace.check(late)
    assert len(workplace.compilations()) == 2
