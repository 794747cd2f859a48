# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The last line of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from closing import closing_line

TESTS = Path(__file__).resolve().parent

SKIPS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_gpu(i):
    pytest.skip("needs a GPU")

def test_torch():
    pytest.importorskip("torch_that_is_not_there")

def test_passes():
    pass
"""


def test_reasons_are_grouped() -> None:
    reasons = ["Skipped: needs a GPU"] * 3 + ["Skipped: could not import 'torch'", "because"]
    assert closing_line(reasons) == (
        "5 skipped: 3 for want of a GPU, 1 for want of PyTorch, 1 for want of what this machine is "
        "not. That is fine: what this machine can run was run."
    )
    assert closing_line([]) == ""


def test_a_run_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "4 skipped: 3 for want of a GPU, 1 for want of PyTorch. That is fine" in text
    assert "1 passed, 4 skipped" in text
