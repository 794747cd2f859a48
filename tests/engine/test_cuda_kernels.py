# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batches lead to the kernels that are made for them. Numbers are other files' business."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
from cuda_world import DIM, HEADS, KV_HEADS, PAGE, WORLD, on_gpu, to_host
from harness import DEVICES, framework

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")


def test_mixed_batches_have_a_kernel() -> None:
    """On Hopper, where it pays or is asked for."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("family mixed is made of instructions that sm_90a alone has")
    attention = WORLD.attention(tile_rows=192)
    batch = WORLD.batch([700, 16, 1, 333, 900], [180, 1, 1, 2, 1])
    attention.plan(batch)
    out = attention.run(on_gpu(WORLD.q[:185]), on_gpu(WORLD.cache))
    assert attention.explain().kernel.startswith("mixed_sm90a")
    WORLD.check(to_host(out), batch, 185)


def test_mixed_batches_of_single_tokens_have_a_kernel() -> None:
    """Pages of one token, which the copy engine does not take: a kernel that gathers."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("family mixed_gather is made of instructions that sm_90a alone has")
    batch = WORLD.batch([704, 16, 320, 896], [180, 1, 2, 1])
    task = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cuda", tile_rows=128)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
    tokens = batch.kv_indices[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)
    attention.plan(
        dataclasses.replace(
            batch, kv_indptr=batch.kv_indptr * PAGE, kv_indices=tokens.ravel(), page_size=1
        )
    )
    k, v = (WORLD.cache[:, i].reshape(-1, 1, KV_HEADS, DIM) for i in range(2))
    out = attention.run(on_gpu(WORLD.q[:184]), (on_gpu(k), on_gpu(v)))
    assert attention.explain().kernel.startswith("mixed_gather_")
    WORLD.check(to_host(out), batch, 184)


@pytest.mark.parametrize("accumulation", ["default", "fast"])
def test_long_sums_have_a_kernel(accumulation: str) -> None:
    """float8 throughout: that the other files' cases with "fast" reach it is what this shows."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("products of float8 are instructions of sm_90a here")
    q, k, v = (torch.randn(300, 4, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
    task = flashbsr.TaskInfo(4, 4, 128, fp8_accumulation=accumulation)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    attention.plan(flashbsr.Ragged([0, 300], [0, 300]))
    attention.run(q, (k, v))
    family = "hopper_fast" if accumulation == "fast" else "hopper"
    assert attention.explain().kernel == f"{family}_sm90a_d128_e4m3_r192_plain"


def test_mixed_kernels_side_by_side() -> None:
    """Blocks of two such kernels cannot be on an SM together: some finish before others begin, and
    merges, which any block may make, must neither wait for those nor be left behind."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("family mixed is made of instructions that sm_90a alone has")
    prefix = np.arange(400, dtype=np.int32)
    pages = [np.append(prefix, 400 + i).astype(np.int32) for i in range(64)]
    batch = flashbsr.Paged(
        None,
        np.arange(65, dtype=np.int32) * 401,
        np.concatenate(pages),
        kv_lens=np.full(64, 401 * PAGE, np.int32) - np.arange(64, dtype=np.int32) % PAGE,
        page_size=PAGE,
    )
    q, cache = on_gpu(WORLD.q[:64]), on_gpu(WORLD.cache)
    objects = [WORLD.attention() for _ in range(3)]
    for attention in objects:
        attention.plan(batch)
        assert attention.explain().kernel.startswith("mixed_")
    want = objects[0].run(q, cache)
    WORLD.check(to_host(want), batch, 64)
    streams = [torch.cuda.Stream() for _ in objects]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for attention, stream in zip(objects, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(attention.run(q, cache))
    torch.cuda.synchronize()
    for out in results:
        assert torch.equal(out, want)


@pytest.mark.parametrize("lens", [(3000, 200, 3000), (8000,), (2000,) * 20], ids=str)
def test_latent_kernels_side_by_side(lens: tuple[int, ...]) -> None:
    """Blocks that merge shares of their own tile wait for each other, but for none that has no SM.

    Others hold SMs for very different times, so that some blocks may be done before others begin,
    and leave their shares to the last. On GPUs without these kernels there is nothing to see.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these merges are of kernels of sm_90a")
    q = torch.randn(64, 128, 576, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(2048, 64, 576, dtype=torch.bfloat16, device="cuda")

    def engine(kv_lens: tuple[int, ...], **capacity: int) -> Any:
        latent: dict[str, Any] = {"head_dim_vo": 512, "latent": True, "q_dtype": "bfloat16"}
        task = flashbsr.TaskInfo(128, 1, 576, **latent, **capacity)
        attention = flashbsr.Attention(flashbsr.AttentionSpec(sm_scale=0.05), task)
        width = -(-max(kv_lens) // 64)
        tables = np.arange(len(kv_lens) * width, dtype=np.int32).reshape(-1, width) % 2048
        layout = flashbsr.BlockTable(None, on_gpu(tables), np.array(kv_lens), page_size=64)
        attention.plan(layout, share_prefixes="off")
        return attention

    # With a capacity no cut is one of clusters, whose blocks begin together.
    ours = engine(lens, max_batch_size=32, max_q_tokens=32, max_kv_pages=4096)
    others = engine((20000, 500) * 8 + (64,) * 40)
    items, merges = ours.plan_info.header.num_items, ours.plan_info.header.num_merges
    assert merges > 0 and items <= torch.cuda.get_device_properties(0).multi_processor_count
    rows = q[: len(lens)]
    want = ours.run(rows, cache)
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(busy):
            others.run(q[:56], cache)
        with torch.cuda.stream(stream):
            results.append(ours.run(rows, cache))
    torch.cuda.synchronize()
    for out in results:
        assert torch.equal(out, want)


# --- kinds of arrays
