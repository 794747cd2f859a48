# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Latent attention of vLLM's steps and CUDA graphs, on the fake driver. test_fake_cuda.py runs it.

What chooses tokens is PyTorch's, which the fake driver does not capture: those replays need a GPU
(tests/integrations/test_vllm_latent.py), as does the cache's update.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import latent_world
import ml_dtypes
import numpy as np
import pytest
from flashbsr.jit import cuda as jit_cuda
from latent_world import LATENT

from fake_cuda.fake import Driver, FakeTorch

pytestmark = pytest.mark.usefixtures("fake_torch")


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of float16 are compiled when they are first used; the fake driver reads none."""
    monkeypatch.setattr(jit_cuda, "cuda_kernel", lambda *_: b"not empty")


def write(serving: Any, x: Any, slots: Any) -> None:
    """Write new tokens on the host, of which some pad the step."""
    new, cache, at = x.numpy(), serving.cache.numpy(), slots.numpy()
    if serving.kv == "fp8_ds_mla":
        parts = new[:, :LATENT], new[:, LATENT:]
        flashbsr.append_packed_latents(*parts, cache=cache, slot_mapping=at)
        return
    rows = new.astype(np.float64)
    if serving.kv == "fp8":
        cache = cache.view(ml_dtypes.float8_e4m3fn)
        rows = rows / serving.owner._k_scale_float
    for row, slot in zip(rows, at, strict=True):
        if slot >= 0:
            cache[slot // serving.block, slot % serving.block] = row.astype(cache.dtype)


def on_host(driver: Driver, serving: Any) -> Any:
    """Write on the host, and let the layer's run finish, which is read there at once."""
    forward = serving.forward

    def finished(q: Any, step: Any) -> Any:
        result = forward(q, step)
        driver.drain()
        return result

    serving.forward = finished
    serving.write = lambda x, slots: write(serving, x, slots)
    return serving


@pytest.mark.parametrize("topk", [0, 40])
@pytest.mark.parametrize(
    ("kv", "family"),
    [("auto", "latent"), ("fp8", "latent_mma"), ("fp8_ds_mla", "latent_mma_packed")],
)
def test_steps_of_a_server(
    driver: Driver, fake_torch: FakeTorch, kv: str, family: str, topk: int
) -> None:
    fake_torch.current = stream = driver.stream()
    options = {"dtype": "float16", "kv": kv, "topk": topk, "gpu": True, "stream": stream}
    serving = on_host(driver, latent_world.Serving(**options))
    kernels = set()
    for q_lens in ([5, 59, 0], [1, 64, 2], [1, 4, 20], [1, 1, 1], [2, 2, 2], [0, 3, 0]):
        serving.step(q_lens)
        kernels.add(driver.kernel.partition("_sm90")[0])
    assert kernels == {family}  # nothing follows: all rows are there


@pytest.mark.parametrize("drafts", [False, True])
def test_ranks_that_share_tokens(driver: Driver, fake_torch: FakeTorch, drafts: bool) -> None:
    fake_torch.current = stream = driver.stream()
    where = {"dtype": "float16", "gpu": True, "stream": stream, "drafts": drafts}
    ranks = latent_world.ranks(latent_world.Serving, 2, 16, **where)
    for q_lens in ([5, 59, 0], [1, 64, 2], [1, 4, 20], [1, 1, 1], [2, 2, 2], [0, 3, 0]):
        found, steps = [], []
        for serving in ranks:
            x, slots = serving.grow(q_lens)
            steps.append(serving.plan(q_lens, slots))
            write(serving, x, slots)
            q = serving.rows(sum(q_lens), serving.heads)
            found.append(serving.attend(steps[-1], q))
            driver.drain()
        serving.check(latent_world.merged(found, steps), q, q_lens, None)


def test_decode_steps_of_ranks_are_replayed(driver: Driver, fake_torch: FakeTorch) -> None:
    """Lengths and blocks of rows are told before a replay, outside of the graph or in it."""
    fake_torch.current = stream = driver.stream()
    where = {"dtype": "float16", "gpu": True, "stream": stream}
    ranks = latent_world.ranks(latent_world.Captured, 2, 16, **where)
    graphs, outs = [], []
    for serving in ranks:
        serving.write = lambda x, slots, serving=serving: write(serving, x, slots)
        serving.prefill([5, 100, 17])
        step, *_ = serving.prepare(3)
        assert step.step.captured
        serving.work(step)
        with driver.capture(stream) as graph:
            outs.append(serving.forward(serving.q, step))
        graphs.append(graph)
        driver.drain()
    for requests in latent_world.REPLAYS:
        steps = []
        for serving, graph, out in zip(ranks, graphs, outs, strict=True):
            step, *expected = serving.prepare(requests)
            steps.append(step)
            serving.write(serving.x, serving.slots)
            driver.synchronize(stream)
            out[0].fill_(float("nan"))
            driver.replay(graph, stream)
            driver.synchronize(stream)
        serving.replayed(latent_world.merged(outs, steps), requests, *expected)


@pytest.mark.parametrize("kv", ["auto", "fp8", "fp8_ds_mla"])
def test_decode_steps_are_replayed(driver: Driver, fake_torch: FakeTorch, kv: str) -> None:
    """Growing lengths, fewer requests than the graph has."""
    fake_torch.current = stream = driver.stream()
    serving = latent_world.Captured(dtype="float16", kv=kv, gpu=True, stream=stream)
    serving.write = lambda x, slots: write(serving, x, slots)  # type: ignore[method-assign]
    serving.prefill([5, 100, 17])
    step, *_ = serving.prepare(3)
    assert step.step.captured
    serving.work(step)
    with driver.capture(stream) as graph:
        out = serving.forward(serving.q, step)
    driver.drain()
    for requests in latent_world.REPLAYS:
        _, *expected = serving.prepare(requests)
        serving.write(serving.x, serving.slots)
        driver.synchronize(stream)
        out.fill_(float("nan"))
        driver.replay(graph, stream)
        driver.synchronize(stream)
        serving.replayed(out, requests, *expected)
