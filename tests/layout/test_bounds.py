# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of bounds: lengths, pages and queries that come later, over and over."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import flashbsr
import numpy as np
import pytest
from cases import BF16, F16, Case, Problem
from harness import Device, attention_for, compare
from reference import Variant

BOUND = 700
PAGE = 16


def problem_of(device: Device, seed: int, **changes: Any) -> Problem:
    """Four requests, none longer than the bound; one without keys."""
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {"q_lens": (1,) * 4, "heads": (8, 2), "dims": (64, 64), "dtypes": BF16}
    fields |= {"layout": "bounds", "page_size": PAGE, "seed": seed}
    fields["kv_lens"] = (0, BOUND, *(int(n) for n in rng.integers(1, BOUND, 2)))
    return device.build(Case("bounds", **{**fields, **changes}))


def plan(problem: Problem, attention: flashbsr.Attention) -> None:
    """For the bound, whatever the lengths are."""
    lens = np.full(len(problem.kv_lens), BOUND, np.int32)
    queries = None if max(problem.case.q_lens) == 1 else problem.qo_indptr
    attention.plan(flashbsr.Bounds(queries, lens, page_size=PAGE))


def check(problem: Problem, attention: flashbsr.Attention, device: Device, **lengths: Any) -> None:
    """Run, on poisoned outputs, and compare."""
    sent = device.upload(problem)
    out, lse = map(device.put, problem.new_outputs())
    attention.run(sent.q, sent.kv, out=out, lse=lse, **sent.run_options, **lengths)
    problem.kernel = attention.explain().kernel
    compare(problem, device.get(out), device.get(lse))


@pytest.mark.parametrize("task", [{}, {"num_workers": 5}, {"fixed_split_size": 64}])
@pytest.mark.parametrize("q_len", [1, 5, 70])
def test_one_plan_many_lengths(q_len: int, task: dict[str, int], device: Device) -> None:
    """By `run` and by `update`, arrays on the host and on the device, tables and lists of pages."""
    attention: flashbsr.Attention | None = None
    for seed in range(6):
        causal = Variant(causal=True)
        problem = problem_of(device, seed, q_lens=(q_len,) * 4, task=task, variant=causal)
        if attention is None:
            attention = attention_for(problem, device.backend)
            plan(problem, attention)
        put = device.put if seed % 2 else np.asarray
        lens, tables = put(problem.kv_lens), put(problem.block_tables)
        if seed % 3 == 0:
            check(problem, attention, device, kv_lens=lens, block_tables=tables)
            continue
        if seed % 3 == 1:
            attention.update(lens, tables)
        else:
            pages = put(problem.kv_indices), put(problem.kv_indptr)
            attention.update(lens, kv_indices=pages[0], kv_indptr=pages[1])
        check(problem, attention, device)
        check(problem, attention, device)


def test_types_and_strides(device: Device) -> None:
    """int64 as well as int32, and a table that is a part of a wider one."""
    problem = problem_of(device, 1)
    attention = attention_for(problem, device.backend)
    plan(problem, attention)
    rows, width = problem.block_tables.shape
    wide = np.full((rows + 2, 3 * width), cases.GARBAGE, np.int64)
    wide[:rows, :width] = problem.block_tables
    for put in (np.asarray, device.put):
        table = put(wide)[:rows, :width]
        attention.update(put(problem.kv_lens.astype(np.int64)), table)
        check(problem, attention, device)


