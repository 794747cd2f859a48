# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of bounds and CUDA graphs, on the fake driver. test_fake_cuda.py runs this file."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import CAPACITY, DIM, HEADS, PAGE, PAGES, World, check

pytestmark = pytest.mark.usefixtures("fake_torch")

BOUND, ROWS = 90, 4
WIDTH = -(-BOUND // PAGE)


class Step:
    """What a caller's kernels write between replays: lengths and tables in fixed memory."""

    def __init__(self) -> None:
        self.lens = torch.zeros(ROWS, dtype=torch.int32)
        self.tables = torch.zeros(ROWS, WIDTH + 3, dtype=torch.int32)

    def advance(self, lens: list[int], seed: int) -> flashbsr.Paged:
        """Other lengths and pages, garbage behind them; the same for the reference."""
        batch = World.batch(lens, seed=seed)
        self.lens.copy_(torch.tensor(lens))
        self.tables.fill_(2**31 - 1 if seed % 2 else -3)
        for b in range(ROWS):
            pages = torch.from_numpy(batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]])
            self.tables[b, : len(pages)] = pages
        return batch


def planned(world: World, **options: Any) -> Any:
    attention = world.attention(**options)
    attention.plan(flashbsr.Bounds(None, np.full(ROWS, BOUND), page_size=PAGE))
    return attention


STEPS = [[40, 7, 90, 1], [0, 0, 0, 0], [90, 90, 90, 90], [41, 8, 0, 2], [3, 88, 64, 65]]


@pytest.mark.parametrize("options", [{}, CAPACITY], ids=["own plan", "graph mode"])
def test_replays_over_other_lengths(
    driver: Driver, fake_torch: FakeTorch, options: dict[str, Any]
) -> None:
    """Two layers in a graph after one update: nothing on the host between replays."""
    world, step = World(), Step()
    attention = planned(world, **options)
    fake_torch.current = stream = driver.stream()
    outs = [torch.zeros(64, HEADS, DIM, dtype=torch.float16) for _ in range(2)]
    step.advance(STEPS[0], 0)
    with driver.capture(stream) as graph:
        attention.update(step.lens, step.tables)
        for out in outs:
            attention.run(world.q[:ROWS], world.cache, out=out[:ROWS])
    calls = {name: driver.calls(name) for name in ("cuMemcpyHtoDAsync", "cuMemAlloc")}
    for seed, lens in enumerate(STEPS):
        batch = step.advance(lens, seed)
        for out in outs:
            out.fill_(np.nan)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        for out in outs:
            check(world, out, batch, ROWS)
    assert calls == {name: driver.calls(name) for name in calls}


def test_a_capture_without_a_capacity_is_its_own(driver: Driver, fake_torch: FakeTorch) -> None:
    """Eager updates and plans do not reach it, nor its replays them."""
    world, step, other = World(), Step(), Step()
    attention = planned(world)
    fake_torch.current = stream = driver.stream()
    captured, eager = (torch.zeros(ROWS, HEADS, DIM, dtype=torch.float16) for _ in range(2))
    step.advance(STEPS[0], 0)
    with driver.capture(stream) as graph:
        attention.run(
            world.q[:ROWS], world.cache, out=captured, kv_lens=step.lens, block_tables=step.tables
        )
    for seed, lens in enumerate(STEPS):
        mine = other.advance(lens, seed)
        attention.update(other.lens, other.tables)
        theirs = step.advance(STEPS[-1 - seed], seed + 9)
        driver.replay(graph, stream)
        attention.run(world.q[:ROWS], world.cache, out=eager)
        driver.drain()
        check(world, captured, theirs, ROWS)
        check(world, eager, mine, ROWS)
    attention.plan(world.batch([3]))
    theirs = step.advance(STEPS[2], 1)
    driver.replay(graph, stream)
    driver.drain()
    check(world, captured, theirs, ROWS)


def test_what_a_capture_must_bring(driver: Driver, fake_torch: FakeTorch) -> None:
    world, step = World(), Step()
    attention = planned(world)
    step.advance(STEPS[0], 0)
    attention.update(step.lens, step.tables)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream):
        with pytest.raises(errors.PlanError, match=r"kv_lens: .*inside of the capture"):
            attention.run(world.q[:ROWS], world.cache)
        with pytest.raises(errors.UnsupportedError, match=r"kv_lens: .*host memory.*captured"):
            attention.update(np.zeros(ROWS, np.int32), np.zeros((ROWS, WIDTH), np.int32))


def test_graph_mode_stays_with_its_kind_of_plan(driver: Driver, fake_torch: FakeTorch) -> None:
    world, step = World(), Step()
    fake_torch.current = stream = driver.stream()
    attention = planned(world, **CAPACITY)
    step.advance(STEPS[0], 0)
    with driver.capture(stream):
        attention.update(step.lens, step.tables)
        attention.run(world.q[:ROWS], world.cache)
    with pytest.raises(errors.PlanError, match=r"layout: got lengths; expected bounds"):
        attention.plan(world.batch([3, 4]))
    attention.plan(flashbsr.Bounds(None, np.full(2, 20), page_size=PAGE))
    attention.update(step.lens[:2], step.tables[:2])


