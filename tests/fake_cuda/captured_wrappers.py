# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers captured into CUDA graphs; flashinfer/test_wrappers_fake_cuda.py runs this file."""

from __future__ import annotations

from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import pytest
import torch
from flashbsr import errors

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.world import DIM, HEADS, KV_HEADS, PAGE, World, check

pytestmark = pytest.mark.usefixtures("fake_torch")


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_wrappers_in_graph_mode(driver: Driver, fake_torch: FakeTorch, kind: str) -> None:
    """FlashInfer's buffers are the capacity."""
    world = World()
    indptr, indices = (torch.zeros(n, dtype=torch.int32) for n in (9, 200))
    if kind == "decode":
        wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            None, "NHD", True, False, indptr, indices, torch.zeros(8, dtype=torch.int32)
        )
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            None, "NHD", True, indptr, indptr, indices, max_q_tokens=64
        )
    assert wrapper.is_cuda_graph_enabled

    def plan(lens: list[int], q_lens: list[int] | None) -> flashbsr.Paged:
        batch = world.batch(lens, q_lens)
        table = batch.kv_indptr, batch.kv_indices, None
        sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "page_size": PAGE}
        if kind == "decode":
            wrapper.plan(*table, head_dim=DIM, seq_lens=batch.kv_lens, **sizes)
        else:
            wrapper.plan(
                batch.qo_indptr, *table, head_dim_qk=DIM, seq_lens=batch.kv_lens, causal=True,
                **sizes,
            )  # fmt: skip
        return batch

    q_lens = None if kind == "decode" else [3, 4]
    plan([10, 20], q_lens)
    out = torch.zeros(64, HEADS, DIM, dtype=torch.float16)
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        wrapper.run(world.q, world.cache, out=out)
    for lens in ([33, 9], [50] * 8, [1]):
        q_lens = None if kind == "decode" else [min(8, n) for n in lens]
        batch = plan(lens, q_lens)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        check(world, out, batch, len(lens) if q_lens is None else sum(q_lens))
    with pytest.raises(errors.CapacityError):
        plan([1] * 9, None if kind == "decode" else [1] * 9)
