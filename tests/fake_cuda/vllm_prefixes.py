# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM whose requests begin alike, in CUDA graphs, on the fake driver of an H200.

test_fake_cuda.py runs this file. Sharing has to pay before a plan does it: 64 requests.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr.integrations.vllm.kinds import Kind, kind_of
from flashbsr.integrations.vllm.steps import Batch, Place, Step, Steps

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.vllm_steps import captures_are_seen, capturing

__all__ = ["captures_are_seen"]  # a fixture

pytestmark = pytest.mark.usefixtures("fake_torch")

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
REQUESTS, TOKENS, WIDTH, PREFIX = 64, 320, 540, 8000
KIND: Kind = kind_of(HEADS, KV_HEADS, DIM, DIM**-0.5, None, 0.0, False, "auto", "decoder")


class Server:
    """A cache, and the arrays of the model runner."""

    def __init__(self, **how: bool) -> None:
        random = torch.Generator().manual_seed(0)
        pages = PREFIX // PAGE + REQUESTS * (WIDTH - PREFIX // PAGE)
        shape = pages, KV_HEADS, PAGE, 2 * DIM
        self.cache = torch.randn(*shape, generator=random).to(torch.float16)
        self.q = torch.randn(TOKENS, HEADS, DIM, generator=random).to(torch.float16)
        self.out = torch.zeros_like(self.q)
        self.steps = Steps([KIND], Place("float16", PAGE, device=0), **{"fixed": True, **how})
        self.lens = torch.zeros(REQUESTS, dtype=torch.int32)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        own = torch.arange(PREFIX // PAGE, pages, dtype=torch.int32).view(REQUESTS, -1)
        prefix = torch.arange(PREFIX // PAGE, dtype=torch.int32).expand(REQUESTS, -1)
        self.tables = torch.cat([prefix, own], 1)

    def step(self, stream: int, lens: list[int], q_lens: list[int], *, requests: int, rows: int,
             common: int = 0) -> Step:  # fmt: skip
        """Plan a step padded to `requests` and `rows`; what lies behind the others is stale."""
        n = len(lens)
        self.lens.fill_(77)
        self.lens[:n] = torch.tensor(lens)
        self.starts[1 : n + 1] = torch.tensor(q_lens).cumsum(0)
        self.starts[n + 1 :] = sum(q_lens)
        bounds = np.zeros(requests, np.int32)
        bounds[:n] = lens
        batch = Batch(self.starts[: requests + 1].numpy().copy(), bounds, self.tables[:requests],
                      self.lens[:requests], self.starts[: requests + 1],
                      common_prefix=common)  # fmt: skip
        return self.steps.plan(batch, None, rows, stream)

    def run(self, step: Step, rows: int) -> None:
        k, v = self.cache[..., :DIM], self.cache[..., DIM:]
        for attention in step.engines(KIND):
            attention.run(self.q[:rows], (k, v), out=self.out[:rows])

    def capture(self, driver: Driver, stream: int, key: Any, sizes: list[int],
                tokens: int) -> dict[int, Any]:  # fmt: skip
        """Capture runs of as many rows, largest first, of requests that are one step long."""
        graphs = {}
        for rows in sizes:
            self.steps.captures(key, True, rows, requests=REQUESTS, tokens=tokens,
                                pages=REQUESTS * WIDTH)  # fmt: skip
            each = 1 if key == "mixed" else key
            count = min(REQUESTS, rows // each)
            step = self.step(stream, [each] * count, [each] * count, requests=count, rows=rows)
            self.run(step, rows)
            with capturing(driver, stream) as graph:
                self.run(step, rows)
            graphs[rows] = graph
        return graphs

    def checked(self, lens: list[int], q_lens: list[int], rows: int) -> None:
        """Compare with the CPU engine, without sharing; rows that pad the graph are zeros."""
        task = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, kv_layout="HND", backend="cpu")
        reference = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)
        starts = np.cumsum([0, *q_lens]).astype(np.int32)
        tables, used = self.tables[: len(lens)].numpy(), int(starts[-1])
        layout = flashbsr.BlockTable(starts, tables, np.array(lens, np.int32), page_size=PAGE)
        reference.plan(layout, share_prefixes="off")
        cache = self.cache.numpy()
        want = reference.run(self.q[:used].numpy(), (cache[..., :DIM], cache[..., DIM:]))
        got = self.out[:used].numpy().astype(np.float32)
        np.testing.assert_allclose(got, want.astype(np.float32), atol=2e-3, rtol=2e-3)
        assert not self.out[used:rows].any()

    def replayed(self, driver: Driver, stream: int, graph: Any, step: Step) -> Any:
        """The graph tells lengths and tables itself; the shared parts are those of the plans."""
        assert step.captured and not step.told
        self.out.fill_(np.nan)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        ((slots, _),) = step.slots.values()
        parts = [part for slot in slots for part in slot.attention.plan_info.parts]
        return [(part.kv_end, len(part.requests)) for part in parts]


@pytest.mark.parametrize(("each", "cascades", "fixed"), [
    (1, False, True), (5, False, True), (1, True, True), (2, True, True), (1, True, False),
])  # fmt: skip
def test_graphs_follow_a_prefix(
    driver: Driver, fake_torch: FakeTorch, each: int, cascades: bool, fixed: bool
) -> None:
    """It comes, stays while lengths grow, is shorter, and goes; requests that pad have none."""
    server = Server(cascades=cascades, fixed=fixed)
    fake_torch.current = stream = driver.stream()
    graphs = server.capture(driver, stream, each, [64 * each], 64 * each)
    rows, random = 64 * each, np.random.default_rng(each)
    launched = []
    for common, count in [(8000, 64), (8000, 64), (8000, 61), (7984, 50), (0, 64), (8000, 64)]:
        lens = random.integers(8000 + each, 8100, count).tolist()
        q_lens = [each] * count
        step = server.step(stream, lens, q_lens, requests=64, rows=rows, common=common)
        parts = server.replayed(driver, stream, graphs[rows], step)
        assert parts == ([(common, count)] if common else [])
        server.checked(lens, q_lens, rows)
        (slots, _) = step.slots[KIND]
        # Who has nothing to do is planned so once, and not for every step.
        launched.append([slot.rests for slot in slots])
    if cascades:
        assert launched == [[64, -1]] * 4 + [[-1, 64]] + [[64, -1]]
    else:
        assert launched == [[-1]] * 6


def test_graphs_of_all_steps_follow_a_prefix(driver: Driver, fake_torch: FakeTorch) -> None:
    """Unless the last request has the rows that pad the step: it has no keys for them."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = server.capture(driver, stream, "mixed", [128], 256)
    random = np.random.default_rng(0)
    seen = []
    for count, requests, rows in [(64, 64, 128), (63, 63, 128), (50, 64, 128)]:
        q_lens = random.integers(1, 3, count).tolist()
        q_lens[5] += rows - sum(q_lens) if count == requests == 64 else 0
        lens = (random.integers(8000, 8050, count) + q_lens).tolist()
        step = server.step(stream, lens, q_lens, requests=requests, rows=rows, common=8000)
        seen.append(server.replayed(driver, stream, graphs[rows], step))
        server.checked(lens, q_lens, rows)
    assert seen == [[(8000, 64)], [], [(8000, 50)]]


def test_a_prefix_beside_drafts_has_no_graph(driver: Driver, fake_torch: FakeTorch) -> None:
    """vLLM replays none for such a step."""
    server = Server(drafts=True)
    fake_torch.current = stream = driver.stream()
    server.capture(driver, stream, 2, [128], 256)
    lens = [8050] * 64
    step = server.step(stream, lens, [2] * 64, requests=64, rows=128, common=8000)
    assert not step.captured
    driver.drain()
    server.out.fill_(np.nan)
    server.run(step, 128)
    driver.drain()
    server.checked(lens, [2] * 64, 128)
