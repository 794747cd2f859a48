# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Shared KV, found or given, changes the plan and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import indptr
from flashbsr.engine.plan import Plan
from harness import CPU, Device
from reference import Variant
from shared import PLAIN, Arrays, Batch, dtype_of, family, planned, random_tree

CAPACITY = {"max_batch_size": 20, "max_q_tokens": 600, "max_kv_pages": 40000}


def assert_shares(plan: Plan, device: Device) -> None:
    """On a GPU that is for the cost model of its kernels to say."""
    assert plan.header.num_shared or device.is_cuda


@pytest.mark.parametrize("seed", range(40))
def test_random_trees(seed: int, device: Device) -> None:
    """Odd pages, empty requests, beginnings within beginnings, any number of workers."""
    rng = np.random.default_rng(seed)
    batch = random_tree(rng)
    variant = Variant(causal=bool(rng.integers(2)))
    task: dict[str, Any] = {"num_workers": int(rng.choice([1, 4, 32]))}
    if rng.integers(2):
        task |= CAPACITY
    arrays = Arrays.of(batch, dtype_of(device), seed)
    attention, _ = planned(arrays, device, variant, **task)
    arrays.check(attention, device, f"tree {seed}", variant)


def test_random_trees_do_share() -> None:
    """The test above means something: most of its batches have parts, some behind others."""
    parts = []
    for seed in range(40):
        arrays = Arrays.of(random_tree(np.random.default_rng(seed)), "float32")
        _, plan = planned(arrays, CPU, num_workers=4)
        parts.append(plan.parts)
    assert sum(bool(p) for p in parts) > 20
    assert sum(any(part.kv_begin for part in p) for p in parts) > 5


SHARED = {
    "plain": PLAIN,
    "causal": Variant(causal=True),
    "wide window": Variant(causal=True, window_left=5000),
    "soft cap": Variant(logits_soft_cap=5.0),
    "sigmoid": Variant(activation="sigmoid", sigmoid_bias=-3.0),
}
APART = {
    "window": Variant(causal=True, window_left=100),
    "rope": Variant(pos_encoding_mode="ROPE_LLAMA"),
    "alibi": Variant(pos_encoding_mode="ALIBI"),
}


@pytest.mark.parametrize("name", [*SHARED, *APART])
@pytest.mark.parametrize("q_len", [1, 7])
def test_variants(name: str, q_len: int, device: Device) -> None:
    """Those that a part can compute share; of the others plans are as they were."""
    variant = (SHARED | APART)[name]
    arrays = Arrays.of(family(q_len), dtype_of(device))
    attention, plan = planned(arrays, device, variant)
    if name in SHARED:
        assert_shares(plan, device)
    else:
        assert plan.header.num_shared == 0
    arrays.check(attention, device, name, variant)


def test_sinks(device: Device) -> None:
    """A sink counts once, not once per part."""
    arrays = Arrays.of(family(3), dtype_of(device))
    attention, plan = planned(arrays, device)
    assert_shares(plan, device)
    sinks = np.linspace(-3, 6, 8).astype(np.float32)
    arrays.check(attention, device, "sinks", sinks=sinks)


def test_masks_are_not_shared(device: Device, rng: np.random.Generator) -> None:
    arrays = Arrays.of(family(3), dtype_of(device))
    masks = [rng.random((3, n)) < 0.6 for n in arrays.batch.kv_lens]
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), arrays.task(device))
    attention.plan(
        arrays.batch.table(), custom_mask=np.concatenate([mask.ravel() for mask in masks])
    )
    assert attention.plan_info.header.num_shared == 0
    arrays.check(attention, device, "mask", masks=masks)
    # The next plan of the same object is free to share again.
    attention.plan(arrays.batch.table())
    assert_shares(attention.plan_info, device)
    arrays.check(attention, device, "without mask")


@pytest.mark.parametrize("task", [{"fixed_split_size": 256}, {"disable_split_kv": True}])
def test_split_policies_are_kept(task: dict[str, Any], device: Device) -> None:
    """Batch invariance: a request's plan does not depend on its neighbours."""
    arrays = Arrays.of(family(), dtype_of(device))
    attention, plan = planned(arrays, device, **task)
    assert plan.header.num_shared == 0
    arrays.check(attention, device, "split")


def test_off(device: Device) -> None:
    """Off is off, for page lists and tables; on a table "auto" finds the same parts."""
    arrays = Arrays.of(family(), dtype_of(device))
    table = arrays.batch.table()
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), arrays.task(device))
    attention.plan(table)
    assert_shares(attention.plan_info, device)
    found = [(p.kv_begin, p.kv_end, p.requests.tolist()) for p in attention.plan_info.parts]
    assert found in ([(0, 2048, [*range(8)])], [])
    attention.plan(table, share_prefixes="off")
    assert not attention.plan_info.parts
    arrays.check(attention, device, "off")
    tables = np.array(arrays.batch.pages, np.int32)
    for share in ("auto", "off"):
        blocks = flashbsr.BlockTable(None, tables, table.kv_lens, page_size=16)
        attention.plan(blocks, share_prefixes=share)
        parts = attention.plan_info.parts
        assert len(parts) == (len(found) if share == "auto" else 0)
        arrays.check(attention, device, f"table {share}")


