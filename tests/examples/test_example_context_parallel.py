# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""examples/context_parallel, as users run it: ranks have what they should, and agree with one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "context_parallel"


def run(name: str, *args: str) -> str:
    path = EXAMPLES / f"{name}.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, str(path), *args],
        capture_output=True, text=True, check=False, env=environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="process groups are PyTorch's")
@pytest.mark.parametrize(
    ("ranks", "interleave", "has"),
    [(2, 16, [[354, 23, 128], [352, 16, 128]]), (4, 1, [[177, 10, 64], [177, 10, 64]])],
)
def test_processes(ranks: int, interleave: int, has: list[list[int]]) -> None:
    text = run("torch", f"--ranks={ranks}", f"--interleave={interleave}")
    lines = text.splitlines()
    assert lines[-1] == "as one process has it" and len(lines) == ranks + 2
    for line, lens in zip(lines[1:], has, strict=False):
        assert f"has {lens} keys" in line
        sent = {
            name: float(x) for name, x in re.findall(r"([a-z]\w+(?: \w+)?) (\d+\.\d)[,;]", line)
        }
        assert sent["decode"] > 0 and sent["prefill"] > 0


def has_shard_map() -> bool:
    """JAX has it since 0.7."""
    if find_spec("jax") is None:
        return False
    return tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) >= (0, 7)


@pytest.mark.skipif(not has_shard_map(), reason="no jax.shard_map")
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 4), (4, 16)])
def test_devices(ranks: int, interleave: int) -> None:
    lines = run("jax", f"--ranks={ranks}", f"--interleave={interleave}").splitlines()
    assert lines[-1] == "as one device would have it" and len(lines) == ranks + 3
    held = [json.loads(re.search(r"\[.*\]", line)[0]) for line in lines[1 : ranks + 1]]
    assert [sum(x) for x in zip(*held, strict=True)] == [100, 40, 41]
