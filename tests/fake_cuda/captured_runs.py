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
    attention.plan(dataclasses.replace(world.batch([1] * 4), kv_indices=np.arange(4)))

    grows, _, _ = planned(world, ([10, 20], None, 2))
    with driver.capture(stream):
        grows.run(world.q[:2], world.cache)
    with pytest.raises(errors.FlashbsrError, match=r"captured.*|outgrows"):
        grows.plan(world.batch([100] * 8))


class Family:
    """16 decodes of 33 pages of 64 tokens, of which they share 32 or none."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(16, 4, 128, generator=random).half()
        self.cache = torch.randn(560, 2, 64, 1, 128, generator=random).half()

    @staticmethod
    def attention(**task: Any) -> Any:
        return flashbsr.Attention(
            flashbsr.AttentionSpec(),
            flashbsr.TaskInfo(4, 1, 128, kv_dtype="float16", **task),
        )

    @staticmethod
    def batch(shared: bool, count: int = 16) -> flashbsr.Paged:
        pages = np.arange(33 * count).reshape(count, 33)
        if shared:
            pages[1:, :32] = pages[0, :32]
        return flashbsr.Paged(
            None,
            33 * np.arange(count + 1),
            pages.ravel(),
            kv_lens=33 * 64 - np.arange(count),
            page_size=64,
        )

    def check(self, out: torch.Tensor, batch: flashbsr.Paged) -> None:
        reference, rows = self.attention(backend="cpu"), len(batch.kv_lens)
        reference.plan(batch)
        want = reference.run(self.q[:rows].numpy(), self.cache.numpy())
        np.testing.assert_allclose(out[:rows].numpy().astype("f4"), want.astype("f4"), atol=2e-3)


@pytest.mark.parametrize("first", [False, True], ids=["captured apart", "captured shared"])
def test_sharing_keeps_to_a_captured_run(
    driver: Driver, fake_torch: FakeTorch, first: bool
) -> None:
    """Without a capacity: a capture holds the kernel, and the memory of as many parts as it had."""
    family = Family()
    out, kernels = torch.zeros_like(family.q), {}
    fake_torch.current = stream = driver.stream()
    with driver.memory_of_h200():
        for shared in (False, True):
            attention = family.attention(backend="cuda")
            attention.plan(family.batch(shared))
            kernels[shared] = attention._engine.kernel_name()
            assert attention.plan_info.header.num_shared == shared
        assert kernels[False].startswith("decode")
        assert kernels[True].startswith("mixed")

        attention = family.attention(backend="cuda")
        attention.plan(family.batch(first))
        with driver.capture(stream) as graph:
            attention.run(family.q, family.cache, out=out)
        for shared, count in ((True, 16), (False, 16), (True, 12)):
            batch = family.batch(shared, count)
            attention.plan(batch)
            assert attention._engine.kernel_name() == kernels[first]
            assert attention.plan_info.header.num_shared == (shared and first)
            driver.replay(graph, stream)
            driver.synchronize(stream)
            family.check(out, batch)


def test_a_plan_that_outgrows_a_captured_run_leaves_it_as_it_was(
    driver: Driver, fake_torch: FakeTorch
) -> None:
    family = Family()
    attention, batch = family.attention(backend="cuda"), family.batch(False, 4)
    attention.plan(batch)
    out = torch.zeros_like(family.q)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(family.q[:4], family.cache, out=out[:4])
    with pytest.raises(errors.CapacityError, match="outgrows"):
        attention.plan(family.batch(False, 16))
    with pytest.raises(errors.CapacityError, match="outgrows"):
        attention.plan(flashbsr.Levels(
            [[0, 4], [0, 1, 2, 3, 4]], [[0, 32], [0, 1, 2, 3, 4]],
            [np.arange(32), np.arange(32, 36)], [[64], [64] * 4], page_size=64,
        ))  # fmt: skip
    attention.plan(batch)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    family.check(out, batch)


def test_average_lengths_change_no_captured_kernel(driver: Driver, fake_torch: FakeTorch) -> None:
    """A kernel for a few rows is right for many."""
    world = World()
    attention, _, rows = planned(world)
    name, out = attention._engine.kernel_name(), torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    assert name.startswith("decode")
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(world.q[:rows], world.cache, out=out[:rows])
    for lens, q_lens, rows in (([4], [4], 4), DECODE):
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
            flashbsr.TaskInfo(4, 2, 64, kv_dtype="float16", backend="fa2"),
        )
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
