# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`explain` counts what the lengths imply, agrees with the plan, and says why in words."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import BF16, F16, Case
from flashbsr.engine.explain import _products_of
from flashbsr.engine.plan import Plan
from harness import Device, attention_for, execute
from hypothesis import given
from hypothesis import strategies as st
from reference import Variant, visible

MIXED = Case(
    "mixed", (1, 1, 40, 0), (3000, 30, 300, 7), heads=(8, 2), layout="paged", variant=Variant(True)
)


def attention_of(kv_lens: list[int], q_lens: list[int] | None = None, **task: Any) -> Any:
    """A planned ragged batch of 4 query and 2 KV heads, dims 64 and 32."""
    options = {"causal", "window_left"}
    spec = flashbsr.AttentionSpec(**{k: v for k, v in task.items() if k in options})
    rest = {k: v for k, v in task.items() if k not in options}
    attention = flashbsr.Attention(
        spec,
        flashbsr.TaskInfo(num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=32, **rest),
    )
    qo = None if q_lens is None else cases.indptr(np.array(q_lens))
    attention.plan(flashbsr.Ragged(qo, cases.indptr(np.array(kv_lens))))
    return attention


def test_counts() -> None:
    """Bytes and operations of a batch small enough to count by hand."""
    e = attention_of([10, 12], [3, 2], causal=True, q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    e = e.explain()
    assert e.pairs == (8 + 9 + 10) + (11 + 12)
    assert e.operations == 2 * (64 + 32) * e.pairs * 4
    assert e.kv_bytes == 22 * 2 * (64 + 32)
    assert e.qo_bytes == 5 * 4 * (64 + 32) * 2
    assert e.num_bytes == e.kv_bytes + e.qo_bytes
    assert e.time_s is e.floor_s is e.limit is e.fraction is None
    assert "unknown" in str(e)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), max_size=5),
    st.booleans(),
    st.integers(-1, 90),
)
def test_pairs_and_tokens_are_those_of_the_mask(
    lens: list[tuple[int, int]], causal: bool, window_left: int
) -> None:
    """Against the reference's mask, element by element."""
    q_lens, kv_lens = [n for n, _ in lens], [n for _, n in lens]
    attention = attention_of(kv_lens, q_lens, causal=causal, window_left=window_left)
    masks = [
        visible(Variant(causal=causal, window_left=window_left), q, kv, None) for q, kv in lens
    ]
    e = attention.explain()
    assert e.pairs == sum(int(mask.sum()) for mask in masks)
    seen = [int(mask.any(axis=0).sum()) for mask in masks]
    assert e.kv_bytes == sum(seen) * 2 * (64 + 32) * 4


def test_shared_pages_count_once() -> None:
    """A prefix that requests share is read once; of the last page as far as the longest goes."""
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(num_qo_heads=1, num_kv_heads=1, head_dim_qk=8),
    )
    indices = np.array([7, 2, 7, 2, 5])
    lens = np.array([6, 9])
    attention.plan(flashbsr.Paged(None, np.array([0, 2, 5]), indices, kv_lens=lens, page_size=4))
    assert attention.explain().kv_bytes == (4 + 4 + 1) * 16 * 4