@pytest.mark.parametrize("lens", [(3, 0, 2, 1), (0, 0, 0, 0), (4, 4, 4, 4), (0, 1, 0, 4)])
@pytest.mark.parametrize("task", [{}, {"num_workers": 5}])
def test_fewer_queries(lens: tuple[int, ...], task: dict[str, int], device: Device) -> None:
    """Rows behind the last query token become 0 and -inf; q may hold anything there."""
    problem = problem_of(device, 3, q_lens=lens, variant=Variant(causal=True), task=task)
    attention = attention_for(problem, device.backend)
    bounds = np.full(4, BOUND, np.int32)
    attention.plan(flashbsr.Bounds(np.arange(5) * 4, bounds, page_size=PAGE))
    sent = device.upload(problem)
    rows = sum(lens)
    padded = np.full((16, *problem.q.shape[1:]), np.nan, np.float32).astype(problem.q.dtype)
    padded[:rows] = problem.q
    larger = dataclasses.replace(problem, q=padded)
    out, lse = map(device.put, larger.new_outputs())
    attention.update(device.put(problem.kv_lens), device.put(problem.block_tables),
                     qo_indptr=device.put(problem.qo_indptr))  # fmt: skip
    attention.run(device.put(padded), sent.kv, out=out, lse=lse)
    found, found_lse = device.get(out), device.get(lse)
    assert (found[rows:].astype(np.float32) == 0).all()
    assert np.isneginf(found_lse[rows:]).all()
    problem.kernel = attention.explain().kernel
    compare(problem, found[:rows], found_lse[:rows])


@pytest.mark.parametrize("task", [{}, {"num_workers": 5}, {"fixed_split_size": 64}])
def test_all_queries_after_fewer(task: dict[str, int], device: Device) -> None:
    """Merges had as many rows as the lengths before: those that were missing then stayed so."""
    problem = problem_of(device, 3, q_lens=(4,) * 4, variant=Variant(causal=True), task=task)
    attention = attention_for(problem, device.backend)
    plan(problem, attention)
    lens, tables = device.put(problem.kv_lens), device.put(problem.block_tables)
    fewer = np.array([0, 1, 1, 4, 6], np.int32)
    attention.update(lens, tables, qo_indptr=device.put(fewer))
    attention.update(lens, tables)
    check(problem, attention, device)


