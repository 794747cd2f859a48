# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the fake driver and runs tests on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from flashbsr import _core
from toolchain import INCLUDE, compiler

TESTS = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).with_name("driver.cpp")


def build(folder: Path, compiler: str, include: Path) -> Path | None:
    """Compile ``libcuda.so.1`` into `folder`; None without the toolkit's ``cuda.h``."""
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parent.parent] if nvcc else []
    roots.append(Path("/usr/local/cuda"))
    toolkit = next((r / "include" for r in roots if (r / "include/cuda.h").exists()), None)
    if toolkit is None:
        return None
    library = folder / "libcuda.so.1"
    command = [
        compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", f"-I{include}",
        f"-isystem{toolkit}", str(SOURCE), "-o", str(library), "-lpthread",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake libcuda.so.1 is."""
    if not _core.cuda_kernels():
        pytest.skip("this build has no CUDA kernels")
    path = tmp_path_factory.mktemp("fake_cuda")
    if build(path, compiler(), INCLUDE) is None:
        pytest.skip("no cuda.h: the toolkit that built the kernels is gone")
    return path


def run_tests(
    folder: Path, files: list[str], selection: str, device: Mapping[str, str] | None = None
) -> None:
    """Tests of files below tests/, in a process of their own: a driver is opened once."""
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": "",  # workers, perhaps: this one is
        **(device or {}),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "fake_cuda.plugin", "-p", "no:cacheprovider",
        *(str(TESTS / f) for f in files), "-k", selection,
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
