# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Captured calls, and a random walk over them, on a GPU; the same on the fake driver is in CI."""

from __future__ import annotations

import os
from typing import Any

import capture_cases
import captures
import flashbsr
import flashbsr.flashinfer as flashinfer
import numpy as np
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


def test_a_decode_step_of_32_layers() -> None:
    """Captured once: lengths move on and keys are written within the graph, 200 replays."""
    torch.manual_seed(0)
    layers, batch, heads, kv_heads, dim, page, width = 32, 4, 8, 2, 64, 16, 40
    device, half = torch.device("cuda"), torch.float16
    caches = torch.full(
        (layers, batch * width, 2, page, kv_heads, dim), torch.nan, dtype=half, device=device
    )
    tables = torch.randperm(batch * width, device=device).view(batch, width).to(torch.int32)
    lens = torch.tensor([1, 17, 300, 160], dtype=torch.int32, device=device)
    for row, n in zip(tables.tolist(), lens.tolist(), strict=True):
        for at in range(n):
            caches[:, row[at // page], :, at % page] = torch.randn(
                layers, 2, kv_heads, dim, dtype=half, device=device
            )
    q = torch.randn(layers, batch, heads, dim, dtype=half, device=device)
    new = torch.randn(layers, 2, batch, kv_heads, dim, dtype=half, device=device)
    out, slots = torch.empty_like(q), torch.empty(batch, dtype=torch.int64, device=device)
    task = flashbsr.TaskInfo(heads, kv_heads, dim, q_dtype="float16", kv_dtype="float16")
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    bounds = flashbsr.Bounds(None, np.full(batch, width * page), page_size=page)
    attention.settle(q, "q")
    attention.plan(bounds)

    def step() -> None:
        place = tables.long().gather(1, (lens // page).long()[:, None])[:, 0] * page
        slots.copy_(place + lens % page)
        lens.add_(1)
        new.mul_(-1)
        attention.update(lens, tables)
        for layer in range(layers):
            flashbsr.append_paged_kv_cache(
                *new[layer], paged_kv_cache=caches[layer], slot_mapping=slots
            )
            attention.run(q[layer], caches[layer], out=out[layer])

    held = lens.clone(), caches.clone(), new.clone()
    step()  # loads kernels
    for x, before in zip((lens, caches, new), held, strict=True):
        x.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for x, before in zip((lens, caches, new), held, strict=True):
        x.copy_(before)
    attention.plan(flashbsr.Bounds(None, np.full(batch, 7), page_size=page))  # of no concern
    for count in range(1, 201):
        graph.replay()
        layer, request = count % layers, count % batch
        n = int(lens[request])
        assert n == int(held[0][request]) + count
        rows = torch.arange(n, device=device)
        k, v = (
            caches[layer, tables[request].long()[rows // page], i, rows % page].double()
            for i in (0, 1)
        )
        assert torch.equal(k[-1], new[layer, 0, request].double())
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        weights = torch.softmax(
            torch.einsum("hd,khd->hk", q[layer, request].double(), k) * dim**-0.5, 1
        )
        want = torch.einsum("hk,khd->hd", weights, v)
        torch.testing.assert_close(out[layer, request].double(), want, atol=2e-3, rtol=2e-3)
