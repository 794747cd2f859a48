# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Hopper kernels compiled at run time copy K and V in one way. test_fake_cuda.py runs this file.

What has to be true: a kernel with TMA's code alone is never launched for K and V that TMA does not
copy, whatever is known when it is chosen.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import torch
from flashbsr import errors
from flashbsr.jit.kernel_source import Wish

from fake_cuda.fake import Driver, FakeTorch
from fake_cuda.jit_kernels import SPEC, close, computes, extras, spec, wishes
from fake_cuda.world import DIM, HEADS, KV_HEADS

__all__ = ["wishes"]  # a fixture

pytestmark = pytest.mark.usefixtures("fake_torch", "wishes")

Q_LENS, KV_LENS = [40, 3], [70, 33]


def arrays(page: int | None) -> tuple[Any, Any, Any]:
    """Queries, and K and V of these pages."""
    random = torch.Generator().manual_seed(5)
    lead = (sum(KV_LENS),) if page is None else (sum(-(-n // page) for n in KV_LENS), page)
    shapes = [(sum(Q_LENS), HEADS, DIM), (*lead, KV_HEADS, DIM), (*lead, KV_HEADS, DIM)]
    q, k, v = (torch.randn(*shape, generator=random).half() for shape in shapes)
    return q, k, v


def planned(which: Any, page: int | None, **task: Any) -> Any:
    """Attention with a plan over such arrays."""
    attention = flashbsr.Attention(which, flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, **task))
    plan(attention, page)
    return attention


def plan(attention: Any, page: int | None) -> None:
    qo_indptr = np.cumsum([0, *Q_LENS]).astype(np.int32)
    if page is None:
        attention.plan(flashbsr.Ragged(qo_indptr, np.cumsum([0, *KV_LENS]).astype(np.int32)))
        return
    counts = [-(-n // page) for n in KV_LENS]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    pages = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    lens = np.array(KV_LENS, np.int32)
    attention.plan(flashbsr.Paged(qo_indptr, indptr, pages, kv_lens=lens, page_size=page))


def expected(q: Any, k: Any, v: Any, page: int | None) -> np.ndarray:
    reference = planned(SPEC, page, backend="cpu")
    return reference.run(q.numpy(), (k.numpy(), v.numpy()), **extras(on_gpu=False))


def over_blocks(tag: str, **task: Any) -> Any:
    """Attention with a variant that asks for no positions: blocks have none."""
    text = (
        f"// {tag}\nstruct Halved : VariantBase {{ template <class M> typename M::Float "
        "logits_transform(typename M::Float x, const LogitsAt<M>&) const { return 0.5f * x; } };"
    )
    info = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cuda", kv_dtype="float16", **task)
    return flashbsr.Attention(flashbsr.AttentionSpec.from_source(text), info)


def plan_blocks(attention: Any, tokens: int) -> None:
    """One row of blocks of 16 tokens, the last as short as the matrix."""
    columns = -(-tokens // 16)
    indptr, indices = np.array([0, columns], np.int32), np.arange(columns, dtype=np.int32)
    attention.plan(flashbsr.Bsr(indptr, indices, (40, tokens), (40, 16)))


@pytest.mark.parametrize(
    ("page", "path"),
    [(None, "ragged"), (16, "paged"), (8, "paged"), (24, "paged"), (12, "gather"), (1, "gather")],
)
@pytest.mark.parametrize("types", [{}, {"kv_dtype": "float16"}], ids=["unknown", "known"])
def test_pages_decide(
    driver: Driver, wishes: list[Wish], page: int | None, path: str, types: dict[str, str]
) -> None:
    """At the plan or, where types are not known, at the first run: one kernel is compiled."""
    mine = spec(f"pages {page} {types}")
    name = computes(driver, mine)
    q, k, v = arrays(page)
    attention = planned(mine, page, backend="cuda", **types)
    assert len(wishes) == len(types)
    out = attention.run(q, (k, v), **extras())
    assert [wish.copies for wish in wishes] == ["rows" if path == "gather" else "boxes"]
    assert driver.path == path
    assert driver.kernel.endswith(name + "_gather" * (path == "gather"))
    driver.drain()
    close(out, expected(q, k, v, page))


def test_a_short_last_block_decides(driver: Driver, wishes: list[Wish]) -> None:
    """From plan to plan; what has been compiled is found again."""
    attention = over_blocks("short")
    q = torch.zeros(40, HEADS, DIM).half()
    for tokens, path in ((64, "paged"), (70, "gather"), (72, "paged"), (70, "gather")):
        plan_blocks(attention, tokens)
        k = torch.zeros(tokens, KV_HEADS, DIM).half()
        attention.run(q, (k, k))
        assert driver.path == path
        driver.drain()
    assert [wish.copies for wish in wishes] == ["boxes", "rows"]


def test_strides_decide(driver: Driver, wishes: list[Wish]) -> None:
    """They are known when arrays come: K that TMA cannot copy, and then V."""
    mine = spec("strides")
    computes(driver, mine)
    q, k, v = arrays(16)
    for refused in (k, v):
        attention = planned(mine, 16, backend="cuda", kv_dtype="float16")
        with driver.no_maps_of(refused):
            out = attention.run(q, (k, v), **extras())
        assert driver.path == "gather"
        assert driver.kernel.endswith("_gather")
        driver.drain()
        close(out, expected(q, k, v, 16))
        # Later plans keep it: it takes all arrays.
        plan(attention, 16)
        attention.run(q, (k.clone(), v.clone()), **extras())
        assert driver.path == "gather"
        driver.drain()
    assert [wish.copies for wish in wishes] == ["boxes", "rows"]


def test_a_plan_with_a_capacity_asks_for_the_kernel(driver: Driver, wishes: list[Wish]) -> None:
    """Once: that of its pages. Before it nothing can be asked for, nor a size be told."""
    sizes = {"max_batch_size": 4, "max_q_tokens": 64, "max_kv_pages": 200}
    for page in (16, 4):
        attention = flashbsr.Attention(
            spec(f"workspace {page}"),
            flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cuda", kv_dtype="float16", **sizes),
        )
        with pytest.raises(errors.PlanError):
            attention.workspace_size()
        plan(attention, page)
        assert attention.workspace_size() > 0
    assert [wish.copies for wish in wishes] == ["boxes", "rows"]


def test_a_captured_run_keeps_its_kernel(
    driver: Driver, fake_torch: FakeTorch, wishes: list[Wish]
) -> None:
    """Whose code for copies is that of its plan: others are refused, and so are other arrays."""
    attention = over_blocks("captured", max_batch_size=1, max_q_tokens=40, max_kv_pages=8)
    plan_blocks(attention, 96)
    q, k = torch.zeros(40, HEADS, DIM).half(), torch.zeros(96, KV_HEADS, DIM).half()
    attention.run(q, (k, k))
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream):
        attention.run(q, (k, k))
    with pytest.raises(errors.PlanError, match=r"_gather.*which a captured run has"):
        plan_blocks(attention, 70)
    plan_blocks(attention, 96)
    other = k.clone()
    with driver.no_maps_of(other), pytest.raises(errors.PlanError, match="captured run has"):
        attention.run(q, (other, other))
    driver.drain()
    assert [wish.copies for wish in wishes] == ["boxes", "rows"]


def test_other_families_are_as_they_were(
    driver: Driver, fake_torch: FakeTorch, wishes: list[Wish]
) -> None:
    """Their kernels copy any K and V: what Hopper's need is not asked of them in every run."""
    attention = flashbsr.Attention(
        spec("decode"),
        flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend="cuda", kv_dtype="float16"),
    )
    table = np.array([0, 2, 3]), np.arange(3)
    attention.plan(flashbsr.Paged(None, *table, last_page_len=np.array([5, 12]), page_size=12))
    q, k = torch.zeros(2, HEADS, DIM).half(), torch.zeros(3, 12, KV_HEADS, DIM).half()
    values = extras()
    attention.run(q, (k, k), **values)
    before = driver.calls("cuTensorMapEncodeTiled")
    fake_torch.current = stream = driver.stream()
    with driver.capture(stream):
        attention.run(q, (k, k), **values)  # a plan in a capture would raise
    assert driver.calls("cuTensorMapEncodeTiled") == before
    assert driver.kernel.startswith("decode_")
    assert [wish.copies for wish in wishes] == ["boxes"]
    driver.drain()


def test_kernels_of_the_build_do_both(driver: Driver, wishes: list[Wish]) -> None:
    q, k, v = arrays(12)
    attention = planned(flashbsr.AttentionSpec(), 12, backend="fa3", kv_dtype="float16")
    attention.run(q, (k, v))
    assert driver.path == "gather"
    assert not driver.kernel.endswith("_gather")
    driver.drain()
    assert not wishes
