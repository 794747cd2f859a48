# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Which tests run when nobody names them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from selection import LINE, LONG, TESTS, any_left_out, is_left_out, named


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHBSR_TEST_ALL", "FLASHBSR_TEST_CUDA"):
        monkeypatch.delenv(name, raising=False)


def test_what_is_long_exists() -> None:
    assert all((TESTS / name).exists() for name in LONG)


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        ("tests", False),
        ("tests/engine", False),
        ("tests/engine/test_isa.py", True),
        ("tests/engine/test_isa.py::test_matrix", True),
        ("tests/engine/test_plan.py", False),
    ],
)
def test_long_tests_run_where_they_are_named(asked: str, runs: bool) -> None:
    paths = named([asked], TESTS.parent)
    assert is_left_out(TESTS / "engine/test_isa.py", paths) == (not runs)
    assert not is_left_out(TESTS / "engine/test_plan.py", paths)


def test_all_run_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [TESTS]
    assert any_left_out(asked)
    monkeypatch.setenv("FLASHBSR_TEST_ALL", "1")
    assert not any_left_out(asked)
    assert not any(is_left_out(TESTS / name, asked) for name in LONG)


def test_nothing_is_left_out_of_what_has_nothing_long() -> None:
    assert not any_left_out([TESTS / "arrays"])
    assert not any_left_out([TESTS / "build"])


@pytest.mark.parametrize(("folder", "left_out"), [("flashinfer", True), ("jit", False)])
def test_a_run_says_so(folder: str, left_out: bool) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, f"tests/{folder}"], cwd=TESTS.parent, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (LINE in done.stdout) == left_out
    assert ("test_wrappers_fake_cuda" in done.stdout) is False
