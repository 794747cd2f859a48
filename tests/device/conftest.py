# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU, for tests of device functions; skipped where there is none."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
from driver import Gpu
from harness import has_gpu, leave


@functools.cache
def _gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """The first device. FLASHBSR_TEST_CUDA=1 makes its absence an error, =0 leaves it alone."""
    wish = os.environ.get("FLASHBSR_TEST_CUDA", "")
    if wish == "0" or (wish != "1" and not has_gpu()):
        pytest.skip("no GPU")
    yield _gpu()
    if _gpu().lost:
        leave(request.node.nodeid, _gpu().lost)


@pytest.fixture
def hopper(gpu: Gpu) -> Gpu:
    """A device of the one architecture that runs sm_90a."""
    if gpu.capability != (9, 0):
        pytest.skip("not a GPU of compute capability 9.0")
    return gpu
