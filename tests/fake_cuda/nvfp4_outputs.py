# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Outputs in NVFP4 in captured runs, on the fake driver. test_fake_cuda.py runs this file."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors
from kv_codes import NVFP4, encode

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import CAPACITY, DECODE, DIM, HEADS, PAGE, PREFILL, World

pytestmark = pytest.mark.usefixtures("fake_torch")

Out = tuple[torch.Tensor, torch.Tensor]


def outputs() -> Out:
    """Codes and scales of 64 rows, in which nothing is right."""
    codes = torch.full((64, HEADS, DIM // 2), 0x55, dtype=torch.uint8)
    return codes, torch.full((64, HEADS, DIM // 16), 0x55, dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )


def check(world: World, out: Out, batch: Any, rows: int) -> None:
    """The bits that NumPy makes of the CPU's float32, and nothing behind the rows."""
    exact = world.expected(batch, rows, o_dtype="float32")
    for got, want in zip(out, encode(exact, NVFP4), strict=True):
        bits = got.view(torch.uint8).numpy()
        np.testing.assert_array_equal(bits[:rows], want.view(np.uint8))
        assert (bits[rows:] == 0x55).all()


def test_replays_over_later_plans(driver: Driver, fake_torch: FakeTorch) -> None:
    """The largest batch comes last: what lies between kernel and codes has room for it."""
    world, out = World(), outputs()
    attention = world.attention(o_dtype="nvfp4", **CAPACITY)
    attention.plan(world.batch(DECODE[0]))
    fake_torch.current = stream = driver.stream()
    allocations = driver.calls("cuMemAlloc")
    with driver.capture(stream) as graph:
        attention.run(world.q, world.cache, out=out)
    for lens, q_lens, rows in (DECODE, ([], [], 0), PREFILL, ([100] * 8, [8] * 8, 64)):
        for x in out:
            x.view(torch.uint8).fill_(0x55)
        batch = world.batch(lens, q_lens, seed=rows)
        attention.plan(batch)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        check(world, out, batch, rows)
    assert driver.calls("cuMemAlloc") == allocations


def test_a_capture_without_a_capacity_keeps_its_own(driver: Driver, fake_torch: FakeTorch) -> None:
    """Larger plans and runs of the same engine change nothing of what the graph computes."""
    world, out = World(), outputs()
    attention, batch = world.attention(o_dtype="nvfp4"), world.batch(DECODE[0])
    attention.plan(batch)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(world.q[:4], world.cache, out=tuple(x[:4] for x in out))
    attention.plan(world.batch(*PREFILL[:2]))
    attention.run(world.q[:53], world.cache)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    check(world, out, batch, 4)


def test_rows_that_did_not_come_are_zero(driver: Driver, fake_torch: FakeTorch) -> None:
    world, out = World(), outputs()
    attention = world.attention(o_dtype="nvfp4")
    attention.plan(flashbsr.Bounds(np.array([0, 8, 16]), np.full(2, 40), page_size=PAGE))
    fake_torch.current = stream = driver.stream()
    batch = world.batch([30, 9], [2, 3])
    tables = torch.zeros(2, 10, dtype=torch.int32)
    for b in range(2):
        pages = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        tables[b, : len(pages)] = torch.from_numpy(pages)
    attention.run(
        world.q[:16],
        world.cache,
        out=tuple(x[:16] for x in out),
        kv_lens=torch.tensor([30, 9], dtype=torch.int32),
        block_tables=tables,
        qo_indptr=torch.tensor([0, 2, 5], dtype=torch.int32),
    )
    driver.synchronize(stream)
    for x in out:
        bits = x.view(torch.uint8)
        assert not bits[5:16].any()
        bits[5:16] = 0x55
    check(world, out, batch, 5)


def test_rows_of_codes_are_written_eight_bytes_at_a_time() -> None:
    world = World()
    attention = world.attention(o_dtype="nvfp4")
    attention.plan(world.batch(DECODE[0]))
    codes = torch.zeros(4, HEADS, DIM // 2 + 4, dtype=torch.uint8)
    with pytest.raises(errors.ShapeError, match="8-byte aligned rows"):
        attention.run(world.q[:4], world.cache, out=(codes[..., : DIM // 2], outputs()[1][:4]))
