# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What plans say of KV heads that are read in pairs; test_fake_cuda.py runs it."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr.warm import warm

from fake_cuda.fake import Driver, FakeTorch


def planned(
    q_len: int = 1,
    heads: tuple[int, int] = (32, 8),
    count: int = 4,
    kv_len: int = 8192,
    **task: Any,
) -> flashbsr.Attention:
    """Requests over packed codes."""
    fields = {"q_dtype": "bfloat16", "kv_dtype": "int4", "backend": "cuda"} | task
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(*heads, 128, **fields)
    )
    steps = np.arange(count + 1)
    attention.plan(flashbsr.Ragged(steps * q_len, steps * kv_len))
    return attention


def pairs(**case: Any) -> bool:
    """Whether KV heads go in pairs."""
    return planned(**case).plan_info.header.heads_of_item == 2


def test_a_pair_is_a_head_of_the_plan_and_not_of_what_it_says() -> None:
    attention = planned(kv_len=65536)
    said, header = attention.explain(), attention.plan_info.header
    assert (header.num_kv_heads, header.group_size, header.heads_of_item) == (4, 8, 2)
    assert "32 query / 8 KV heads" in str(said)
    assert "32 query / 8 KV heads" in str(attention.plan_info)
    assert said.kv_bytes == 4 * 65536 * 8 * 2 * 64
    assert said.operations == 4 * 65536 * 32 * 2 * 256


@pytest.mark.parametrize(("q_len", "heads", "family"), [
    (1, (32, 8), "decode_pairs_"), (1, (8, 8), "decode_pairs_"), (2, (16, 8), "decode_pairs_"),
    (2, (32, 8), "decode_scaled_"), (1, (64, 8), "decode_scaled_"), (1, (24, 8), "decode_scaled_"),
    (1, (4, 1), "decode_scaled_"), (1, (12, 3), "decode_scaled_"),
], ids=str)  # fmt: skip
def test_which_heads_go_in_pairs(q_len: int, heads: tuple[int, int], family: str) -> None:
    attention = planned(q_len, heads, kv_len=65536)
    assert attention._engine.kernel_name().startswith(family)
    header = attention.plan_info.header
    assert header.heads_of_item == (2 if family == "decode_pairs_" else 1)
    assert header.num_kv_heads * header.heads_of_item == heads[1]


def test_when_heads_go_in_pairs() -> None:
    """With a pair for every SM, or enough to read that merges do not matter, and as it lies."""
    assert pairs(count=33, kv_len=16)
    assert not pairs(count=32, kv_len=16)
    assert pairs(count=1, kv_len=65536)
    assert not pairs(count=1, kv_len=8192)
    assert pairs(count=33, kv_len=16, kv_layout="HND")
    assert pairs(count=16, kv_len=8192)
    assert not pairs(count=16, kv_len=8192, kv_layout="HND")
    assert pairs(count=1, kv_len=1 << 20, kv_layout="HND")
    room = {"max_batch_size": 4, "max_q_tokens": 4, "max_kv_len": 1 << 20}
    assert pairs(**room)
    assert not pairs(**room, kv_layout="HND")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_fixed_splits_have_one_kernel_whatever_the_batch(kv_layout: str) -> None:
    names = set()
    for count, kv_len in ((1, 16), (1, 1 << 20), (64, 8192), (2000, 16)):
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(),
            flashbsr.TaskInfo(
                32, 8, 128, q_dtype="bfloat16", kv_dtype="int4", backend="cuda",
                kv_layout=kv_layout, fixed_split_size=512,
            ),
        )  # fmt: skip
        attention.plan(flashbsr.Ragged(None, np.arange(count + 1) * kv_len))
        names.add(attention._engine.kernel_name().split("_sm90")[0])
    assert names == {"decode_pairs" if kv_layout == "NHD" else "decode_scaled"}


