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


class Captured:
    """A decode wrapper in graph mode with a captured run."""

    def __init__(self, driver: Driver, fake_torch: FakeTorch, **options: Any) -> None:
        self.world, self.driver = World(), driver
        buffers = [torch.zeros(n, dtype=torch.int32) for n in (9, 200, 8)]
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            None, "NHD", True, True, *buffers
        )
        self.plan([10, 20], **options)
        self.out = torch.zeros(64, HEADS, DIM, dtype=torch.float16)
        fake_torch.current = self.stream = driver.stream()
        with driver.capture(self.stream) as self.graph:
            self.wrapper.run(self.world.q, self.world.cache, out=self.out)

    def plan(self, lens: list[int], **options: Any) -> flashbsr.Paged:
        batch = self.world.batch(lens)
        self.wrapper.plan(
            batch.kv_indptr, batch.kv_indices, None, HEADS, KV_HEADS, DIM,
            options.pop("page", PAGE),
            seq_lens=batch.kv_lens, **options,
        )  # fmt: skip
        return batch

    def check(self, batch: flashbsr.Paged, count: int) -> None:
        self.driver.replay(self.graph, self.stream)
        self.driver.synchronize(self.stream)
        check(self.world, self.out, batch, count)


SPELLINGS: list[dict[str, Any]] = [
    {"logits_soft_cap": 0.0},
    {"logits_soft_cap": 0},
    {"q_data_type": torch.float16},
    {"q_data_type": "float16", "kv_data_type": torch.float16},
    {"data_type": "half"},
    {"sm_scale": DIM**-0.5},
    {"sm_scale": 1 / DIM**0.5},
    {"rope_theta": 5e5},  # without rotation
    {"pos_encoding_mode": "NONE", "window_left": -1},
]


@pytest.mark.parametrize("spelled", SPELLINGS, ids=str)
@pytest.mark.parametrize("first", [{}, {"q_data_type": "float16", "logits_soft_cap": 0.0}], ids=str)
def test_another_spelling_is_the_same_engine(
    driver: Driver, fake_torch: FakeTorch, first: dict[str, Any], spelled: dict[str, Any]
) -> None:
    """What a replay computes follows the plan, however its options are written."""
    captured = Captured(driver, fake_torch, **first)
    engine = captured.wrapper.attention
    batch = captured.plan([33, 9, 70], **spelled)
    assert captured.wrapper.attention is engine
    captured.check(batch, 3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window_left": 5}, "window_left"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"sm_scale": 0.5}, "sm_scale"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"q_data_type": torch.bfloat16}, "q_data_type"),
        ({"fixed_split_size": 4}, "fixed_split_size"),
        ({"disable_split_kv": True}, "disable_split_kv"),
        ({"q_len_per_req": 2}, "q_len_per_req"),
    ],
)
def test_other_options_than_the_captured_run_has(
    driver: Driver, fake_torch: FakeTorch, options: dict[str, Any], name: str
) -> None:
    """They are refused by name, and nothing has changed: the replay is that of the last plan."""
    captured = Captured(driver, fake_torch)
    batch = captured.plan([33, 9, 70])
    with pytest.raises(errors.PlanError, match="frozen|captured") as caught:
        captured.plan([40, 40, 40], **options)
    assert caught.value.argument == name
    captured.check(batch, 3)
    captured.wrapper.run(captured.world.q, captured.world.cache, out=captured.out)
    captured.driver.synchronize(captured.stream)
    captured.check(captured.plan([5]), 1)


def test_other_options_before_a_capture(driver: Driver, fake_torch: FakeTorch) -> None:
    """Until a run is captured options may change; then they are those of its plan."""
    captured = Captured(driver, fake_torch, window_left=5)
    with pytest.raises(errors.PlanError, match=r"window_left.*captured"):
        captured.plan([10, 20])
    assert captured.wrapper.is_cuda_graph_enabled
    assert captured.wrapper._fixed_batch_size == 8
    assert captured.wrapper._paged_kv_indices_buf.shape == (200,)


def test_forward_in_graph_mode(driver: Driver, fake_torch: FakeTorch) -> None:
    """SGLang's way: the options come with forward, which is captured; steps plan without them."""
    world = World()
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (9, 200, 8)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers)

    def begin(lens: list[int]) -> flashbsr.Paged:
        batch = world.batch(lens)
        last = [(int(n) - 1) % PAGE + 1 for n in batch.kv_lens]
        wrapper.begin_forward(
            batch.kv_indptr, batch.kv_indices, torch.tensor(last, dtype=torch.int32), HEADS,
            KV_HEADS, DIM, PAGE, data_type=torch.float16,
        )  # fmt: skip
        return batch

    begin([10, 20])
    wrapper.forward(world.q[:2], world.cache, sm_scale=0.25)  # warm up
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream) as graph:
        out = wrapper.forward(world.q[:2], world.cache, sm_scale=0.25)
    for lens in ([33, 9], [50, 1]):
        batch = begin(lens)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        reference = flashbsr.Attention(
            flashbsr.AttentionSpec(sm_scale=0.25),
            flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cpu"),
        )
        reference.plan(batch)
        want = reference.run(world.q[:2].numpy(), world.cache.numpy())
        torch.testing.assert_close(out, torch.from_numpy(want), atol=2e-3, rtol=2e-3)
