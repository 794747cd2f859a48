# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs captured into CUDA graphs, on the fake driver. test_fake_cuda.py runs this file."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import (
    CAPACITY,
    DECODE,
    DIM,
    HEADS,
    PREFILL,
    World,
    check,
    planned,
)

pytestmark = pytest.mark.usefixtures("fake_torch")


# --- captured runs


@pytest.mark.parametrize(("first", "later"), [
    (([10, 20, 30], None, 3), [([90], None, 1), ([7] * 8, None, 8), ([1], None, 1), DECODE]),
    (
        ([30], [20], 20),
        [PREFILL, ([60, 61], [32, 32], 64), ([5], [1], 1), ([100] * 8, [8] * 8, 64)],
    ),
])  # fmt: skip
def test_replays_over_later_plans(
    driver: Driver, fake_torch: FakeTorch, first: Any, later: list[Any]
) -> None:
    """Lengths and batch sizes change up to the capacity; the captured launch stays right."""
    world = World()
    attention, _, _ = planned(world, first, **CAPACITY)
    out = torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    fake_torch.current = stream = driver.stream()
    allocations = driver.calls("cuMemAlloc")
    with driver.capture(stream) as graph:
        attention.run(world.q, world.cache, out=out)
    for lens, q_lens, rows in [first, *later]:
        batch = world.batch(lens, q_lens, seed=rows)
        attention.plan(batch)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        check(world, out, batch, rows)
    assert driver.calls("cuMemAlloc") == allocations


def test_an_empty_batch_between_replays(driver: Driver, fake_torch: FakeTorch) -> None:
    """A run with nothing to do is captured too: its replays may have work."""
    world = World()
    empty = ([], [], 0)
    attention, _, _ = planned(world, empty, **CAPACITY)
    out = torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(world.q, world.cache, out=out)
    for lens, q_lens, rows in (([20, 3], [4, 2], 6), empty, ([9], [9], 9)):
        batch = world.batch(lens, q_lens)
        attention.plan(batch)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        check(world, out, batch, rows)


def test_plans_that_a_captured_run_cannot_have(driver: Driver, fake_torch: FakeTorch) -> None:
    world = World()
    attention = world.attention(**CAPACITY)
    one = world.batch([1])
    attention.plan(dataclasses.replace(one, kv_indices=np.array([99])))
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream):
        attention.run(world.q[:4], world.cache[:100])
    with pytest.raises(errors.CapacityError, match=r"qo_indptr.*5 query tokens.*4.*captured"):
        attention.plan(world.batch([1] * 5))
    with pytest.raises(errors.CapacityError, match=r"kv_indices.*pages.*100.*captured"):
        attention.plan(dataclasses.replace(one, kv_indices=np.array([100])))
    with pytest.raises(errors.PlanError, match="captured"):
        attention.plan(world.batch([3]), custom_mask=np.ones(3, bool))
    with pytest.raises(errors.PlanError, match=r"layout.*pages of 8.*pages of 4.*captured"):
        attention.plan(dataclasses.replace(one, page_size=8))
    attention.plan(dataclasses.replace(world.batch([1] * 4), kv_indices=np.arange(4)))


def test_what_was_captured_may_be_planned_again_when_its_graphs_are_gone(
    driver: Driver, fake_torch: FakeTorch
) -> None:
    """Two graphs hold the plan: as long as one is there the rows of then are the most."""
    world = World()
    attention = world.attention(**CAPACITY)
    attention.plan(world.batch([9]))
    fake_torch.current = stream = driver.stream()
    graphs = []
    for _ in range(2):
        with driver.capture(stream) as graph:
            attention.run(world.q[:4], world.cache)
        graphs.append(graph)
    for graph in graphs:
        assert attention.captured
        with pytest.raises(errors.CapacityError, match=r"5 query tokens.*captured"):
            attention.plan(world.batch([1] * 5))
        driver.destroy_graph(graph)
    assert not attention.captured
    attention.plan(world.batch([1] * 5))


