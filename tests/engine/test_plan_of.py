# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""An `Attention` planned for the batch of another: the plan of its own, at the cost of a copy."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import indptr
from flashbsr.engine.plan import Plan
from harness import Device
from reference import Variant
from shared import PLAIN, Arrays, dtype_of, planned, random_tree

# Kinds of layers of one step.
KINDS = {
    "plain": Variant(causal=True),
    "scale": Variant(causal=True, sm_scale=0.3),
    "soft cap": Variant(causal=True, logits_soft_cap=5.0),
    "wide window": Variant(causal=True, window_left=100_000),
    "window": Variant(causal=True, window_left=60),
    "alibi": Variant(causal=True, pos_encoding_mode="ALIBI"),
    "not causal": PLAIN,
}


def same_plans(a: Plan, b: Plan) -> bool:
    """Whether plans are alike to the bit."""
    records = ("requests", "shared", "items", "merges", "merge_parts", "q_rows")
    queues = ("queue_indptr", "queue_items", "kv_indices")
    alike = [np.array_equal(getattr(a, name), getattr(b, name)) for name in (*records, *queues)]
    return all(alike) and a.header == b.header


def both(seed: int, kind: str, device: Device) -> tuple[flashbsr.Attention, Plan, Arrays]:
    """One planned for the batch of another kind, and its own plan: shared prefixes, few workers."""
    rng = np.random.default_rng(seed)
    first = KINDS[list(KINDS)[rng.integers(len(KINDS))]]
    task: dict[str, Any] = {"num_workers": int(rng.choice([1, 4, 32]))} if seed % 2 else {}
    if rng.integers(2):
        task |= {"max_batch_size": 20, "max_q_tokens": 600, "max_kv_pages": 40000}
    if rng.integers(3) == 0:
        task |= {"fixed_split_size": 64}
    arrays = Arrays.of(random_tree(rng), dtype_of(device), seed)
    like, _ = planned(arrays, device, first, **task)
    own, wanted = planned(arrays, device, KINDS[kind], **task)
    attention = flashbsr.Attention(own.spec, own.task)
    attention.plan(like)
    return attention, wanted, arrays


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_its_own(seed: int, kind: str, device: Device) -> None:
    attention, wanted, _ = both(seed, kind, device)
    assert same_plans(attention.plan_info, wanted)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_right(seed: int, kind: str, device: Device) -> None:
    attention, _, arrays = both(seed, kind, device)
    arrays.check(attention, device, f"{kind}, seed {seed}", KINDS[kind])


def ragged(kv_lens: Any) -> flashbsr.Ragged:
    return flashbsr.Ragged(indptr(np.ones(len(kv_lens), np.int32)), indptr(np.array(kv_lens)))


def make(kind: str = "plain", **task: Any) -> flashbsr.Attention:
    spec = flashbsr.AttentionSpec(**dataclasses.asdict(KINDS[kind]))
    return flashbsr.Attention(spec, flashbsr.TaskInfo(4, 2, 16, backend="cpu", **task))


def seconds_of_a_plan(kind: str, like: flashbsr.Attention) -> float:
    attention, seconds = make(kind), []
    for _ in range(20):
        begin = time.thread_time()
        attention.plan(like)
        seconds.append(time.thread_time() - begin)
    return min(seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_a_copy_where_cuts_are_the_same(kind: str) -> None:
    """Seen by its time: 12 us for 4000 requests, 100 where they are cut again."""
    like = make()
    like.plan(ragged([100] * 4000))
    copied = kind not in ("window", "not causal")
    cut_again = seconds_of_a_plan("not causal", like)
    assert (seconds_of_a_plan(kind, like) < cut_again / 2) == copied


@pytest.mark.parametrize("kind", KINDS)
def test_callers_may_write_their_arrays_again(kind: str) -> None:
    """Page ids are read from the caller's array while `plan` runs, and never after it."""
    lens = np.arange(1, 60, dtype=np.int32)
    pages = -(-lens // 4)
    ids = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32)
    layout = flashbsr.Paged(None, indptr(pages), ids, kv_lens=lens, page_size=4)
    like, own, attention = make(), make(kind), make(kind)
    own.plan(layout)
    like.plan(layout)
    ids[:] = -1
    attention.plan(like)
    assert same_plans(attention.plan_info, own.plan_info)


def test_masks_and_trees_come_along() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((n, h, 16)).astype(np.float32) for n, h in ((3, 4), (9, 2), (9, 2))
    )
    layout = flashbsr.Ragged([0, 3], [0, 9])
    for masks in (
        {"custom_mask": rng.integers(0, 2, 27).astype(bool)},
        {"tree_parents": np.array([-1, 0, 0], np.int32)},
    ):
        like, own, attention = make(), make("soft cap"), make("soft cap")
        like.plan(layout, **masks)
        own.plan(layout, **masks)
        attention.plan(like)
        assert np.array_equal(attention.run(q, (k, v)), own.run(q, (k, v)))


