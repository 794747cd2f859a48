# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Captured runs by the kernel for mixed batches, on the fake driver of an H200.

test_fake_cuda.py runs this file.
"""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors
from mixed_batches import BATCHES, CAPACITY, PAGE, REQUESTS, Arrays, batch

from fake_cuda.fake import Driver, FakeTorch

pytestmark = pytest.mark.usefixtures("fake_torch")


@pytest.mark.parametrize("first", ["decodes", "shared", "chunks beside decodes", "nothing"])
@pytest.mark.parametrize("tile_rows", [None, 128, 192])
def test_replays_over_plans_of_all_kinds(
    driver: Driver, fake_torch: FakeTorch, first: str, tile_rows: int | None
) -> None:
    """One kernel, one grid, the same places of the plan's sections, whatever was captured."""
    arrays = Arrays()
    attention = arrays.attention(backend="cuda", mixed=True, tile_rows=tile_rows, **CAPACITY)
    attention.plan(batch(*BATCHES[first]))
    kernel, size = attention._engine.kernel_name(), attention.workspace_size()
    assert kernel == f"mixed_sm90a_d128_f16_r{tile_rows or 128}_plain"
    out = torch.zeros_like(arrays.q)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(arrays.q, arrays.cache, out=out)
    allocations, grids = driver.calls("cuMemAlloc"), set()
    for name, told in BATCHES.items():
        layout = batch(*told)
        attention.plan(layout)
        assert attention._engine.kernel_name() == kernel
        assert attention.workspace_size() == size
        out.fill_(np.nan)
        driver.replay(graph, stream)
        driver.drain()
        grids.add(driver.grid)
        arrays.check(out, layout)
        assert len(attention.plan_info.parts) == (name == "shared"), name
    assert len(grids) == 1
    assert driver.calls("cuMemAlloc") == allocations


@pytest.mark.parametrize("first", ["decodes", "shared"])
def test_bounds(driver: Driver, fake_torch: FakeTorch, first: str) -> None:
    """As vLLM's steps: lengths and tables are told on the device, of some requests none."""
    arrays = Arrays()
    attention = arrays.attention(backend="cuda", mixed=True, **CAPACITY)
    tables = torch.zeros(REQUESTS, 800, dtype=torch.int32)
    lens = torch.zeros(REQUESTS, dtype=torch.int32)
    out = torch.zeros_like(arrays.q)

    def plan(name: str) -> flashbsr.Paged:
        shared, own, _ = BATCHES[name]
        layout = batch(shared, own)
        for i, (begin, end) in enumerate(zip(layout.kv_indptr, layout.kv_indptr[1:], strict=False)):
            tables[i, : end - begin] = torch.from_numpy(layout.kv_indices[begin:end])
        lens.zero_()
        lens[: len(own)] = torch.from_numpy(layout.kv_lens)
        bounds = np.zeros(REQUESTS, np.int64)
        bounds[: len(own)] = layout.kv_lens + 100
        # Who has no keys shares nothing.
        common = PAGE * shared if len(own) == REQUESTS else 0
        attention.plan(flashbsr.Bounds(None, bounds, page_size=PAGE, common_prefix=common))
        attention.update(lens, tables)
        return layout

    plan(first)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        attention.run(arrays.q[:REQUESTS], arrays.cache, out=out[:REQUESTS])
    for name in ("decodes", "shared", "one", "shared", "short"):
        layout = plan(name)
        driver.synchronize(None)
        driver.replay(graph, stream)
        driver.drain()
        arrays.check(out, layout)
        assert (len(attention.plan_info.parts) > 0) == (name == "shared")


def test_engines_that_share_a_plan(driver: Driver, fake_torch: FakeTorch) -> None:
    """The plan of one is another's, with its capacity."""
    arrays = Arrays()
    engines = [
        arrays.attention(backend="cuda", mixed=True, **CAPACITY),
        arrays.attention(backend="cuda", mixed=True, **CAPACITY),
        arrays.attention(backend="cuda", **CAPACITY),
    ]
    fake_torch.current = stream = driver.stream()
    for name in ("shared", "decodes", "chunks beside decodes"):
        layout = batch(*BATCHES[name])
        engines[0].plan(layout)
        for other in engines[1:]:
            other.plan(engines[0])
        for engine in engines:
            out = torch.full_like(arrays.q, np.nan)
            rows = int(layout.qo_indptr[-1]) if layout.qo_indptr is not None else REQUESTS
            engine.run(arrays.q[:rows], arrays.cache, out=out[:rows])
            driver.synchronize(stream)
            arrays.check(out, layout)


def test_what_it_does_not_do(driver: Driver) -> None:
    arrays = Arrays()
    layout = batch(*BATCHES["decodes"])
    message = r"^mixed: got True in cuda:0.*at most 8 query heads"
    for task in ({"fixed_split_size": 512}, {"disable_split_kv": True}, {"kv_dtype": "int8"}):
        attention = arrays.attention(
            backend="cuda", mixed=True, **{"q_dtype": "float16", **task}, **CAPACITY
        )
        with pytest.raises(errors.UnsupportedError, match=message):
            attention.plan(layout)
    many = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(18, 2, 128, kv_dtype="float16", backend="cuda", mixed=True, **CAPACITY),
    )
    with pytest.raises(errors.UnsupportedError, match=message):
        many.plan(layout)
    capped = flashbsr.Attention(
        flashbsr.AttentionSpec(logits_soft_cap=30.0),
        flashbsr.TaskInfo(8, 2, 128, kv_dtype="float16", backend="cuda", mixed=True, **CAPACITY),
    )
    with pytest.raises(errors.UnsupportedError, match=message):
        capped.plan(layout)
    masked = arrays.attention(backend="cuda", mixed=True, **CAPACITY)
    one = batch(0, [5])
    with pytest.raises(errors.UnsupportedError, match=message):
        masked.plan(one, custom_mask=np.ones(5, bool))
    with pytest.raises(errors.UnsupportedError, match=r"^mixed: got True in host memory"):
        arrays.attention(backend="cpu", mixed=True, **CAPACITY).plan(one)
    with pytest.raises(errors.FlashbsrError, match=r"^mixed.*without a capacity"):
        arrays.attention(mixed=True)
