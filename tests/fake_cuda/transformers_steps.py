# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of transformers over a static cache, on the fake driver. test_fake_cuda.py runs this file.

What a compiled program does: a step runs once as it is, is captured, and its graph is replayed for
all later steps. What PyTorch computes of a mask, lists of slots, is written here into the memory
that the graph reads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashbsr.engine.planning import Planned
from flashbsr.integrations.transformers import masks, steps
from flashbsr.integrations.transformers.dense import attention
from transformers.masking_utils import causal_mask_function

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.vllm_steps import captures_are_seen, capturing
from fake_cuda.world import DIM, HEADS, KV_HEADS

__all__ = ["captures_are_seen"]  # a fixture
pytestmark = pytest.mark.usefixtures("fake_torch")

ROWS, SLOTS = 3, 40
WORK = "cuMemcpyHtoDAsync", "cuMemAlloc", "cuMemFree"
LAYER = SimpleNamespace(is_causal=True, training=False, layer_idx=0)


class Cache:
    """K and V of two layers, and the queries of a step."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(ROWS, HEADS, 1, DIM, generator=random).half()
        made = torch.randn(2, 2, ROWS, KV_HEADS, SLOTS, DIM, generator=random).half()
        self.layers = [(layer[0], layer[1]) for layer in made]
        self.pitch = KV_HEADS * SLOTS
        self.shape = steps.Shape(
            ROWS, SLOTS, (HEADS, KV_HEADS), (DIM, DIM), ("float16", "float16"), 0.3, None, None
        )

    def expected(self, layer: int, seen: torch.Tensor) -> torch.Tensor:
        """Attention of a layer in float32, ``(B, 1, H_q, D)``."""
        k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, 1) for x in self.layers[layer])
        logits = 0.3 * self.q.float() @ k.mT
        weights = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2)

    def check(self, outs: list[torch.Tensor], seen: torch.Tensor) -> None:
        for layer, out in enumerate(outs):
            torch.testing.assert_close(
                out.float(), self.expected(layer, seen), atol=2e-3, rtol=2e-3
            )


def seen_at(last: int, begins: tuple[int, ...] = (0, 7, 20), *holes: int) -> torch.Tensor:
    """Slots that queries at `last` see, ``(B, S)``."""
    slot = torch.arange(SLOTS)
    seen = (slot >= torch.tensor(begins)[:, None]) & (slot <= last)
    seen[0, list(holes)] = False
    return seen


def mask_of(seen: torch.Tensor) -> torch.Tensor:
    return steps.marked(seen[:, None, None])


def a_step(cache: Cache, mask: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """What a program does: slots are listed and told once, then layers run."""
    told = steps.tell(mask, cache.pitch, cache.shape)
    return told, [steps.step(cache.q, *kv, told, None, 0.3, None, None) for kv in cache.layers]


def test_a_captured_step_plans_copies_and_allocates_nothing(
    driver: Driver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays find lengths and slots on the device: padding, holes, all slots, another batch."""
    cache = Cache()
    fake_torch.current = stream = driver.stream()
    _, outs = a_step(cache, mask_of(seen_at(24)))
    driver.drain()
    cache.check(outs, seen_at(24))

    monkeypatch.delattr(Planned, "plan")
    before = [driver.calls(name) for name in WORK]
    launched = driver.calls("cuLaunchKernelEx")
    with capturing(driver, stream) as graph:
        told, outs = a_step(cache, mask_of(seen_at(25)))
    assert driver.calls("cuLaunchKernelEx") == launched + 1 + len(cache.layers)
    for seen in (
        seen_at(25), seen_at(26), seen_at(27, (0, 7, 20), 3, 9), seen_at(SLOTS - 1),
        seen_at(0, (0, 0, 0)), seen_at(30, (30, 0, 29)),
    ):  # fmt: skip
        for held, x in zip(told, steps.listed(mask_of(seen), cache.pitch), strict=True):
            held.copy_(x)
        for out in outs:
            out.fill_(torch.nan)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        cache.check(outs, seen)
    assert [driver.calls(name) for name in WORK] == before