def test_it_outlives_the_other() -> None:
    """Nothing is shared afterwards: the other may be planned again, and go."""
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((n, h, 16)).astype(np.float32) for n, h in ((2, 4), (99, 2), (99, 2))
    )
    like, attention = make(), make("soft cap")
    like.plan(ragged([50, 49]))
    attention.plan(like)
    wanted = attention.run(q, (k, v))
    like.plan(ragged([1, 1]))
    del like
    assert np.array_equal(attention.run(q, (k, v)), wanted)


def test_bounds_have_lengths_of_their_own() -> None:
    like, attention = make(), make("soft cap")
    like.plan(flashbsr.Bounds(None, [64, 64], page_size=16))
    attention.plan(like)
    q = np.ones((2, 4, 16), np.float32)
    cache = np.ones((8, 2, 16, 2, 16), np.float32)
    with pytest.raises(flashbsr.PlanError, match="update"):
        attention.run(q, cache)
    tables = np.arange(8, dtype=np.int32).reshape(2, 4)
    out, lse = attention.run(
        q, cache, kv_lens=np.array([3, 64]), block_tables=tables, return_lse=True
    )
    assert (out == 1).all()
    capped = 5 * np.tanh(4 / 5)  # <q, k> / sqrt(16)
    np.testing.assert_allclose(lse[:, 0], capped + np.log([3, 64]), rtol=1e-6)


def test_what_cannot_be() -> None:
    planned_one, empty = make(), make()
    planned_one.plan(ragged([5]))
    with pytest.raises(flashbsr.PlanError, match="without a plan"):
        make().plan(empty)
    with pytest.raises(flashbsr.FlashbsrError, match="itself"):
        planned_one.plan(planned_one)
    with pytest.raises(flashbsr.FlashbsrError, match="masks"):
        make().plan(planned_one, custom_mask=np.ones(5, bool))
    with pytest.raises(flashbsr.FlashbsrError, match="share_prefixes"):
        make().plan(planned_one, share_prefixes="off")
    small = make(max_batch_size=1, max_q_tokens=4, max_kv_pages=100)
    planned_one.plan(ragged([5, 6]))
    with pytest.raises(flashbsr.CapacityError, match="max_batch_size"):
        small.plan(planned_one)
    with pytest.raises(flashbsr.PlanError, match="no plan"):
        small.run(np.ones((2, 4, 16), np.float32), (np.ones((11, 2, 16), np.float32),) * 2)


def test_layouts_that_a_spec_refuses_are_refused() -> None:
    like = make("not causal")
    like.plan(flashbsr.Bsr([0, 1], [0], (1, 4), (1, 4)))
    with pytest.raises(flashbsr.UnsupportedError, match="causal"):
        make().plan(like)
    trees = make()
    trees.plan(flashbsr.Ragged([0, 2], [0, 9]), tree_parents=[-1, 0])
    with pytest.raises(flashbsr.UnsupportedError, match="window"):
        make("window").plan(trees)


def test_heads_with_tables_of_their_own_need_as_many_heads() -> None:
    like = make()
    like.plan(flashbsr.Bounds(None, np.full((1, 2), 64), page_size=16))
    other = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(4, 4, 16, backend="cpu")
    )
    with pytest.raises(flashbsr.ShapeError, match="num_kv_heads"):
        other.plan(like)


def test_two_threads_in_a_circle() -> None:
    """Each plans for the other's batch: no deadlock, and a plan is one of the two."""
    a, b = make(), make("soft cap")
    a.plan(ragged([30]))
    b.plan(ragged([40]))

    def follow(one: flashbsr.Attention, other: flashbsr.Attention) -> None:
        for _ in range(300):
            one.plan(other)

    threads = [threading.Thread(target=follow, args=pair, daemon=True) for pair in ((a, b), (b, a))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    lengths = {int(x.plan_info.requests["kv_len"][0]) for x in (a, b)}
    assert lengths <= {30, 40}
