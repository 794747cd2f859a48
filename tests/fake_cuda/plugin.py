# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""pytest -p fake_cuda.plugin: the fake GPU joins the devices of the suite."""

from __future__ import annotations

import harness
import pytest

from fake_cuda import fake

DRIVER = fake.Driver()
TORCH = fake.FakeTorch()
harness.DEVICES[:] = [harness.CPU, fake.device(DRIVER, TORCH)]


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