class Family:
    """16 decodes of 49 pages of 64 tokens, of which they share 48 or none."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(16, 8, 128, generator=random).half()
        self.cache = torch.randn(800, 2, 64, 2, 128, generator=random).half()

    @staticmethod
    def attention(**task: Any) -> Any:
        return flashbsr.Attention(
            flashbsr.AttentionSpec(),
            flashbsr.TaskInfo(8, 2, 128, kv_dtype="float16", **task),
        )

    @staticmethod
    def batch(shared: bool, count: int = 16) -> flashbsr.Paged:
        pages = np.arange(49 * count).reshape(count, 49)
        if shared:
            pages[1:, :48] = pages[0, :48]
        return flashbsr.Paged(
            None,
            49 * np.arange(count + 1),
            pages.ravel(),
            kv_lens=49 * 64 - np.arange(count),
            page_size=64,
        )

    def check(self, out: torch.Tensor, batch: flashbsr.Paged) -> None:
        reference, rows = self.attention(backend="cpu"), len(batch.kv_lens)
        reference.plan(batch)
        want = reference.run(self.q[:rows].numpy(), self.cache.numpy())
        np.testing.assert_allclose(out[:rows].numpy().astype("f4"), want.astype("f4"), atol=2e-3)


@pytest.mark.parametrize("first", [False, True], ids=["captured apart", "captured shared"])
def test_later_plans_are_none_of_a_graphs_business(
    driver: Driver, fake_torch: FakeTorch, first: bool
) -> None:
    """Without a capacity: other kernels, larger batches, levels, and the replay is as it was."""
    family = Family()
    out, kernels = torch.zeros_like(family.q), {False: "decode", True: "mixed"}
    fake_torch.current = stream = driver.stream()
    with driver.memory_of_h200():
        attention, captured = family.attention(backend="cuda"), family.batch(first, 12)
        attention.plan(captured)
        assert attention._engine.kernel_name().startswith(kernels[first])
        with driver.capture(stream) as graph:
            attention.run(family.q[:12], family.cache, out=out[:12])
        for shared, count in ((True, 16), (False, 16), (True, 12)):
            batch, mine = family.batch(shared, count), torch.zeros_like(family.q)
            attention.plan(batch)
            assert attention._engine.kernel_name().startswith(kernels[shared])
            attention.run(family.q[:count], family.cache, out=mine[:count])
            out.fill_(np.nan)
            driver.replay(graph, stream)
            driver.drain()
            family.check(out, captured)
            family.check(mine, batch)
        attention.plan(flashbsr.Levels(
            [[0, 4], [0, 1, 2, 3, 4]], [[0, 32], [0, 1, 2, 3, 4]],
            [np.arange(32), np.arange(32, 36)], [[64], [64] * 4], page_size=64,
        ))  # fmt: skip
        driver.replay(graph, stream)
        driver.drain()
        family.check(out, captured)


def test_plans_within_a_capture(driver: Driver, fake_torch: FakeTorch) -> None:
    """Without a capacity each run of a capture has the plan that was the last one then."""
    world = World()
    attention = world.attention()
    fake_torch.current = stream = driver.stream()
    outs, batches = [], [world.batch([30, 7]), world.batch([5] * 6), world.batch([90])]
    with driver.capture(stream) as graph:
        for batch in batches:
            attention.plan(batch)
            outs.append(torch.zeros(8, HEADS, DIM, dtype=torch.float16))
            rows = len(batch.kv_lens)
            attention.run(world.q[:rows], world.cache, out=outs[-1][:rows])
    attention.plan(world.batch([3]))
    driver.replay(graph, stream)
    driver.synchronize(stream)
    for out, batch in zip(outs, batches, strict=True):
        check(world, out, batch, len(batch.kv_lens))

    # Where the TaskInfo leaves the type open the first run plans once more, here too.
    other = World(torch.bfloat16)
    attention, batch, rows = planned(other)
    with driver.capture(stream):
        attention.run(other.q[:rows], other.cache)


def test_average_lengths_change_no_captured_kernel(driver: Driver, fake_torch: FakeTorch) -> None:
    """A kernel for a few rows is right for many."""
    world = World()
    attention, _, _ = planned(world, **CAPACITY)
    name, out = attention._engine.kernel_name(), torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(world.q, world.cache, out=out)
    for lens, q_lens, rows in (([40], [40], 40), DECODE):
        batch = world.batch(lens, q_lens)
        attention.plan(batch)
        assert attention._engine.kernel_name() == name
        driver.replay(graph, stream)
        driver.synchronize(stream)
        check(world, out, batch, rows)


def test_short_last_pages_of_a_captured_run(driver: Driver, fake_torch: FakeTorch) -> None:
    """K and V as tokens: no later plan leads beyond the last one."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, h, 64, generator=random).half() for n, h in ((9, 4), (70, 2), (70, 2))
    )

    def blocks(n: int, *columns: int) -> flashbsr.Bsr:
        return flashbsr.Bsr([0, 2], columns, (9, n), (9, 16))

    def attention(n: int) -> flashbsr.Attention:
        made = flashbsr.Attention(
            flashbsr.AttentionSpec(),
            flashbsr.TaskInfo(
                4, 2, 64, kv_dtype="float16", backend="fa2",
                max_batch_size=2, max_q_tokens=9, max_kv_pages=8,
            ),
        )  # fmt: skip
        made.plan(blocks(n, 0, 4))
        return made

    short, whole = attention(70), attention(80)
    fake_torch.current = stream = driver.stream()
    out = torch.zeros_like(q)
    with driver.capture(stream) as graph:
        short.run(q, (k, v), out=out)
    short.plan(blocks(70, 4, 1))
    driver.replay(graph, stream)
    driver.synchronize(stream)
    expected = flashbsr.Attention(short.spec, flashbsr.TaskInfo(4, 2, 64))
    expected.plan(blocks(70, 4, 1))
    found = expected.run(q.numpy(), (k.numpy(), v.numpy()))
    np.testing.assert_allclose(out.numpy().astype("f4"), found.astype("f4"), atol=2e-3)
    for n in (80, 72):
        with pytest.raises(errors.PlanError, match=r"^N.*captured"):
            short.plan(blocks(n, 0, 4))
    with pytest.raises(errors.IndexRangeError, match="at least 80"):
        whole.run(q, (k, v))
    whole.plan(blocks(64, 0, 3))
    with driver.capture(stream):
        whole.run(q, (k, v), out=out)
    with pytest.raises(errors.CapacityError, match=r"5 pages.*at most 4.*captured"):
        whole.plan(blocks(80, 0, 4))


def test_nothing_is_planned_during_a_capture(driver: Driver, fake_torch: FakeTorch) -> None:
    """Where the TaskInfo leaves the type open, the first run plans again: not there."""
    world = World(torch.bfloat16)
    attention, batch, rows = planned(world, **CAPACITY)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream), pytest.raises(errors.PlanError, match="captured"):
        attention.run(world.q[:rows], world.cache)
    with driver.capture(stream), pytest.raises(errors.PlanError, match="captured"):
        attention.plan(batch, stream=stream)
    told, _, _ = planned(world, kv_dtype="bfloat16", **CAPACITY)
    with driver.capture(stream):
        told.run(world.q[:rows], world.cache)


def test_capture_in_another_thread_is_not_disturbed(driver: Driver, fake_torch: FakeTorch) -> None:
    """An engine may be built, planned and grown while somebody captures another stream."""
    world = World()
    stream = driver.stream()
    with driver.capture(stream):
        attention, _, _ = planned(world)
        attention.plan(world.batch([300, 200]))
        out = attention.run(world.q[:2], world.cache)
    driver.drain()
    check(world, out, world.batch([300, 200]), 2)
