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


# What needs kernels around attention, which the fake driver has not.
WITHOUT = "merged prefix append rope masks multi_item capabilities"
PORTED = f"cuda and not ({' or '.join(WITHOUT.split())})"


@pytest.mark.parametrize(
    ("file", "selection"),
    [
        ("fake_cuda/captured_wrappers.py", ""),
        ("flashinfer/test_sparse.py", "cuda or fa2"),
        ("flashinfer/test_port_wrappers.py", PORTED),
        ("flashinfer/test_port_programs.py", PORTED),
        ("flashinfer/test_port_functions.py", PORTED),
    ],
    ids=["captured runs", "block-sparse", "ported wrappers", "ported programs", "ported functions"],
)
def test_on_the_fake_driver(driver_folder: Path, file: str, selection: str) -> None:
    run_tests(driver_folder, [file], selection)
