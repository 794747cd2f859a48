# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers on the fake driver: no GPU needed, see fake_cuda/driver.cpp."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda.build import driver_folder, run_tests
from harness import framework

__all__ = ["driver_folder"]  # a fixture

torch = framework("torch")


@pytest.mark.parametrize(
    ("file", "selection"),
    [("fake_cuda/captured_wrappers.py", ""), ("flashinfer/test_sparse.py", "cuda or fa2")],
    ids=["captured runs", "block-sparse"],
)
def test_on_the_fake_driver(driver_folder: Path, file: str, selection: str) -> None:
    run_tests(driver_folder, [file], selection)
