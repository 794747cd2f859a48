# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM and CUDA graphs, on the fake driver. test_fake_cuda.py runs this file.

What vLLM does: it captures runs for some numbers of tokens, largest first, and replays each for
later steps of up to so many tokens, whose plans and lengths were put on the stream before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flashbsr.integrations.vllm.kinds import Kind, kind_of
from flashbsr.integrations.vllm.layer import Layer
from flashbsr.integrations.vllm.steps import ROOM, Batch, Place, Step, Steps

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import DIM, HEADS, KV_HEADS, PAGE, World, check

pytestmark = pytest.mark.usefixtures("fake_torch")

REQUESTS, TOKENS, WIDTH = 8, 32, 90
CAPTURING = [False]


@pytest.fixture(autouse=True)
def captures_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch sees those of its current stream."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: CAPTURING[0])


def kind(window: int | None = None) -> Kind:
    return kind_of(HEADS, KV_HEADS, DIM, DIM**-0.5, window, 0.0, False, "auto", "decoder")


@contextlib.contextmanager
def capturing(driver: Driver, stream: int) -> Iterator[list[int]]:
    """Capture what is put on the stream, in sight of PyTorch."""
    CAPTURING[0] = True
    try:
        with driver.capture(stream) as graph:
            yield graph
    finally:
        CAPTURING[0] = False


