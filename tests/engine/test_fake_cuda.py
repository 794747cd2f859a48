# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The host's side of the CUDA engine on a fake driver: no GPU needed, see fake_cuda/driver.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flashbsr import _core
from harness import framework
from toolchain import INCLUDE, compiler

TESTS = Path(__file__).resolve().parents[1]

torch = framework("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the fake libcuda.so.1 is."""
    if not _core.cuda_kernels():
        pytest.skip("this build has no CUDA kernels")
    sys.path.insert(0, str(TESTS))
    from fake_cuda import build

    path = tmp_path_factory.mktemp("fake_cuda")
    if build.build(path, compiler(), INCLUDE) is None:
        pytest.skip("no cuda.h: the toolkit that built the kernels is gone")
    return path


@pytest.mark.parametrize(
    ("files", "selection", "device"),
    [
        (["fake_cuda/host_path.py", "fake_cuda/captured_runs.py"], "", {}),
        (["fake_cuda/hopper_args.py"], "", {}),
        (["fake_cuda/kernel_cases.py"], "", {}),
        # What a plan chooses depends on how many there are: as on an H200.
        (["fake_cuda/kernel_cases.py"], "mixed", {"FAKE_CUDA_SMS": "132"}),
        (["fake_cuda/jit_kernels.py", "fake_cuda/jit_copies.py"], "", {}),
        (["fake_cuda/jit_other_gpu.py"], "", {"FAKE_CUDA_CAPABILITY": "89"}),
        # Some of the cases that a real GPU runs: layouts, variants, types, outputs.
        (["engine/test_attention.py"], "cuda and (mixed or positions or new_outputs or one_)", {}),
        (["test_float8_q.py"], "without_kernels or families", {}),
        (["flashinfer/test_sparse.py", "layout/test_block_mask.py"], "cuda or fa2", {}),
    ],
    ids=[
        "host path",
        "tensor maps",
        "every kernel",
        "mixed kernels, 132 SMs",
        "jit",
        "jit, other GPU",
        "cases",
        "float8 queries",
        "block-sparse",
    ],
)
def test_on_the_fake_driver(
    folder: Path, files: list[str], selection: str, device: dict[str, str]
) -> None:
    """Each in a process of its own: a driver is opened once."""
    environment = {
        **os.environ,
        "PYTEST_ADDOPTS": "",  # workers, perhaps: this one is
        **device,
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