def test_causality_of_long_appends_limits_what_is_shared(device: Device) -> None:
    """Requests that are all prefix: their own last tokens are not everybody's."""
    batch = family(100, shared=128, own=0)
    batch.kv_lens = [2048] * 8
    arrays = Arrays.of(batch, dtype_of(device))
    variant = Variant(causal=True)
    attention, plan = planned(arrays, device, variant)
    assert_shares(plan, device)
    assert {(p.kv_begin, p.kv_end) for p in plan.parts} <= {(0, (2048 - 99) // 16 * 16)}
    arrays.check(attention, device, "append", variant)


def test_unequal_weights(device: Device) -> None:
    """A part whose weights vanish beside those of a request's own KV, and the other way round."""
    for gain_of_prefix, gain_of_own in ((1e-3, 60.0), (60.0, 1e-3)):
        arrays = Arrays.of(family(), dtype_of(device))
        keys = arrays.kv[:, 0]
        keys[:128] *= gain_of_prefix
        keys[128:] *= gain_of_own
        attention, plan = planned(arrays, device)
        assert_shares(plan, device)
        arrays.check(attention, device, "gains")


def test_repeats_are_equal_bit_for_bit(device: Device) -> None:
    """Whoever finishes last merges: the order of the states is the plan's."""
    arrays = Arrays.of(family(5), dtype_of(device))
    first: list[bytes] = []
    for threads in (1, 2, 5):
        attention, plan = planned(
            arrays, device, **({} if device.is_cuda else {"num_threads": threads})
        )
        assert_shares(plan, device)
        for _ in range(5):
            out, lse = arrays.run(attention, device)
            assert lse is not None
            first = first or [out.tobytes(), lse.tobytes()]
            assert [out.tobytes(), lse.tobytes()] == first


def test_plans_of_one_object_do_not_remember(device: Device) -> None:
    """A capacity's plan after another, larger and smaller, is that of a new object."""
    used = None
    for seed in (3, 8, 21, 8, 3):
        batch = random_tree(np.random.default_rng(seed))
        batch.heads = (8, 2)
        batch.page_size = 16
        batch.kv_lens = [16 * len(pages) for pages in batch.pages]
        arrays = Arrays.of(batch, dtype_of(device), seed)
        fresh, plan = planned(arrays, device, num_workers=8, **CAPACITY)
        used = used or fresh
        used.plan(batch.table())
        again = used.plan_info
        assert again.header == plan.header
        for name in ("owners", "items", "merges", "merge_parts", "q_rows", "queue_items"):
            assert getattr(again, name).tobytes() == getattr(plan, name).tobytes()
        arrays.check(used, device, f"plan {seed}")


@dataclasses.dataclass
class Level:
    """Groups of a level: how many requests each has, and its own tokens."""

    requests: list[int]
    tokens: list[int]


def level_batch(
    levels: list[Level], q_lens: list[int], page_size: int, rng: np.random.Generator
) -> tuple[Batch, list[np.ndarray], list[list[np.ndarray]]]:
    """Pages for every group; the slots that each request sees; the arrays of `Levels`."""
    counts = [[-(-n // page_size) for n in level.tokens] for level in levels]
    order = iter(rng.permutation(sum(map(sum, counts))).tolist())
    arguments: list[list[np.ndarray]] = [[], [], [], []]
    slots: list[list[np.ndarray]] = [[] for _ in q_lens]
    for level, count in zip(levels, counts, strict=True):
        pages = [[next(order) for _ in range(n)] for n in count]
        bounds = indptr(level.requests)
        arguments[0].append(indptr(q_lens)[bounds])
        arguments[1].append(indptr(count))
        arguments[2].append(np.concatenate([np.zeros(0, int), *map(np.array, pages)]).astype("i4"))
        arguments[3].append(np.array([(n - 1) % page_size + 1 if n else 0 for n in level.tokens]))
        groups = Batch(page_size, pages, level.tokens, level.requests).slots()
        for group, (first, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            for request in range(first, end):
                slots[request].append(groups[group])
    seen = [np.concatenate(parts) for parts in slots]
    return Batch(page_size, [[]] * len(q_lens), [len(s) for s in seen], q_lens), seen, arguments


LEVELS = {
    "one": [Level([1, 1, 1], [40, 700, 3])],
    "two": [Level([2, 3], [1024, 640]), Level([1] * 5, [7, 90, 33, 5, 600])],
    "three": [Level([6], [1600]), Level([2, 4], [512, 0]), Level([1] * 6, [5, 9, 16, 80, 7, 44])],
    "partial pages": [
        Level([6], [1601]), Level([3, 3], [519, 7]), Level([1] * 6, [5, 9, 16, 80, 7, 44])
    ],
    "no own": [Level([4], [800]), Level([1] * 4, [0, 17, 0, 40])],
    "nothing": [Level([2], [0]), Level([1, 1], [0, 0])],
    "single requests": [Level([1, 1], [500, 300]), Level([1, 1], [20, 9])],
}  # fmt: skip


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 5])
def test_levels(name: str, causal: bool, page_size: int, device: Device) -> None:
    """Queries see the KV of all their groups, and causality is that of the last level."""
    rng = np.random.default_rng(len(name))
    levels = LEVELS[name]
    own = levels[-1].tokens
    q_lens = [int(n) for n in rng.choice([0, 1, 2, 3, 30], len(own))]
    batch, slots, arguments = level_batch(levels, q_lens, page_size, rng)
    arrays = Arrays.of(batch, dtype_of(device), slots=slots)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=causal), arrays.task(device))
    attention.plan(flashbsr.Levels(*arguments, page_size=page_size))
    masks = None
    if causal:
        masks = []
        for q_len, n, total in zip(q_lens, own, batch.kv_lens, strict=True):
            mask = np.ones((q_len, total), bool)
            mask[:, total - n :] = np.arange(n) <= np.arange(q_len)[:, None] + n - q_len
            masks.append(mask)
    arrays.check(attention, device, name, masks=masks)


@pytest.mark.parametrize("name", APART)
def test_levels_of_what_is_not_shared(name: str, device: Device) -> None:
    """Levels of whole pages are then the requests' own page lists."""
    variant = dataclasses.replace(APART[name], causal=True)
    levels = [Level([6], [800]), Level([2, 4], [512, 64]), Level([1] * 6, [5, 9, 16, 80, 7, 44])]
    q_lens = [1, 5, 2, 80, 0, 3]
    batch, slots, arguments = level_batch(levels, q_lens, 16, np.random.default_rng(1))
    arrays = Arrays.of(batch, dtype_of(device), slots=slots)
    spec = flashbsr.AttentionSpec(**dataclasses.asdict(variant))
    attention = flashbsr.Attention(spec, arrays.task(device))
    attention.plan(flashbsr.Levels(*arguments, page_size=16))
    assert attention.plan_info.header.num_shared == 0
    arrays.check(attention, device, name, variant)


def test_bad_levels(device: Device) -> None:
    """Every error names what is wrong."""
    _, _, good = level_batch(LEVELS["two"], [1] * 5, 16, np.random.default_rng(0))

    def attempt(**change: Any) -> None:
        spec = flashbsr.AttentionSpec(window_left=change.pop("window_left", -1))
        task = flashbsr.TaskInfo(8, 2, 64, backend=device.backend)
        page_size = change.pop("page_size", 16)
        arguments = [list(x) for x in good]
        for where, value in change.items():
            arguments[int(where[1])][int(where[2])] = value
        flashbsr.Attention(spec, task).plan(flashbsr.Levels(*arguments, page_size=page_size))

    attempt()
    # A group of level 0 ends between two groups of level 1; all end before the last query.
    with pytest.raises(flashbsr.IndexRangeError, match=r"qo_indptr(_arr)?\[0\]\[1\]"):
        attempt(_00=np.array([0, 2, 5]), _01=np.array([0, 1, 3, 3, 4, 5]))
    with pytest.raises(flashbsr.IndexRangeError, match=r"qo_indptr(_arr)?\[0\]\[2\]"):
        attempt(_00=np.array([0, 2, 4]))
    with pytest.raises(flashbsr.IndexRangeError, match="last_page_len"):
        attempt(_30=np.array([17, 1]))
    with pytest.raises(flashbsr.IndexRangeError, match="kv_indptr"):
        attempt(_10=np.array([0, 9, 3]))
    with pytest.raises(flashbsr.FlashbsrError, match="page_size"):
        attempt(page_size=None)
    _, _, good = level_batch(LEVELS["partial pages"], [1] * 6, 16, np.random.default_rng(0))
    attempt()
    with pytest.raises(flashbsr.UnsupportedError, match="last_page_len"):
        attempt(window_left=5000)


def test_bad_calls(device: Device) -> None:
    arrays = Arrays.of(family(), dtype_of(device))
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), arrays.task(device))
    with pytest.raises(flashbsr.FlashbsrError, match="share_prefixes"):
        attention.plan(arrays.batch.table(), share_prefixes="yes")
    one = [np.array([0, 1])]
    with pytest.raises(flashbsr.ShapeError, match="kv_indptr"):
        attention.plan(flashbsr.Levels(one, [], one, one, page_size=16))
    with pytest.raises(flashbsr.ShapeError, match="qo_indptr"):
        attention.plan(flashbsr.Levels([], [], [], [], page_size=16))
