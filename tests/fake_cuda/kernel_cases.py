# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/sanitizer_cases.py leads to every attention kernel, as the fake driver's GPU chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flashbsr import Attention, _core
from flashbsr.jit import cuda as jit_cuda
from toolchain import load_tool

from fake_cuda.fake import Driver

CASES = load_tool("sanitizer_cases")
KERNELS = [k for k in CASES.reachable(_core.cuda_kernels(), 90) if k["rows"] is not None]
KERNELS += CASES.compiled()


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_problems_lead_to_the_kernel(
    driver: Driver, kernel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, paths = Attention.run, set()

    def drained(self: Attention, *arrays: Any, **options: Any) -> Any:
        result = run(self, *arrays, **options)
        driver.drain()
        paths.add(driver.path)
        return result

    def on_the_host(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.randn(shape).to(getattr(torch, dtype))

    monkeypatch.setattr(jit_cuda, "cuda_kernel", lambda *_: b"not empty")
    monkeypatch.setattr(Attention, "run", drained)
    monkeypatch.setattr(CASES, "normal", on_the_host)
    monkeypatch.setattr(CASES, "integers", lambda x: torch.from_numpy(np.asarray(x)))
    assert CASES.run_kernel(kernel) == []
    every = {"ragged", "paged", "gather"} if kernel["family"] in CASES.HOPPER else {"none"}
    expected = {"mixed": every - {"gather"}}
    gathers = ("mixed_gather", "latent_codes", "latent_packed", *CASES.FEW_LATENT)
    expected |= {family: {"gather"} for family in gathers}
    assert paths == expected.get(kernel["family"], every)
