# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the Python tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# The reference's many small products are slower on OpenBLAS's threads than on one; NumPy reads this
# when it is imported. The engine has its own threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# JAX takes three quarters of a GPU's free memory at its first array, in each of xdist's processes.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import numpy as np
import pytest
from closing import closing_line
from harness import DEVICES, Device
from selection import LINE, any_left_out, is_left_out, named

# The suite says the same thing twice; `--hypothesis-profile=explore` searches.
hypothesis.settings.register_profile(
    "suite", max_examples=60, deadline=None, derandomize=True, database=None
)
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(params=DEVICES, ids=lambda device: device.name)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each backend's device."""
    yield from request.param.lend(request.node.nodeid)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run."""
    return np.random.default_rng(2026)


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for the module: a variant is compiled once, whatever was cached before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("FLASHBSR_QUIET", "1")
        yield


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what takes long, unless it was asked for."""
    asked = named(config.args, config.invocation_params.dir)
    return True if is_left_out(collection_path, asked) else None


def pytest_collection_finish() -> None:
    """Have the collector pass over what is there before the first test: modules, and the tests.

    A test that collects garbage 127 times, as benchmarks do, took 55 s in a run of all tests.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was left out, what was skipped, and why that is fine."""
    if any_left_out(named(config.args, config.invocation_params.dir)):
        terminalreporter.write_line(LINE)
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] if isinstance(r.longrepr, tuple) else "" for r in reports]
    if line := closing_line(reasons):
        terminalreporter.write_line(line)