@pytest.mark.parametrize("lens", [(1, 40, 350), (350, 0, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_before_the_first_key(lens: tuple[int, ...], causal: bool, device: Device) -> None:
    """RoPE inside attention: the fewer keys there are, the further before them stand queries."""
    problem = problem_of(
        device, 5, q_lens=(700, 1, 300), kv_lens=lens, dtypes=F16,
        variant=Variant(causal=causal, pos_encoding_mode="ROPE_LLAMA"),
    )  # fmt: skip
    attention = attention_for(problem, device.backend)
    attention.plan(flashbsr.Bounds(problem.qo_indptr, np.full(3, 350), page_size=PAGE))
    attention.update(device.put(problem.kv_lens), device.put(problem.block_tables))
    check(problem, attention, device)


@pytest.mark.parametrize("q_len", [1, 40])
def test_a_table_per_head(q_len: int, device: Device) -> None:
    """Each KV head chooses its own pages and as many as it likes: of the pages that a head reads,
    only its own rows."""
    rng = np.random.default_rng(0)
    batch, heads, group, dim, pages = 3, 4, 2, 64, 50
    lens = rng.integers(0, 300, (batch, heads)).astype(np.int32)
    lens[0, 0], lens[1, 2] = 0, 300
    width = -(-300 // PAGE)
    tables = np.stack([rng.permutation(pages)[:width] for _ in range(batch * heads)])
    tables = tables.reshape(batch, heads, width).astype(np.int32)
    kinds = {"dtypes": F16, "heads": (heads * group, heads), "dims": (dim, dim)}
    case = Case("per_head", (q_len,) * batch, (300,) * batch, **kinds)
    problem = device.build(case)
    cache = (rng.standard_normal((pages, 2, PAGE, heads, dim)) + 0.2).astype(np.float16)
    attention = attention_for(problem, device.backend)
    queries = None if q_len == 1 else problem.qo_indptr
    attention.plan(flashbsr.Bounds(queries, np.full((batch, heads), 300), page_size=PAGE))
    garbage = tables.copy()
    for b in range(batch):
        for h in range(heads):
            garbage[b, h, -(-lens[b, h] // PAGE) :] = cases.GARBAGE
    out, lse = map(device.put, problem.new_outputs())
    attention.run(
        device.put(problem.q), device.put(cache), out=out, lse=lse,
        kv_lens=device.put(lens), block_tables=device.put(garbage),
    )  # fmt: skip
    found, found_lse = device.get(out), device.get(lse)
    for b in range(batch):
        rows = slice(b * q_len, (b + 1) * q_len)
        for h in range(heads):
            n, own = lens[b, h], slice(h * group, (h + 1) * group)
            tokens = cache[tables[b, h]].transpose(0, 2, 1, 3, 4).reshape(-1, 2, heads, dim)[:n]
            one = dataclasses.replace(
                problem,
                case=case.but("one", heads=(group, 1), q_lens=(q_len,), kv_lens=(int(n),)),
                requests=[(problem.q[rows, own], tokens[:, 0, h : h + 1], tokens[:, 1, h : h + 1],
                           None)],
            )  # fmt: skip
            compare(one, found[rows, own], found_lse[rows, own])


def test_trees(device: Device) -> None:
    """A tree hangs on the true end of its request."""
    lens = (9, BOUND, 300)
    parents = np.tile(np.array([-1, 0, 0, 1, 2, 2], np.int32), 3)
    problem = problem_of(device, 5, q_lens=(6,) * 3, kv_lens=lens)
    attention = attention_for(problem, device.backend)
    bounds = np.full(3, BOUND, np.int32)
    layout = flashbsr.Bounds(problem.qo_indptr, bounds, page_size=PAGE)
    attention.plan(layout, tree_parents=parents)
    attention.update(device.put(problem.kv_lens), device.put(problem.block_tables))
    seen = np.zeros((6, 6), bool)
    for token, parent in enumerate(parents[:6]):
        seen[token] = seen[parent] if parent >= 0 else False
        seen[token, token] = True
    masks = [np.concatenate([np.ones((6, n - 6), bool), seen], axis=1) for n in lens]
    problem.requests = [
        (q, k, v, mask) for (q, k, v, _), mask in zip(problem.requests, masks, strict=True)
    ]
    check(problem, attention, device)


def with_prefix(device: Device, count: int, prefix: int, seed: int, absent: tuple[int, ...] = (),
                **changes: Any) -> Problem:  # fmt: skip
    """A problem whose requests begin with the same pages; one has nothing but these.

    Those that are `absent` have no keys.
    """
    rng = np.random.default_rng(seed)
    q_len = changes.get("q_len", 1)
    lens = prefix + q_len + rng.integers(0, 90, count)
    lens[rng.integers(count)] = prefix + q_len
    lens[list(absent)] = 0
    fields: dict[str, Any] = {"q_lens": (q_len,) * count, "kv_lens": tuple(map(int, lens))}
    if count == 64:
        fields["heads"] = (8, 4)  # enough to read that an H200 shares it
    fields |= {name: x for name, x in changes.items() if name != "q_len"}
    problem = problem_of(device, seed, **fields)
    present = [b for b in range(count) if b not in absent]
    shared = problem.block_tables[present[0], : prefix // PAGE]
    _, k, v, _ = problem.requests[present[0]]
    for b in present[1:]:
        problem.block_tables[b, : prefix // PAGE] = shared
        _, other_k, other_v, _ = problem.requests[b]
        other_k[:prefix], other_v[:prefix] = k[:prefix], v[:prefix]
    return problem


@pytest.mark.parametrize(
    ("count", "prefix", "q_len", "options"),
    [(12, 512, 1, {}), (12, 512, 3, {"logits_soft_cap": 9.0})],
)
def test_a_common_prefix(
    count: int, prefix: int, q_len: int, options: dict[str, Any], device: Device
) -> None:
    """Loaded once for all requests, whose lengths change from update to update."""
    attention: flashbsr.Attention | None = None
    for seed in range(2):
        variant = Variant(causal=True, **options)
        problem = with_prefix(device, count, prefix, seed, q_len=q_len, variant=variant)
        if attention is None:
            attention = attention_for(problem, device.backend)
            bounds = np.full(count, prefix + q_len + 100)
            queries = None if q_len == 1 else problem.qo_indptr
            attention.plan(flashbsr.Bounds(queries, bounds, page_size=PAGE, common_prefix=prefix))
        attention.update(device.put(problem.kv_lens), device.put(problem.block_tables))
        check(problem, attention, device)
        check(problem, attention, device)


def test_a_common_prefix_beside_requests_without_keys(device: Device) -> None:
    """As those that pad a CUDA graph: bounds of 0, rows that become zeros, wherever they stand."""
    problem = with_prefix(device, 64, 2560, 0, (0, 31, 62, 63))
    attention = attention_for(problem, device.backend)
    bounds = np.where(problem.kv_lens > 0, 2736, 0)
    attention.plan(flashbsr.Bounds(None, bounds, page_size=PAGE, common_prefix=2560))
    (part,) = attention.plan_info.parts
    assert (part.kv_begin, part.kv_end) == (0, 2560)
    assert sorted(part.requests) == np.flatnonzero(bounds).tolist()
    attention.update(device.put(problem.kv_lens), device.put(problem.block_tables))
    check(problem, attention, device)


def test_a_common_prefix_has_limits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = with_prefix(device, 64, 2560, 0)
    bounds = np.full(64, 2736)
    monkeypatch.setenv("FLASHBSR_CHECK", "1")
    attention = attention_for(problem, device.backend)
    layout = flashbsr.Bounds(None, bounds, page_size=PAGE, common_prefix=2560)
    assert "common_prefix=2560" in repr(layout)
    attention.plan(layout)
    tables = device.put(problem.block_tables)
    short = problem.kv_lens.copy()
    short[5] = 2560
    with pytest.raises(flashbsr.IndexRangeError, match=r"kv_lens\[5\]: got 2560; .*\[2561, 2736\]"):
        attention.update(device.put(short), tables)
    with pytest.raises(flashbsr.UnsupportedError, match="qo_indptr: .*None with common_prefix"):
        attention.update(device.put(problem.kv_lens), tables, qo_indptr=np.arange(65))
    for wrong, message in ((8, "whole pages of 16"), (-16, "whole pages"), (2736, "2735 of req")):
        with pytest.raises(flashbsr.FlashbsrError, match=f"common_prefix: .*{message}"):
            attention.plan(flashbsr.Bounds(None, bounds, page_size=PAGE, common_prefix=wrong))
    with pytest.raises(flashbsr.UnsupportedError, match="common_prefix: .*each KV head"):
        attention.plan(
            flashbsr.Bounds(None, np.full((64, 4), 2736), page_size=PAGE, common_prefix=16)
        )
    attention.plan(layout, share_prefixes="off")
    assert not attention.plan_info.parts


def test_lengths_beyond_their_bounds(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as the bounds; with FLASHBSR_CHECK=1 they are errors."""
    problem = problem_of(device, 4, kv_lens=(BOUND, BOUND, 0, 5))
    lens = np.array([BOUND + 9, 2**31 - 1, -4, 5], np.int32)
    attention = attention_for(problem, device.backend)
    plan(problem, attention)
    attention.update(device.put(lens), device.put(problem.block_tables))
    check(problem, attention, device)
    monkeypatch.setenv("FLASHBSR_CHECK", "1")
    strict = attention_for(problem, device.backend)
    plan(problem, strict)
    for put in (device.put, np.asarray):
        with pytest.raises(
            flashbsr.IndexRangeError, match=rf"kv_lens\[0\]: got {BOUND + 9}; .*700"
        ):
            strict.update(put(lens), put(problem.block_tables))
    strict.update(device.put(problem.kv_lens), device.put(problem.block_tables))
    check(problem, strict, device)


def test_the_first_run_may_bring_another_type(device: Device) -> None:
    """The plan is made again for it, with the same lengths."""
    problem = problem_of(device, 6, dtypes=("bfloat16", "float8_e4m3fn", "bfloat16"))
    attention = attention_for(problem, device.backend)
    plan(problem, attention)
    attention.update(device.put(problem.kv_lens), device.put(problem.block_tables))
    check(problem, attention, device)


def test_refused(device: Device) -> None:
    problem = problem_of(device, 0)
    attention = attention_for(problem, device.backend)
    lens, tables = device.put(problem.kv_lens), device.put(problem.block_tables)
    sent = device.upload(problem)
    with pytest.raises(flashbsr.PlanError, match="update: got no plan; expected a plan of flashb"):
        attention.update(lens, tables)
    plan(problem, attention)
    with pytest.raises(flashbsr.PlanError, match=r"kv_lens: got a plan of Bounds without.*run"):
        attention.run(sent.q, sent.kv)
    with pytest.raises(flashbsr.FlashbsrError, match="block_tables: got None; expected the pages"):
        attention.update(lens)
    for wrong, error, names in (
        ({"kv_lens": problem.kv_lens[:3]}, flashbsr.ShapeError, "kv_lens"),
        ({"kv_lens": problem.kv_lens.astype(np.float32)}, flashbsr.DTypeError, "kv_lens"),
        ({"block_tables": problem.block_tables[:3]}, flashbsr.ShapeError, "block_tables"),
        ({"block_tables": problem.block_tables[0]}, flashbsr.ShapeError, "block_tables"),
        ({"kv_indices": problem.kv_indices}, flashbsr.FlashbsrError, "block_tables"),
        ({"qo_indptr": np.arange(4)}, flashbsr.ShapeError, "qo_indptr"),
    ):
        arguments: dict[str, Any] = {"kv_lens": problem.kv_lens} | {
            "block_tables": problem.block_tables
        }
        with pytest.raises(error) as caught:
            attention.update(**{**arguments, **wrong})
        assert caught.value.argument in names
    with pytest.raises(flashbsr.FlashbsrError, match="kv_lens: got None"):
        attention.run(sent.q, sent.kv, block_tables=tables)
    attention.plan(flashbsr.Ragged(None, np.arange(5)))
    with pytest.raises(flashbsr.PlanError, match="update: got a plan of lengths"):
        attention.update(lens, tables)
    bounds = np.full(4, BOUND, np.int32)
    with pytest.raises(flashbsr.UnsupportedError, match="custom_mask: .*Bounds.*tree_parents"):
        attention.plan(
            flashbsr.Bounds(None, bounds, page_size=PAGE), custom_mask=np.ones(4 * BOUND, bool)
        )
    with pytest.raises(flashbsr.ShapeError, match=r"kv_lens: .*\(batch_size, 2\)"):
        attention.plan(flashbsr.Bounds(None, np.ones((4, 3), np.int32), page_size=PAGE))
    fixed = flashbsr.Attention(
        flashbsr.AttentionSpec(window_left=5), flashbsr.TaskInfo(8, 2, 64, fixed_split_size=64)
    )
    with pytest.raises(flashbsr.UnsupportedError, match="fixed_split_size: .*Bounds and a window"):
        fixed.plan(flashbsr.Bounds(None, bounds, page_size=PAGE))


def test_bad_pages_on_the_host() -> None:
    """The CPU looks at every page that is used."""
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), flashbsr.TaskInfo(4, 2, 64))
    attention.plan(flashbsr.Bounds(None, np.array([64, 64]), page_size=16))
    q, cache = np.ones((2, 4, 64), np.float32), np.ones((4, 2, 16, 2, 64), np.float32)
    table = np.array([[0, 1, -9, -9], [3, 2, 4, 4]])
    attention.run(q, cache, kv_lens=np.array([32, 20]), block_tables=table)
    with pytest.raises(flashbsr.IndexRangeError, match="block_tables: got a negative page"):
        attention.run(q, cache, kv_lens=np.array([33, 20]), block_tables=table)
    with pytest.raises(flashbsr.PlanError, match="without"):
        attention.run(q, cache)
    with pytest.raises(flashbsr.IndexRangeError, match="kv: got 4 pages; expected at least 5"):
        attention.run(q, cache, kv_lens=np.array([32, 40]), block_tables=table)