def test_all_kernels_are_warmed() -> None:
    task = flashbsr.TaskInfo(32, 8, 128, q_dtype="bfloat16", kv_dtype="int4", backend="cuda")
    for page_size in (None, 16):
        names = warm(flashbsr.AttentionSpec(), task, [1], page_size)
        families = [name.split("_sm90")[0] for name in names]
        assert families == ["decode_scaled", "decode_pairs", "decode_pairs_gather"]
    room = {"max_batch_size": 8, "max_q_tokens": 8, "max_kv_len": 64}
    task = dataclasses.replace(task, **room)
    names = warm(flashbsr.AttentionSpec(), task, [1], 16)
    assert [name.split("_sm90")[0] for name in names] == ["decode_pairs", "decode_pairs_gather"]
    (name,) = warm(flashbsr.AttentionSpec(), task, [1], 1)
    assert name.startswith("decode_pairs_gather_")


def test_no_pairs_of_codes_in_bytes() -> None:
    for kv_dtype in ("int8", "float8_e4m3fn", "bfloat16"):
        assert not pairs(count=64, kv_dtype=kv_dtype)


def test_the_workspace_of_a_capacity_holds_every_plan() -> None:
    task = {"max_batch_size": 64, "max_q_tokens": 64, "max_kv_len": 32768}
    attention = planned(**task)
    header = attention.plan_info.header
    assert header.heads_of_item == 2
    room = attention.workspace_size()
    rng = np.random.default_rng(0)
    for _ in range(20):
        count = int(rng.integers(1, 65))
        lens = np.r_[0, np.cumsum(rng.integers(0, 32768, count))]
        attention.plan(flashbsr.Ragged(np.arange(count + 1), lens))
        assert attention.workspace_size() == room
        assert attention.plan_info.header.num_partial_rows <= header.max_partial_rows


@pytest.mark.parametrize("apart", [False, True])
def test_arrays_decide_in_a_capture(driver: Driver, fake_torch: FakeTorch, apart: bool) -> None:
    """Rows of scales that lie apart are no boxes, which the first run says. Others are replayed."""
    rng = np.random.default_rng(7)
    pages, size, heads, dim = 30, 16, (8, 2), 128
    q = rng.standard_normal((4, heads[0], dim)).astype(np.float32)
    codes = rng.integers(0, 256, (2, pages, size, heads[1], dim // 2), np.uint8)
    scales = rng.random((2, pages, size, heads[1], 4 if apart else 2)).astype(np.float32)[..., :2]
    room = {"max_batch_size": 4, "max_q_tokens": 4, "max_kv_pages": pages}
    task = {"q_dtype": "float16", "kv_dtype": "int4"}
    spec = flashbsr.AttentionSpec()
    attention = flashbsr.Attention(
        spec, flashbsr.TaskInfo(*heads, dim, backend="cuda", **task, **room)
    )
    on_cpu = flashbsr.Attention(spec, flashbsr.TaskInfo(*heads, dim, backend="cpu", **task))
    queries, out = (torch.from_numpy(x).half() for x in (q, np.zeros_like(q)))
    k, v, k_scale, v_scale = (torch.from_numpy(x) for x in (*codes, *scales))
    fake_torch.current = stream = driver.stream()
    graph = None
    for lens in ([100, 7, 160, 33], [1, 90, 0, 64], [16, 16, 130, 2]):
        counts = [-(-n // size) for n in lens]
        layout = flashbsr.Paged(
            None, np.cumsum([0, *counts]), rng.permutation(pages)[: sum(counts)], page_size=size,
            kv_lens=np.array(lens),
        )  # fmt: skip
        attention.plan(layout)
        if graph is None:
            assert attention._engine.kernel_name().startswith("decode_pairs_sm90_")
            with driver.capture(stream) as graph:
                attention.run(queries, (k, v), out=out, k_scale=k_scale, v_scale=v_scale)
            assert ("_gather_" in driver.kernel) == apart
        driver.replay(graph, stream)
        driver.synchronize(stream)
        on_cpu.plan(layout)
        expected = on_cpu.run(
            q.astype(np.float16), tuple(codes), k_scale=scales[0], v_scale=scales[1]
        )
        np.testing.assert_allclose(
            out.numpy().astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-2
        )
