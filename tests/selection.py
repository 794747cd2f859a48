# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What `pytest tests` leaves out, so that whoever installed the package has an answer in minutes.

Four fifths of the suite's time are tests of the project more than of a build on this machine: of
builds and compilers, of pages and programs, of other SIMD levels, on a stand-in for the driver.
They run where they are named, with FLASHBSR_TEST_ALL=1 (CI), and with FLASHBSR_TEST_CUDA=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent

#: Folders and files that take long.
LONG = (
    "bench", "build", "distributed", "docs", "examples", "helpers", "jit",
    "engine/test_fake_cuda.py", "engine/test_isa.py", "flashinfer/test_wrappers_fake_cuda.py",
    "variant/test_variant_source.py", "variant/test_variant_trace.py",
)  # fmt: skip

LINE = (
    "Left out: long tests (builds, pages, compilers, other SIMD levels). FLASHBSR_TEST_ALL=1 runs "
    "them too, for a quarter of an hour on two cores."
)


def runs_all() -> bool:
    """Whether the environment asks for every test."""
    return any(os.environ.get(name) for name in ("FLASHBSR_TEST_ALL", "FLASHBSR_TEST_CUDA"))


def named(args: Iterable[str], base: Path) -> list[Path]:
    """Paths of pytest's arguments, ``path::test``."""
    return [(base / arg.split("::")[0]).resolve() for arg in args]


def is_left_out(path: Path, asked: Iterable[Path]) -> bool:
    """Whether a file or folder is long, and nothing within the long ones was asked for by name."""
    for long in (TESTS / name for name in LONG):
        if path == long:
            return not runs_all() and not any(a == long or long in a.parents for a in asked)
    return False


def any_left_out(asked: list[Path]) -> bool:
    """Whether a run over these paths leaves something out."""
    longs = [TESTS / name for name in LONG]
    return any(is_left_out(long, asked) and any(a in long.parents for a in asked) for long in longs)