def test_graphs_and_steps_between_replays(driver: Driver, fake_torch: FakeTorch) -> None:
    """Two graphs and steps without one share an engine; each tells its own slots.

    A layer outside of programs asks by the same mask again and again.
    """
    cache = Cache()
    fake_torch.current = stream = driver.stream()
    seen = [seen_at(24), seen_at(30, (0, 0, 11)), seen_at(11, (5, 6, 7))]
    a_step(cache, mask_of(seen[0]))
    graphs = []
    for x in seen[:2]:
        with capturing(driver, stream) as graph:
            held = a_step(cache, mask_of(x))
        graphs.append((graph, held[1], x, held))
    mask = mask_of(seen_at(33, (3, 2, 1)))
    for graph, outs, x, _ in (*graphs, *graphs[::-1]):
        _, other = a_step(cache, mask_of(seen[2]))
        driver.replay(graph, stream)
        eager = attention(LAYER, cache.q, *cache.layers[0], mask, 0.3)[0]
        driver.synchronize(stream)
        cache.check(other, seen[2])
        cache.check(outs, x)
        cache.check([eager], seen_at(33, (3, 2, 1)))
    for graph, _, _, _ in graphs:
        driver.replay(graph, stream)
        eager = attention(LAYER, cache.q, *cache.layers[0], mask, 0.3)[0]
        driver.synchronize(stream)
        cache.check([eager], seen_at(33, (3, 2, 1)))


def test_a_capture_does_not_trust_what_was_told_before(
    driver: Driver, fake_torch: FakeTorch
) -> None:
    """A graph that begins behind `tell` tells again: its replays come after other steps."""
    cache = Cache()
    fake_torch.current = stream = driver.stream()
    told, _ = a_step(cache, mask_of(seen_at(24)))
    with capturing(driver, stream) as graph:
        out = steps.step(cache.q, *cache.layers[0], told, None, 0.3, None, None)
    a_step(cache, mask_of(seen_at(12, (1, 2, 3))))
    driver.replay(graph, stream)
    driver.synchronize(stream)
    cache.check([out], seen_at(24))


def test_layers_outside_of_programs(
    driver: Driver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They tell once for each mask, and plan once for all."""
    monkeypatch.setattr(masks, "_on_gpu", lambda _: True)
    cache = Cache()
    fake_torch.current = driver.stream()
    keep = seen_at(SLOTS - 1)
    planned = None
    for last in (20, 21, SLOTS - 1):
        mask = masks.mask(
            ROWS, 1, SLOTS, q_offset=torch.tensor(last), attention_mask=keep[:, : last + 1],
            mask_function=causal_mask_function, allow_is_causal_skip=False,
        )  # fmt: skip
        assert steps.is_marked(mask)
        launched = driver.calls("cuLaunchKernelEx")
        outs = [attention(LAYER, cache.q, *kv, mask, 0.3)[0] for kv in cache.layers]
        assert driver.calls("cuLaunchKernelEx") == launched + 1 + len(cache.layers)
        driver.drain()
        cache.check(outs, keep & seen_at(last, (0, 0, 0)))
        planned = planned or [driver.calls(name) for name in WORK]
        assert [driver.calls(name) for name in WORK] == planned
    mask.fill_(False)[:, 0, 0, 5] = True  # written: listed again
    out = attention(LAYER, cache.q, *cache.layers[0], mask, 0.3)[0]
    driver.drain()
    cache.check([out], seen_at(5, (5, 5, 5)))
    with torch.inference_mode():
        out = attention(LAYER, cache.q, *cache.layers[0], steps.marked(~mask), 0.3)[0]
        driver.drain()
        cache.check([out], ~seen_at(5, (5, 5, 5)))
