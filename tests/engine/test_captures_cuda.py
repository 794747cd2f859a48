# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Captured calls, and a random walk over them, on a GPU; the same on the fake driver is in CI."""

from __future__ import annotations

import os
from typing import Any

import capture_cases
import captures
import flashbsr.flashinfer as flashinfer
import pytest
from gpu_rig import GpuRig
from harness import DEVICES, framework

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")
STEPS = int(os.environ.get("FLASHBSR_CAPTURE_STEPS", "2000"))


@pytest.fixture
def rig() -> GpuRig:
    return GpuRig()


@pytest.mark.parametrize("name", capture_cases.FUNCTIONS)
@pytest.mark.parametrize("case", capture_cases.OF_FUNCTIONS, ids=lambda case: case.__name__)
def test_functions(rig: GpuRig, case: Any, name: str) -> None:
    case(rig, name)


@pytest.mark.parametrize("case", capture_cases.OF_WRAPPERS, ids=lambda case: case.__name__)
def test_wrappers(rig: GpuRig, case: Any) -> None:
    case(rig)


@pytest.mark.parametrize("seed", range(2))
def test_a_replay_computes_what_the_model_says(rig: GpuRig, seed: int) -> None:
    walk = captures.Walk(rig, seed)
    for _ in range(STEPS // 2):
        walk.step()
    walk.finish()


@pytest.mark.filterwarnings("default")  # PyTorch's own, while it compiles
def test_reduce_overhead_with_two_lengths() -> None:
    """Defect 3: torch.compile captures the call again for every length."""

    @torch.library.custom_op("flashbsr_test::decode", mutates_args=())
    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashinfer.single_decode_with_kv_cache(q, k, v)

    @decode.register_fake
    def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q)

    @torch.compile(mode="reduce-overhead", dynamic=False)
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return decode(q * 2, k, v) + 1

    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 64, device="cuda").half() for n in (4, 2 * 512, 2 * 512))
    k, v = k.view(512, 2, 64), v.view(512, 2, 64)
    with torch.inference_mode():
        for _ in range(4):
            for keys in (256, 100, 512):
                torch.compiler.cudagraph_mark_step_begin()
                got = layer(q, k[:keys], v[:keys])
                want = torch.nn.functional.scaled_dot_product_attention(
                    (q * 2).view(1, 4, 1, 64).double(),
                    k[:keys].repeat_interleave(2, 1).transpose(0, 1)[None].double(),
                    v[:keys].repeat_interleave(2, 1).transpose(0, 1)[None].double(),
                )
                torch.testing.assert_close(got.double(), want.view(4, 64) + 1, atol=2e-3, rtol=2e-3)