@pytest.mark.parametrize("on_host", [None, "few", "many"])
def test_streams_follow_each_other(
    driver: Driver, fake_torch: FakeTorch, on_host: str | None
) -> None:
    """Updates and runs of one object on several streams happen in the order of their calls.

    Arrays on the host may change as soon as update() returns. Few are read in pinned memory, where
    they stay as long as a launch may read them; many are copied to the device.
    """
    world = World()
    attention = planned(world)
    streams = [driver.stream() for _ in range(3)]
    runs, copies = [], driver.calls("cuMemcpyHtoDAsync")
    for seed, lens in enumerate(3 * STEPS):
        step = Step()
        batch = step.advance(lens, seed)
        out = torch.full((ROWS, HEADS, DIM), np.nan, dtype=torch.float16)
        if on_host == "many":
            step.tables = torch.nn.functional.pad(step.tables, (0, 1 << 13))
        arrays: Any = step.lens, step.tables
        fake_torch.current = streams[seed % 3]
        attention.update(*(x.numpy() if on_host else x for x in arrays))
        if on_host:
            step.lens.fill_(1), step.tables.fill_(-9)
        fake_torch.current = streams[seed // 3 % 3]
        attention.run(world.q[:ROWS], world.cache, out=out)
        runs.append((out, batch, step))
    assert driver.calls("cuMemcpyHtoDAsync") - copies == (len(runs) if on_host == "many" else 0)
    driver.drain()
    for out, batch, _ in runs:
        check(world, out, batch, ROWS)


def test_a_table_stays_on_the_device(driver: Driver, fake_torch: FakeTorch) -> None:
    """Lengths on the host: planning copies nothing back."""
    world, step = World(), Step()
    batch = step.advance(STEPS[0], 0)
    attention = world.attention()
    fake_torch.current = driver.stream()
    before = driver.calls("cuMemcpyDtoHAsync")
    attention.plan(flashbsr.BlockTable(None, step.tables, STEPS[0], page_size=PAGE))
    out = attention.run(world.q[:ROWS], world.cache)
    driver.drain()
    check(world, out, batch, ROWS)
    assert driver.calls("cuMemcpyDtoHAsync") == before
    with pytest.raises(errors.IndexRangeError, match=r"kv_lens: got 999; expected at most 104"):
        attention.plan(flashbsr.BlockTable(None, step.tables, [999, 1, 1, 1], page_size=PAGE))


def test_page_ids_and_lengths_are_checked(
    driver: Driver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHBSR_CHECK", "1")
    world, step = World(), Step()
    attention = planned(world)
    fake_torch.current = driver.stream()
    step.advance([40, 7, 90, 1], 0)
    attention.update(step.lens, step.tables)
    attention.run(world.q[:ROWS], world.cache)
    step.tables[2, 5] = PAGES
    attention.update(step.lens, step.tables)
    with pytest.raises(errors.IndexRangeError, match=rf"got {PAGES} in the memory of the GPU"):
        attention.run(world.q[:ROWS], world.cache)
    step.lens[1] = BOUND + 1
    with pytest.raises(errors.IndexRangeError, match=r"kv_lens\[1\]: got 91; .*\[0, 90\]"):
        attention.update(step.lens, step.tables)


def test_a_check_reads_lengths_where_they_are(
    driver: Driver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is on the host beside them: a crash on a real GPU."""
    monkeypatch.setenv("FLASHBSR_CHECK", "1")
    world, step = World(), Step()
    attention = planned(world)
    fake_torch.current = driver.stream()
    batch = step.advance(STEPS[0], 0)
    indices = torch.from_numpy(batch.kv_indices)
    before = driver.calls("cuMemcpyDtoHAsync")
    attention.update(step.lens, kv_indptr=batch.kv_indptr, kv_indices=indices)
    assert driver.calls("cuMemcpyDtoHAsync") == before + 1
    attention.update(STEPS[0], step.tables)
    assert driver.calls("cuMemcpyDtoHAsync") == before + 1
    out = attention.run(world.q[:ROWS], world.cache)
    driver.drain()
    check(world, out, batch, ROWS)


def test_early_starts(driver: Driver, fake_torch: FakeTorch) -> None:
    """The first run behind an update comes to its place early, and waits for what that writes."""
    world, step = World(), Step()
    step.advance(STEPS[0], 0)
    fake_torch.current = driver.stream()
    attention = planned(world)
    for _ in range(2):
        attention.run(world.q[:ROWS], world.cache, kv_lens=step.lens, block_tables=step.tables)
        assert driver.overlap == 3 and driver.programmatic
        attention.run(world.q[:ROWS], world.cache)
        assert driver.overlap == 1