class Server:
    """The model runner's arrays: fixed memory, written anew for each step."""

    def __init__(self, *kinds: Kind, drafts: bool = False, clean: bool = True) -> None:
        self.world, self.clean = World(), clean
        # K and V of a page, HND, packed: what the reference reads is the same memory.
        pages = self.world.cache.transpose(2, 3)
        self.cache = torch.cat([pages[:, 0], pages[:, 1]], -1).contiguous()
        place = Place("float16", PAGE, device=0)
        self.steps = Steps(kinds or [kind()], place, fixed=True, drafts=drafts)
        self.lens = torch.zeros(REQUESTS, dtype=torch.int32)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.tables = torch.zeros(REQUESTS, WIDTH, dtype=torch.int32)
        self.slots = torch.zeros(TOKENS, dtype=torch.int64)
        self.out = torch.zeros(TOKENS, HEADS, DIM, dtype=torch.float16)

    def step(self, stream: int, lens: list[int], q_lens: list[int], seed: int = 0,
             requests: int | None = None, spare: int = 0, rows: int = 0,
             common: int = 0) -> tuple[Step, Any]:  # fmt: skip
        """Plan a step padded to `requests` and `rows`, with bounds `spare` more than lengths.

        All requests begin with the same `common` tokens.
        """
        batch = World.batch(lens, q_lens, seed=seed)
        for begin in batch.kv_indptr[:-1]:
            batch.kv_indices[begin : begin + common // PAGE] = batch.kv_indices[: common // PAGE]
        n, padded = len(lens), requests or len(lens)
        # vLLM gives requests that are not there no keys; who tells query rows needs no such thing.
        self.lens.fill_(0 if self.clean else 77)
        self.lens[:n] = torch.tensor(lens)
        self.starts[: n + 1] = torch.from_numpy(batch.qo_indptr)
        self.starts[n + 1 :] = int(batch.qo_indptr[-1])
        self.tables.fill_(2**31 - 1)
        for b in range(n):
            pages = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
            self.tables[b, : len(pages)] = torch.from_numpy(pages)
        bounds = np.zeros(padded, np.int32)
        bounds[:n] = np.array(lens) + spare
        given = Batch(self.starts[: padded + 1].numpy().copy(), bounds, self.tables[:padded],
                      self.lens[:padded], self.starts[: padded + 1],
                      common_prefix=common)  # fmt: skip
        return self.steps.plan(given, self.slots, rows or sum(q_lens), stream), batch

    def run(self, step: Step, rows: int, of: Kind | None = None) -> None:
        """What a layer does with `rows` of q."""
        k, v = self.cache[..., :DIM], self.cache[..., DIM:]
        attention = step.attention(of or self.steps.kinds[0])
        attention.run(self.world.q[:rows], (k, v), out=self.out[:rows])

    def checked(self, batch: Any, rows: int, **options: Any) -> None:
        """Rows of requests against the CPU engine, those that pad the graph against zero."""
        used = int(batch.qo_indptr[-1])
        check(self.world, self.out, batch, used, **options)
        assert not self.out[used:rows].any()


def capture(
    server: Server, driver: Driver, stream: int, key: Any, sizes: list[int]
) -> dict[int, Any]:
    """Capture as vLLM does: every request one token long, largest number of rows first."""
    tokens = REQUESTS * key if key != "mixed" else TOKENS
    graphs = {}
    for rows in sizes:
        server.steps.captures(
            key, True, rows, requests=REQUESTS, tokens=tokens, pages=REQUESTS * WIDTH
        )
        each = 1 if key == "mixed" else key
        count = min(REQUESTS, rows // each)
        step, _ = server.step(stream, [each] * count, [each] * count, rows=rows)
        assert step.captured
        server.run(step, rows)
        with capturing(driver, stream) as graph:
            server.run(step, rows)
        graphs[rows] = graph
    return graphs


def replayed(server: Server, driver: Driver, stream: int, graph: Any, step: Step, batch: Any,
             rows: int) -> None:  # fmt: skip
    """Lengths and tables are told by the graph: `step` was planned, and nothing else."""
    assert step.captured and not step.told
    server.out.fill_(np.nan)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    server.checked(batch, rows)


@pytest.mark.parametrize("each", [1, 4])
def test_decode_steps_are_replayed(driver: Driver, fake_torch: FakeTorch, each: int) -> None:
    """Growing lengths, fewer requests than the graph has, others behind them; drafts too."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, each, [8 * each, 4 * each, each])
    for seed, lens in enumerate(([40, 70, 100, 5], [41, 71, 101, 6], [200], [9] * 7, [60, 8])):
        rows = next(r for r in (each, 4 * each, 8 * each) if r >= each * len(lens))
        step, batch = server.step(stream, lens, [each] * len(lens), seed, rows // each, rows=rows)
        replayed(server, driver, stream, graphs[rows], step, batch, rows)


def test_mixed_steps_are_replayed(driver: Driver, fake_torch: FakeTorch) -> None:
    """One graph for all: decodes, chunks of prompts, both; empty requests behind."""
    server = Server(clean=False)
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, "mixed", [32, 16, 8])
    for seed, (lens, q_lens) in enumerate([
        ([40, 70, 100, 5], [1, 1, 1, 1]), ([41, 20, 101], [1, 20, 1]), ([31], [31]),
        ([300, 17, 8], [3, 9, 4]), ([5] * 8, [1] * 8), ([90], [2]),
    ]):  # fmt: skip
        rows = next(r for r in (8, 16, 32) if r >= sum(q_lens))
        step, batch = server.step(stream, lens, q_lens, seed, min(REQUESTS, rows), rows=rows)
        replayed(server, driver, stream, graphs[rows], step, batch, rows)


def test_a_decode_step_in_compiled_pieces(driver: Driver, fake_torch: FakeTorch) -> None:
    """With the plans of graphs, but rows of padding that no plan knows of."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    capture(server, driver, stream, 1, [8])
    lens = [40, 70, 100, 5, 9]
    step, batch = server.step(stream, lens, [1] * 5)
    layer = Layer(HEADS, DIM, DIM**-0.5, KV_HEADS)
    driver.drain()  # what ran before the capture writes, too
    server.out.fill_(np.nan)
    q = server.world.q[:8]
    layer.forward(None, q, None, None, server.cache, step, server.out[:8])
    driver.drain()
    server.checked(batch, 8)


@pytest.mark.parametrize("drafts", [False, True])
def test_rows_are_cleared_where_they_may_be_missing(
    driver: Driver, fake_torch: FakeTorch, drafts: bool
) -> None:
    """A launch more, for each layer of an eager step; requests that pad it have stale lengths."""
    server = Server(drafts=drafts, clean=False)
    fake_torch.current = stream = driver.stream()
    step, batch = server.step(stream, [40, 70, 9], [1, 4, 2], requests=5)
    driver.drain()
    server.out.fill_(np.nan)
    before = driver.calls("cuLaunchKernelEx")
    server.run(step, 7)
    assert driver.calls("cuLaunchKernelEx") == before + 1 + drafts
    assert (driver.kernel.partition("_sm")[0] == "clear_rows") == drafts
    driver.drain()
    server.checked(batch, 7)


def test_graphs_of_decode_steps_clear_nothing(driver: Driver, fake_torch: FakeTorch) -> None:
    """A launch for the lengths and one for each layer; one more where rows are no request's."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    kernels = {}
    for rows, requests in ((8, 5), (4, 4)):
        server.steps.captures(1, True, rows, requests=8, tokens=8, pages=REQUESTS * WIDTH)
        step, _ = server.step(stream, [1] * requests, [1] * requests, rows=rows)
        server.run(step, rows)
        before = driver.calls("cuLaunchKernelEx")
        with capturing(driver, stream) as graph:
            server.run(step, rows)
            server.run(step, rows)
        kernels[rows] = driver.calls("cuLaunchKernelEx") - before, graph
    assert kernels[4][0] == 1 + 2
    assert kernels[8][0] == 1 + 2 + 2
    for seed, (lens, requests, rows) in enumerate([
        ([40, 70], 4, 4), ([41, 71, 9], 5, 8), ([42, 72], 4, 4), ([43, 73, 11, 5, 8], 5, 8),
    ]):  # fmt: skip
        step, batch = server.step(stream, lens, [1] * len(lens), seed, requests, rows=rows)
        replayed(server, driver, stream, kernels[rows][1], step, batch, rows)


def test_a_prefix_that_all_requests_have(driver: Driver, fake_torch: FakeTorch) -> None:
    """In an eager step; it grows, and goes."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    for seed, (common, longer) in enumerate([(104, 1), (104, 2), (108, 3), (0, 4)]):
        lens = [108 + longer + b for b in range(8)]
        step, batch = server.step(stream, lens, [1] * 8, seed, common=common)
        assert not step.captured
        driver.drain()
        server.out.fill_(np.nan)
        server.run(step, 8)
        driver.drain()
        server.checked(batch, 8)
    eager = [slot for slots in server.steps._eager[True] for slot in slots.values()]
    assert sorted(slot.common_prefix for slot in eager) == [0, 108]


def test_steps_that_no_graph_has_run_with_plans_of_their_own(
    driver: Driver, fake_torch: FakeTorch
) -> None:
    """More rows, or rows of several lengths: not captured, and a later replay is not disturbed."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, 1, [8])
    for seed, length in enumerate([40, 41]):  # the second time by the plan of the first
        prefill, other = server.step(stream, [length, 9, 100], [20, 1, 3], seed)
        assert not prefill.captured
        server.run(prefill, 24)
        driver.synchronize(stream)  # what follows is written by the stream, in vLLM
        server.checked(other, 24)
        decode, batch = server.step(stream, [length, 70], [1, 1], seed, 8, rows=8)
        replayed(server, driver, stream, graphs[8], decode, batch, 8)


def test_lengths_below_the_bounds_of_the_host(driver: Driver, fake_torch: FakeTorch) -> None:
    """Asynchronous speculation: the host assumes that every draft was accepted."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, 4, [16])
    for spare in (3, 0, 1):
        step, batch = server.step(stream, [40, 70, 100], [4, 4, 4], spare, 4, spare, 16)
        replayed(server, driver, stream, graphs[16], step, batch, 16)


def test_a_decode_step_in_the_room_of_its_plan_is_not_planned(
    driver: Driver, fake_torch: FakeTorch
) -> None:
    """One small launch is all: nothing is copied to the GPU, until the room is used up."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, 1, [4])
    server.step(stream, [140, 170], [1, 1], 0, 4, rows=4)
    copied = driver.calls("cuMemcpyHtoDAsync")
    for n in range(1, ROOM, 31):
        step, batch = server.step(stream, [140 + n, 170 + n], [1, 1], n, 4, rows=4)
        assert driver.calls("cuMemcpyHtoDAsync") == copied
        replayed(server, driver, stream, graphs[4], step, batch, 4)
    step, batch = server.step(stream, [141 + ROOM, 171 + ROOM], [1, 1], 5, 4, rows=4)
    assert driver.calls("cuMemcpyHtoDAsync") > copied
    replayed(server, driver, stream, graphs[4], step, batch, 4)
    copied = driver.calls("cuMemcpyHtoDAsync")
    step, batch = server.step(stream, [4, 7], [1, 1], 6, 4, rows=4)  # much shorter: cut anew
    assert driver.calls("cuMemcpyHtoDAsync") > copied
    replayed(server, driver, stream, graphs[4], step, batch, 4)


def test_steps_larger_than_what_is_captured(driver: Driver, fake_torch: FakeTorch) -> None:
    """Engines capture up to some size; larger decode steps are planned beside the graphs."""
    server = Server()
    fake_torch.current = stream = driver.stream()
    graphs = capture(server, driver, stream, 1, [2, 1])
    for seed in range(2):
        step, batch = server.step(stream, [40, 70, 100 + seed, 9], [1] * 4, seed)
        assert not step.captured
        server.out.fill_(np.nan)
        server.run(step, 4)
        driver.synchronize(stream)
        server.checked(batch, 4)
        step, batch = server.step(stream, [41, 71 + seed], [1, 1], 5 + seed)
        assert step.captured
        replayed(server, driver, stream, graphs[2], step, batch, 2)


def test_kinds_of_layers_of_one_group(driver: Driver, fake_torch: FakeTorch) -> None:
    """Windows and full attention over the same blocks, in one graph."""
    kinds = kind(), kind(12)
    server = Server(*kinds)
    fake_torch.current = stream = driver.stream()
    server.steps.captures(
        1, True, REQUESTS, requests=REQUESTS, tokens=REQUESTS, pages=REQUESTS * WIDTH
    )
    step, _ = server.step(stream, [1] * 4, [1] * 4)
    for of in kinds:
        server.run(step, 4, of)
    graphs = {}
    for of in kinds:
        with capturing(driver, stream) as graph:
            server.run(step, 4, of)
        graphs[of] = graph
    for seed, lens in enumerate(([40, 70, 100], [41, 71, 101])):
        step, batch = server.step(stream, lens, [1, 1, 1], seed, 4, rows=4)
        for of, window in zip(kinds, (-1, 11), strict=True):
            server.out.fill_(np.nan)
            driver.replay(graphs[of], stream)
            driver.synchronize(stream)
            server.checked(batch, 4, window_left=window)
