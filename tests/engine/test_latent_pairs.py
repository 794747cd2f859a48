# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention in pairs of row tiles, whose blocks load KV for each other on a GPU."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from compare import assert_attention
from harness import Device
from latents import LATENT, SCALE, answer, dtype_of, engine, make, reference_name
from reference import Variant

CAUSAL = Variant(sm_scale=SCALE, causal=True)
_SHORT = tuple(int(n) for n in np.random.default_rng(3).integers(1, 400, 59))
# Query and KV lengths, heads, and options of the task.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "whole": ((1,) * 64, (300,) * 64, 128, {}),
    "lengths": ((1,) * 61, (*_SHORT, 0, 64), 128, {}),
    "fixed parts": ((1,) * 5, (700, 1, 0, 128, 129), 128, {"fixed_split_size": 128}),
    "two tokens": ((2,) * 40, (200,) * 40, 128, {}),
    "three tokens": ((3,) * 30, (130,) * 30, 128, {}),
    "four tokens": ((4, 2), (300, 129), 128, {"fixed_split_size": 64}),
}
# Those whose row tiles see different KV, or are alone.
ALONE: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, dict[str, Any]]] = {
    "one tile": ((1,) * 64, (300,) * 64, 64, {}),
    "an odd one": ((1, 3), (300, 129), 64, {"fixed_split_size": 64}),
    "tokens apart": ((2,) * 64, (193,) * 64, 64, {"fixed_split_size": 64}),
}


def run(device: Device, name: str, spec: dict[str, Any], page_size: int) -> bool:
    """Compare with float64 and with a plan without pairs; whether there were some."""
    q_lens, kv_lens, heads, task = {**CASES, **ALONE}[name]
    b = make(q_lens, kv_lens, heads, dtype_of(device), page_size)
    q, cache = device.put(b.q), device.put(b.cache)
    states, plans = [], []
    for workers in (None, None, 132):
        attention = engine(device, heads, spec, **task, num_workers=workers)
        attention.plan(b.layout(page_size))
        plans.append(attention.plan_info)
        out, lse = attention.run(q, cache, return_lse=True)
        states.append((device.get(out), device.get(lse)))
    assert not plans[2].paired
    variant, work = Variant(sm_scale=SCALE, **spec), reference_name(b.q)
    exact, working = answer(b, variant, None, LATENT), answer(b, variant, work, LATENT)
    assert_attention(*states[0], exact, working, work, "latent")
    for (out, lse), plan in zip(states[1:], plans[1:], strict=True):
        if plan.header.kv_chunk != plans[0].header.kv_chunk:
            continue  # cut otherwise
        assert out.tobytes() == states[0][0].tobytes()
        assert lse.tobytes() == states[0][1].tobytes()
    return plans[0].paired


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_pairs(name: str, page_size: int, device: Device) -> None:
    assert run(device, name, {"causal": True}, page_size) == (device.backend == "cuda")


@pytest.mark.parametrize("name", ["lengths", "four tokens"])
@pytest.mark.parametrize("spec", [{"logits_soft_cap": 20.0}, {"causal": True, "window_left": 70}])
def test_options(name: str, spec: dict[str, Any], device: Device) -> None:
    run(device, name, spec, 64)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", ALONE)
def test_without_pairs(name: str, page_size: int, device: Device) -> None:
    assert not run(device, name, {"causal": True}, page_size)


def test_pages_that_boxes_do_not_serve(device: Device) -> None:
    assert not run(device, "whole", {"causal": True}, 1)


@pytest.mark.parametrize(("tokens", "heads", "paired"), [(1, 128, True), (2, 64, False)])
def test_lengths_that_come_later(tokens: int, heads: int, paired: bool, device: Device) -> None:
    """Some are as long as their bounds, some empty; twice, the second time other ones."""
    bounds = np.full(64, 300, np.int32)
    late = engine(device, heads, {"causal": True})
    queries = np.arange(65, dtype=np.int32) * tokens
    late.plan(flashbsr.Bounds(queries, bounds, page_size=64))
    assert late.plan_info.paired == (paired and device.backend == "cuda")
    for seed in (0, 1):
        lens = np.random.default_rng(seed).integers(tokens, 301, 64)
        lens[:3] = 0, 300, tokens
        b = make((tokens,) * 64, tuple(map(int, lens)), heads, dtype_of(device), seed=seed)
        out, lse = late.run(
            device.put(b.q), device.put(b.cache), return_lse=True, kv_lens=device.put(b.kv_lens),
            block_tables=device.put(b.table()),
        )  # fmt: skip
        work = reference_name(b.q)
        exact, working = (answer(b, CAUSAL, name, LATENT) for name in (None, work))
        assert_attention(device.get(out), device.get(lse), exact, working, work, "latent")
