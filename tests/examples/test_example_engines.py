# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""examples/engines, where the engine is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "engines"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_generates_the_same_tokens() -> None:
    """Two processes that load a model each: a minute on two cores."""
    small = ["--requests", "3", "--tokens", "8", "--layers", "2", "--hidden", "256"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "vllm_generate.py"), *small],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"24 of 24 tokens are equal up to a tie; 0 requests", done.stdout)