def test_sharing_changes_the_plan_and_not_the_work() -> None:
    """Bytes and pairs are those of the lengths; tiles, splits and words know of the parts."""
    lens = np.array([1200, 1300, 1090, 1500])
    lists = [[*range(64), *range(64 + 50 * b, 50 * b + -(-n // 16))] for b, n in enumerate(lens)]
    seen = {}
    for share in ("auto", "off"):
        attention = flashbsr.Attention(
            flashbsr.AttentionSpec(causal=True),
            flashbsr.TaskInfo(8, 2, 64, num_workers=4),
        )
        layout = flashbsr.Paged(
            np.arange(5) * 2,
            cases.indptr(np.array([len(pages) for pages in lists])),
            np.concatenate(lists),
            kv_lens=lens,
            page_size=16,
        )
        attention.plan(layout, share_prefixes=share)
        seen[share] = attention.explain()
    auto, off = seen["auto"], seen["off"]
    assert (auto.plan.header.num_shared, off.plan.header.num_shared) == (1, 0)
    assert (auto.pairs, auto.kv_bytes) == (off.pairs, off.kv_bytes)
    assert (auto.tiles, off.tiles) == (5 * 2, 4 * 2)
    assert auto.pairs == sum(2 * n - 1 for n in lens)
    assert "shared    1 part of 1024 tokens over 4 requests, saves 3 loads, 60% of KV" in str(auto)
    assert "shared    1 part of 1024 tokens over 4 requests" in str(auto.plan)
    assert "shared" not in str(off)
    assert "shared" not in str(off.plan)
    assert (auto.splits > auto.merges) == (auto.merges > 0)


def test_pairs_of_levels_leave_gaps_out() -> None:
    """Positions between a level that ends inside of a page and the next one are nobody's."""
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(1, 1, 8))
    attention.plan(
        flashbsr.Levels(
            [np.array([0, 5]), np.array([0, 2, 5])],
            [np.array([0, 2]), np.array([0, 1, 3])],
            [np.array([0, 1]), np.array([2, 3, 4])],
            [np.array([3]), np.array([2, 1])],
            page_size=4,
        )
    )
    e = attention.explain()
    assert e.pairs == 7 * 5 + (1 + 2) + (3 + 4 + 5)
    assert e.kv_bytes == (7 + 2 + 5) * 2 * 8 * 4


def test_floor() -> None:
    """The larger of two times, and how much of it was reached."""
    attention = attention_of([1000, 1000])
    e = attention.explain(bandwidth=1e9, flops=1e15, time_s=1.0)
    assert e.limit == "memory"
    assert e.floor_s == e.memory_s == e.num_bytes / 1e9
    assert e.fraction == e.floor_s
    e = attention.explain(bandwidth=1e15, flops=1e6)
    assert e.limit == "products"
    assert e.floor_s == e.product_s == e.operations / 1e6
    assert attention.explain(flops=1e6).limit == "products"
    assert e.fraction is None


@pytest.mark.parametrize("name", ["bandwidth", "flops", "time_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_bad_rates(name: str, value: float) -> None:
    with pytest.raises(flashbsr.FlashbsrError, match=name):
        attention_of([5]).explain(**{name: value})


def test_needs_a_plan() -> None:
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(), flashbsr.TaskInfo(num_qo_heads=1, num_kv_heads=1, head_dim_qk=8)
    )
    with pytest.raises(flashbsr.PlanError):
        attention.explain()


@pytest.mark.parametrize("case", [MIXED.but("f16", dtypes=F16), MIXED.but("bf16", dtypes=BF16)],
                         ids=lambda case: case.name)  # fmt: skip
def test_before_and_after_a_run(case: Case, device: Device) -> None:
    """Every backend: names, agreement with the plan, types of the last run."""
    problem = device.build(case)
    attention = attention_for(problem, device.backend)
    problem.plan(attention)
    before = attention.explain(bandwidth=1e12, flops=1e15)
    execute(problem, attention, device, plan=False)
    after = attention.explain(bandwidth=1e12, flops=1e15)
    for e in (before, after):
        plan = attention.plan_info
        h = plan.header
        assert (e.workers, e.splits, e.merges) == (h.num_workers, h.num_slots, h.num_merges)
        assert e.balance == plan.balance
        assert e.reason == plan.reason
        assert e.reason in str(plan)
        for part in (e.kernel, e.device, e.reason, f"{e.pairs} visible"):
            assert part in str(e)
    assert before.time_s is None
    assert f"q {case.dtypes[0]}" in str(after)
    if device.is_cuda:
        assert after.kernel.startswith(("decode_", "prefill_", "hopper_", "mixed_"))
        assert after.time_s is None
        assert attention.explain().bandwidth
        assert 0 < attention.explain(time_s=1e-3).fraction < 1
    else:
        assert after.kernel == f"cpu_{attention.run_stats()['isa']}"
        assert after.time_s == attention.run_stats()["kernel_s"] > 0
        # Another plan has not been timed.
        problem.plan(attention)
        assert attention.explain().time_s is None


def test_empty_batch() -> None:
    e = attention_of([]).explain(bandwidth=1e9)
    assert (e.num_bytes, e.pairs, e.tiles, e.most_items) == (0, 0, 0, 0)
    assert e.reason == "nothing to do"
    assert str(e)


def with_words(plan: Plan, **words: int) -> Plan:
    """The plan as if another backend's scheduler had made it."""
    buffer = plan.buffer.copy()
    for name, value in words.items():
        buffer[plan.header._fields.index(name)] = value
    return Plan(buffer)


PRICED = {"price": 4096 * 16, "other_price": 4096 * 20, "units_per_us": 4096, "cost_per_kv_row": 0}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ({"policy": 3, **PRICED}, ["whole tiles", "above the mean", "16.0 us", "at least 20.0"]),
        ({"policy": 3, **PRICED, "other_price": 0}, ["whole tiles", "no split would better"]),
        ({"policy": 4, "policy_percent": 80, **PRICED}, ["80 %", "whole 20.0"]),
        ({"policy": 5, "policy_percent": 100, **PRICED}, ["equal parts", "16.0 us"]),
        ({"policy": 6, "policy_percent": 100, **PRICED}, ["what is left", "whole 20.0"]),
    ],
)
def test_reasons_of_priced_cuts(words: dict[str, int], parts: list[str]) -> None:
    plan = with_words(attention_of([100, 4000]).plan_info, **words)
    for part in parts:
        assert part in plan.reason
        assert part in str(plan)


def test_reasons_of_the_other_cuts() -> None:
    assert "disabled" in attention_of([9000], disable_split_kv=True).explain().reason
    assert "multiples of 100 " in attention_of([900], fixed_split_size=100).explain().reason
    split = attention_of([90000, 10]).explain()
    assert "are split" in split.reason
    assert split.merges == 2
    assert "whole tiles" in attention_of([100] * 64).explain().reason


def test_cost_per_split_is_part_of_the_cost() -> None:
    """`Plan.cost`, and with it `balance` and the pictures, counts parts as the scheduler does."""
    plan = attention_of([90000]).plan_info
    dearer = with_words(plan, cost_per_split=1000)
    assert (dearer.cost() - plan.cost() == 1000 * (plan.items["slot"] >= 0)).all()


@pytest.mark.parametrize(
    ("device", "rate"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GB300", None),
    ],
)
def test_table_of_devices(device: str, rate: float | None) -> None:
    assert _products_of(device) == rate


def test_is_a_value() -> None:
    """Fields are there to compute with; a copy with another time has another fraction."""
    e = attention_of([1000]).explain(bandwidth=1e9, time_s=1.0)
    twice = dataclasses.replace(e, time_s=0.5)
    assert twice.fraction == 2 * e.fraction
