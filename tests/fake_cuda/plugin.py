# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""pytest -p fake_cuda.plugin: the fake GPU joins the devices of the suite."""

from __future__ import annotations

import harness
import pytest
from flashbsr.jit import cuda as jit_cuda

from fake_cuda import fake

DRIVER = fake.Driver()
TORCH = fake.FakeTorch()
harness.DEVICES[:] = [harness.CPU, fake.device(DRIVER, TORCH)]
# What the build leaves to NVRTC, with FLASHBSR_KERNELS=common rare rows of the table, too: a kernel
# is its name here.
jit_cuda.cuda_kernel = lambda *_: b"not empty"


@pytest.fixture
def driver() -> fake.Driver:
    """The fake driver."""
    return DRIVER


@pytest.fixture
def fake_torch() -> fake.FakeTorch:
    """The patch of PyTorch's adapter."""
    TORCH.current = 0
    TORCH.on_host.clear()
    TORCH.other.clear()
    return TORCH
