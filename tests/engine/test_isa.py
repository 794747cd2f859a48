# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""One binary, several instruction sets: each level that this machine has gives right results.

The level is fixed when the module is loaded, so each runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path

import flashbsr
import matrix
from compare import MismatchError, assert_attention
from harness import CPU

HERE = Path(__file__).parents[1]
LEVELS = list(flashbsr._core.isa_levels())
SCRIPT = """
import pickle, sys
sys.path.insert(0, {here!r})
import flashbsr, matrix
from harness import results_of
assert flashbsr._core.isa() == {level!r}, flashbsr._core.isa()
with open({path!r}, "wb") as file:
    for case in matrix.matrix():
        problem, out, lse = results_of(case)
        pickle.dump((problem.kernel, out, lse), file)
"""


def run(level: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "FLASHBSR_ISA": level, "OPENBLAS_NUM_THREADS": "1"},
    )


def test_matrix(tmp_path: Path) -> None:
    """Every case on every level beside one reference, which takes longer than all of them.

    At the level in use the matrix is in test_attention.py.
    """
    others = [level for level in LEVELS if level != flashbsr._core.isa()]
    for level in others:
        script = SCRIPT.format(here=str(HERE), level=level, path=str(tmp_path / level))
        result = run(level, script)
        assert result.returncode == 0, result.stdout + result.stderr
    with contextlib.ExitStack() as stack:
        files = {level: stack.enter_context((tmp_path / level).open("rb")) for level in others}
        failed = []
        for case in matrix.matrix():
            problem = CPU.build(case)
            references = problem.reference(), problem.reference(case.work)
            for level, file in files.items():
                kernel, out, lse = pickle.load(file)
                try:
                    assert_attention(out, lse, *references, case.work, case.name, kernel)
                except MismatchError as error:
                    failed.append(f"{level}: {error}")
        assert all(not file.read(1) for file in files.values())
    assert not failed, "\n".join(failed)


def test_levels_of_this_machine() -> None:
    """There is always a portable level, and on x86 one for each set that the CPU reports."""
    if platform.machine() == "x86_64":
        flags = (
            set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
            if sys.platform == ("linux")
            else set()
        )
        assert LEVELS[0] == "baseline"
        if {"avx2", "fma", "f16c"} <= flags:
            assert "avx2" in LEVELS
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            assert "avx512" in LEVELS
        if "avx512_bf16" in flags:
            assert "avx512_bf16" in LEVELS
        if {"avx512_bf16", "amx_tile", "amx_int8"} <= flags and sys.platform == "linux":
            assert "avx512_amx" in LEVELS
    assert len(set(LEVELS)) == len(LEVELS) >= 1


def test_default_is_the_best_level() -> None:
    script = "import flashbsr; print(flashbsr._core.isa())"
    env = {name: value for name, value in os.environ.items() if name != "FLASHBSR_ISA"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    assert result.stdout.strip() == LEVELS[-1]


def test_unknown_level_is_refused() -> None:
    """A misspelt level does not quietly run another one."""
    script = (
        "import numpy as np, flashbsr\n"
        "x = np.ones((1, 1, 1, 8), np.float32)\n"
        "flashbsr.attention(x, x, x)"
    )
    result = run("avx9000", script)
    assert result.returncode == 1
    assert "FLASHBSR_ISA" in result.stderr
    assert "avx9000" in result.stderr
