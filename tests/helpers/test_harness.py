# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The tests' own machinery: arrays on a device are what they were on the host, and as hostile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import harness
import matrix
import numpy as np
import pytest
import torch_device
from cases import F32, FP8, Case
from compare import MismatchError
from harness import CPU, Device, assert_poison_survived, framework
from reference import DTYPES, Variant

torch = framework("torch")
# PyTorch's CPU stands in for a GPU: `put`, `get` and `adapt` are those of CUDA.
STAND_IN = Device(
    "stand-in", "cpu", torch_device.putter(torch, "cpu"), torch_device.getter(torch),
    torch_device.adapt,
)  # fmt: skip
TYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 2, 8), (5, 1, 40), (1, 1, 8), (2, 2, 3, 2, 24), (0, 2, 16)])
def test_there_and_back(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """The same values in rows on 16 bytes and no more, inside poison that survives."""
    x = cases.strided(rng.standard_normal(shape).astype(DTYPES[dtype]), dtype)
    sent = STAND_IN.put(x)
    assert tuple(sent.shape) == shape
    assert sent.data_ptr() % 32 == 16 or not x.size
    assert all(stride * x.itemsize % 16 == 0 for stride in sent.stride()[:-1])
    assert sent.stride()[-1] == 1
    back = STAND_IN.get(sent)
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)
    assert back.base.nbytes > x.nbytes
    assert_poison_survived(back, "untouched")


def test_memory_order_and_zero_strides_stay() -> None:
    cache = cases.strided(np.zeros((4, 3, 2, 16), np.float32).swapaxes(1, 2), "float32")
    assert STAND_IN.put(cache.swapaxes(1, 2)).stride()[1] < STAND_IN.put(cache).stride()[1]
    one_head = np.broadcast_to(np.ones((3, 1, 8), np.float16), (3, 5, 8))
    sent = STAND_IN.put(one_head)
    assert sent.stride()[1] == 0
    np.testing.assert_array_equal(STAND_IN.get(sent), one_head)
    contiguous = STAND_IN.put(np.zeros((3, 2, 16), np.float16))
    assert contiguous.is_contiguous()
    with pytest.raises(ValueError, match="negative"):
        STAND_IN.put(np.zeros((3, 2, 8), np.float32)[::-1])


@pytest.mark.parametrize("device", [CPU, STAND_IN], ids=["cpu", "stand-in"])
def test_writes_around_an_output_are_seen(device: Device) -> None:
    out = device.put(cases.strided(np.zeros((3, 2, 8), np.float16), "float16"))
    assert_poison_survived(device.get(out), "good")
    seen = device.get(out)
    memory = seen.base.reshape(-1).view(np.float16)
    for at in np.flatnonzero(np.isnan(memory)):
        memory[at] = 0
        with pytest.raises(MismatchError, match="written outside"):
            assert_poison_survived(seen, "bad")
        memory[at] = np.nan


def test_adapt() -> None:
    """float32 is gone but where it was asked for, RoPE has a kernel's head dim, no threads."""
    names = set()
    for case in matrix.matrix():
        q, kv, o = torch_device.adapt(case).dtypes
        assert "float32" not in (q, kv)
        assert kv.startswith("float8") or kv == q
        assert (o == "float32") == (case.dtypes[2] == "float32" and case.dtypes[0] != "float32")
        names.add(q)
        assert torch_device.adapt(torch_device.adapt(case)) == torch_device.adapt(case)
    assert names == {"float16", "bfloat16"}
    fp8 = Case("fp8", (1,), (1,), dims=(64, 128), dtypes=FP8)
    kept = torch_device.adapt(fp8, float8_q_dims=(128,))
    assert (kept.dtypes, kept.dims, kept.work) == (FP8, (128, 128), "float8_e4m3fn")
    large = torch_device.adapt(fp8.but("large", dims=(256, 256)), float8_q_dims=(128,))
    assert large.dtypes[0] == large.work == "bfloat16"
    rope = Case("rope", (1,), (1,), dims=(40, 80), variant=Variant(pos_encoding_mode="ROPE_LLAMA"))
    assert torch_device.adapt(rope).dims == (128, 80)
    threads = Case("threads", (1,), (1,), dtypes=F32, task={"num_threads": 3, "num_workers": 2})
    assert torch_device.adapt(threads).task == {"num_workers": 2}


@pytest.mark.parametrize("case", matrix.matrix()[::7], ids=lambda case: case.name)
def test_cases_run_as_on_a_device(case: Case) -> None:
    harness.check_case(case, STAND_IN)


@pytest.mark.parametrize("wish", ["", "0", "1"])
def test_cuda_can_be_refused_and_demanded(wish: str) -> None:
    if any(device.is_cuda for device in harness.DEVICES):
        pytest.skip("there is a GPU")
    environment: dict[str, Any] = {**os.environ, "FLASHBSR_TEST_CUDA": wish}
    done = subprocess.run(
        [sys.executable, "-c", "import harness; assert harness.DEVICES == [harness.CPU]"],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == (wish == "1")
    if wish == "1":
        assert "PyTorch sees no GPU" in done.stderr or "built without CUDA" in done.stderr
