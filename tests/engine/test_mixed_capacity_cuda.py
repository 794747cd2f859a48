# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Graphs that hold the kernel for mixed batches, on a GPU; the same on the fake driver is in CI."""

from __future__ import annotations

import flashbsr
import numpy as np
import pytest
from gpu_rig import GpuRig
from harness import DEVICES, framework
from mixed_batches import BATCHES, CAPACITY, PAGE, REQUESTS, Arrays, batch

if not any(device.is_cuda for device in DEVICES):
    pytest.skip("no GPU, or a build or a PyTorch without CUDA", allow_module_level=True)

torch = framework("torch")
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("kernels for mixed batches are of 9.0", allow_module_level=True)


@pytest.mark.parametrize("tile_rows", [128, 192])
@pytest.mark.parametrize("first", ["decodes", "shared", "nothing"])
def test_replays_over_plans_of_all_kinds(first: str, tile_rows: int) -> None:
    rig, arrays = GpuRig(), Arrays()
    q, cache = arrays.q.cuda(), arrays.cache.cuda()
    attention = arrays.attention(backend="cuda", mixed=True, tile_rows=tile_rows, **CAPACITY)
    attention.plan(batch(*BATCHES[first]))
    out = torch.zeros_like(q)
    attention.run(q, cache, out=out)  # loads the kernel
    with rig.capture(rig.streams[0]) as graph:
        attention.run(q, cache, out=out)
    for name, told in BATCHES.items():
        layout = batch(*told)
        attention.plan(layout)
        for _ in range(2):  # counters are as they were
            rig.poison(out)
            rig.replay(graph, rig.streams[0])
            arrays.check(torch.from_numpy(rig.get(out)), layout)
        assert len(attention.plan_info.parts) == (name == "shared"), name


def test_two_kernels_in_a_graph_one_of_which_rests() -> None:
    """As vLLM's steps are replayed: lengths are told within the graph."""
    rig, arrays = GpuRig(), Arrays()
    q, cache = arrays.q[:REQUESTS].cuda(), arrays.cache.cuda()
    engines = [arrays.attention(backend="cuda", mixed=x, **CAPACITY) for x in (False, True)]
    tables = torch.zeros(REQUESTS, 800, dtype=torch.int32, device="cuda")
    lens = torch.zeros(REQUESTS, dtype=torch.int32, device="cuda")
    nobody = np.zeros(REQUESTS + 1, np.int64)
    out = torch.zeros_like(q)

    def plan(name: str) -> flashbsr.Paged:
        shared, own, _ = BATCHES[name]
        layout = batch(shared, own)
        lens.copy_(torch.from_numpy(layout.kv_lens))
        for i, (begin, end) in enumerate(zip(layout.kv_indptr, layout.kv_indptr[1:], strict=False)):
            tables[i, : end - begin] = torch.from_numpy(layout.kv_indices[begin:end]).cuda()
        rest, works = engines if shared else engines[::-1]
        bounds = layout.kv_lens + 100
        works.plan(flashbsr.Bounds(None, bounds, page_size=PAGE, common_prefix=PAGE * shared))
        rest.plan(flashbsr.Bounds(nobody, nobody[1:], page_size=PAGE))
        torch.cuda.synchronize()
        return layout

    def step() -> None:
        for engine in engines:
            engine.update(lens, tables)
        for _ in range(3):  # layers
            for engine in engines:
                engine.run(q, cache, out=out)

    plan("decodes")
    step()
    with rig.capture(rig.streams[0]) as graph:
        step()
    for name in ("shared", "decodes", "shared", "shared", "decodes"):
        layout = plan(name)
        rig.poison(out)
        rig.replay(graph, rig.streams[0])
        arrays.check(torch.from_numpy(rig.get(out)), layout)
