# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""examples/engines/transformers_generate.py, where transformers is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "engines" / "transformers_generate.py"


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_same_tokens() -> None:
    small = ["--requests", "3", "--tokens", "8", "--layers", "2", "--longest", "60"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *small], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("24 of 24 tokens are equal up to a tie; 0 differ") == 2
