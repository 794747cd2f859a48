# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The scheduler's promises, over random problems, read from the plan's buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import flashbsr
import numpy as np
import pytest
from cases import indptr
from flashbsr.engine.plan import Plan
from harness import DEVICES
from hypothesis import given
from hypothesis import strategies as st
from reference import Variant, visible


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the scheduler sees."""

    lens: tuple[tuple[int, int], ...]  # query, KV
    heads: tuple[int, int]  # KV heads, group
    causal: bool
    window_left: int
    page_size: int | None
    task: tuple[tuple[str, Any], ...]

    def attention(self, **task: Any) -> flashbsr.Attention:
        num_kv_heads, group = self.heads
        return flashbsr.Attention(
            flashbsr.AttentionSpec(causal=self.causal, window_left=self.window_left),
            flashbsr.TaskInfo(
                num_qo_heads=num_kv_heads * group,
                num_kv_heads=num_kv_heads,
                head_dim_qk=16,
                **{**dict(self.task), **task},
            ),
        )

    def plan(self, attention: flashbsr.Attention) -> Plan:
        q_lens, kv_lens = (np.array([n[i] for n in self.lens], np.int32) for i in (0, 1))
        if self.page_size is None:
            attention.plan(flashbsr.Ragged(indptr(q_lens), indptr(kv_lens)))
        else:
            pages = indptr(-(-kv_lens // self.page_size))
            ids = np.arange(pages[-1], dtype=np.int32)[::-1].copy()
            attention.plan(
                flashbsr.Paged(
                    indptr(q_lens), pages, ids, kv_lens=kv_lens, page_size=self.page_size
                )
            )
        return attention.plan_info


LENS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.integers(0, 90)),
        st.one_of(st.integers(0, 40), st.integers(0, 1500)),
    ),
    max_size=7,
).map(tuple)
CUTS = st.one_of(
    st.just(()),
    st.integers(1, 300).map(lambda n: (("fixed_split_size", n),)),
    st.just((("disable_split_kv", True),)),
)
PROBLEMS = st.builds(
    lambda lens, heads, causal, window, page_size, cut, workers, device: Problem(
        lens,
        heads,
        causal,
        window,
        page_size,
        (*cut, ("num_workers", workers), ("backend", device.backend)),
    ),
    LENS,
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 8])),
    st.booleans(),
    st.one_of(st.just(-1), st.integers(0, 200)),
    st.sampled_from([None, 1, 3, 16]),
    CUTS,
    st.one_of(st.none(), st.integers(1, 17)),
    st.sampled_from(DEVICES),
)


def rows_of(problem: Problem) -> list[int]:
    return [q_len * problem.heads[1] for q_len, _ in problem.lens]


@given(PROBLEMS)
def test_covers_exactly_once(problem: Problem) -> None:
    """Each packed row has an owner, and meets each KV position that its mask allows once."""
    plan = problem.plan(problem.attention())
    group = problem.heads[1]
    variant = Variant(causal=problem.causal, window_left=problem.window_left)
    for request, ((q_len, kv_len), rows) in enumerate(
        zip(problem.lens, rows_of(problem), strict=True)
    ):
        allowed = np.repeat(visible(variant, q_len, kv_len, None), group, axis=0)
        for kv_head in range(problem.heads[0]):
            mine = plan.items[
                (plan.items["request"] == request) & (plan.items["kv_head"] == kv_head)
            ]
            count, owned = np.zeros((rows, kv_len), np.int8), np.zeros(rows, bool)
            for item in mine:
                row = slice(item["row_begin"], item["row_begin"] + item["row_count"])
                count[row, item["kv_begin"] : item["kv_end"]] += 1
                owned[row] = True
            assert owned.all()
            assert (count[allowed] == 1).all()
            assert (count <= 1).all()


@given(PROBLEMS)
def test_items_are_within_their_request_and_trimmed(problem: Problem) -> None:
    """Ranges make sense, and no item begins or ends with keys that none of its rows sees."""
    plan = problem.plan(problem.attention())
    rows = rows_of(problem)
    variant = Variant(causal=problem.causal, window_left=problem.window_left)
    for item in plan.items:
        q_len, kv_len = problem.lens[item["request"]]
        begin, end = int(item["row_begin"]), int(item["row_begin"] + item["row_count"])
        assert 0 <= begin < end <= rows[item["request"]]
        assert item["row_count"] <= plan.header.tile_rows
        assert 0 <= item["kv_head"] < problem.heads[0]
        assert 0 <= item["kv_begin"] <= item["kv_end"] <= kv_len
        if item["kv_begin"] < item["kv_end"]:
            group = problem.heads[1]
            seen = visible(variant, q_len, kv_len, None)[begin // group : -(-end // group)]
            keys = np.flatnonzero(seen.any(axis=0))
            assert keys[0] <= item["kv_begin"]
            assert item["kv_end"] <= keys[-1] + 1


@given(PROBLEMS)
def test_merges_contract_their_slots_in_order(problem: Problem) -> None:
    """A split tile's states are consecutive, its parts cover one range from left to right."""
    plan = problem.plan(problem.attention())
    items, merges = plan.items, plan.merges
    assert ((items["slot"] == -1) == (items["merge"] == -1)).all()
    split = items[items["slot"] >= 0]
    assert len(split) == plan.header.num_slots
    at = 0
    for index, merge in enumerate(merges):
        assert merge["state_count"] >= 2
        assert merge["slot"] == at
        assert (merge["part"], merge["part_count"]) == (-1, 0)
        begin, rows = at, merge["row_count"]
        at += merge["state_count"] * rows
        parts = np.sort(split[split["merge"] == index], order="slot")
        assert parts["slot"].tolist() == list(range(begin, at, rows))
        assert (parts["merge_count"] == 1).all()
        for name in ("request", "row_begin", "row_count", "kv_head"):
            assert (parts[name] == merge[name]).all()
        assert (parts["kv_end"][:-1] == parts["kv_begin"][1:]).all()
        assert (parts["kv_begin"] < parts["kv_end"]).all()
    assert at == plan.header.num_partial_rows


@given(PROBLEMS)
def test_queues_are_balanced(problem: Problem) -> None:
    """Each item is in one queue; the longest queue is at most the mean and one largest item."""
    plan = problem.plan(problem.attention())
    h = plan.header
    assert plan.queue_indptr[0] == 0
    assert plan.queue_indptr[-1] == h.num_items == len(plan.items)
    assert (np.diff(plan.queue_indptr) >= 0).all()
    assert sorted(plan.queue_items.tolist()) == list(range(h.num_items))
    cost = np.array([plan.cost(item) for item in plan.items], float)
    queues = np.array([cost[plan.queue(worker)].sum() for worker in range(h.num_workers)])
    assert queues.max() <= queues.mean() + cost.max(initial=0) + 1e-6
    assert (cost > 0).all()
    # Claim order: most expensive first.
    assert (np.diff(cost) <= 1e-6).all()


def test_cost_grows_with_the_work() -> None:
    """The bound above means something only if the cost model does."""
    problem = Problem(
        ((64, 64), (1, 64), (1, 1000)), (1, 1), False, -1, None, (("disable_split_kv", True),)
    )
    plan = problem.plan(problem.attention())
    cost = dict.fromkeys(range(3), 0.0)
    for item in plan.items:
        cost[int(item["request"])] += plan.cost(item)
    assert cost[0] > cost[1]
    assert cost[2] > 3 * cost[1]


@given(PROBLEMS)
def test_sections_fit_the_capacity(problem: Problem) -> None:
    """Contents stay within their capacity, sections within the buffer and apart."""
    h = problem.plan(problem.attention()).header
    assert h.num_requests == len(problem.lens) <= h.max_requests
    assert h.num_items <= h.max_items
    assert h.num_merges <= h.max_merges
    assert h.num_partial_rows <= h.max_partial_rows
    assert h.num_kv_indices <= h.max_kv_indices
    assert h.num_q_tokens == sum(q_len for q_len, _ in problem.lens)
    assert h.max_kv_len == max((kv_len for _, kv_len in problem.lens), default=0)
    sections = [
        (0, 64),
        (64, 16 * h.num_workers),
        (h.off_requests, 8 * h.max_requests),
        (h.off_items, 8 * h.max_items),
        (h.off_queue_indptr, h.num_workers + 1),
        (h.off_queue_items, h.max_items),
        (h.off_merges, 8 * h.max_merges),
        (h.off_kv_indices, h.max_kv_indices),
        (h.off_q_rows, h.max_q_rows),
        (h.off_merge_parts, 4 * h.max_merge_parts),
    ]
    sections.sort()
    for (begin, size), (after, _) in zip(sections, [*sections[1:], (h.total_size, 0)], strict=True):
        assert begin + size <= after


def contents(plan: Plan) -> list[Any]:
    """Everything that a plan says."""
    return [
        plan.header,
        *(
            part.tobytes()
            for part in (
                plan.requests,
                plan.items,
                plan.merges,
                plan.queue_indptr,
                plan.queue_items,
                plan.kv_indices,
            )
        ),
    ]


def capacity_for(*problems: Problem) -> dict[str, int]:
    """The least capacity that serves them all."""
    page_size = problems[0].page_size or 1
    return {
        "max_batch_size": max(len(p.lens) for p in problems) or 1,
        "max_q_tokens": max(sum(q_len for q_len, _ in p.lens) for p in problems) or 1,
        "max_kv_pages": max(sum(-(-n // page_size) for _, n in p.lens) for p in problems) or 1,
    }


# With a fixed split, capacity reserves items for a batch of one request: tiles times splits.
PAIRS = st.tuples(PROBLEMS, LENS).map(
    lambda pair: [
        dataclasses.replace(
            pair[0],
            lens=lens,
            task=tuple((k, max(n, 40) if k == "fixed_split_size" else n) for k, n in pair[0].task),
        )
        for lens in (pair[0].lens, pair[1])
    ]
)


@given(PAIRS)
def test_equal_input_gives_an_equal_plan(problems: list[Problem]) -> None:
    """Also from another object, and from one that has planned something else before."""
    problem, other = problems
    first = contents(problem.plan(problem.attention()))
    assert contents(problem.plan(problem.attention())) == first
    capacity = capacity_for(problem, other)
    used, fresh = problem.attention(**capacity), problem.attention(**capacity)
    other.plan(used)
    assert contents(problem.plan(used)) == contents(problem.plan(fresh))


@given(PAIRS)
def test_capacity_fixes_the_sections(problems: list[Problem]) -> None:
    """Under one capacity the buffer, its offsets and its queues stay, whatever the batch."""
    problem, other = problems
    attention = problem.attention(**capacity_for(problem, other))
    before = problem.plan(attention).header
    size = attention.workspace_size()
    after = other.plan(attention).header
    fixed = [name for name in before._fields if name.startswith(("max_", "off_", "total"))]
    for name in set(fixed) - {"max_kv_len", "max_cost", "max_rows"}:
        assert getattr(before, name) == getattr(after, name)
    assert before.num_workers == after.num_workers
    assert attention.workspace_size() == size


@pytest.mark.parametrize(
    ("capacity", "argument"),
    [("max_batch_size", "qo_indptr"), ("max_q_tokens", "qo_indptr"), ("max_kv_pages", "kv_in")],
)
def test_capacity_is_enforced(capacity: str, argument: str) -> None:
    """A plan that needs the capacity passes, one more does not."""
    problem = Problem(((3, 40), (2, 7), (1, 1)), (2, 2), False, -1, 4, ())
    enough = {"max_batch_size": 3, "max_q_tokens": 6, "max_kv_pages": 13}
    problem.plan(problem.attention(**enough))
    attention = problem.attention(**{**enough, capacity: enough[capacity] - 1})
    with pytest.raises(flashbsr.errors.CapacityError) as error:
        problem.plan(attention)
    assert capacity in str(error.value) or argument in str(error.value)


def test_capacity_by_the_longest_request() -> None:
    """Room for as many of them as there may be, in pages of the first plan."""
    fields = {"max_batch_size": 3, "max_q_tokens": 6}
    longest = Problem(((2, 40),) * 3, (2, 2), False, -1, 16, ())
    attention = longest.attention(**fields, max_kv_len=40)
    pages = longest.plan(attention).header.max_kv_indices
    assert pages == longest.plan(longest.attention(**fields, max_kv_pages=9)).header.max_kv_indices
    uneven = Problem(((1, 110), (1, 5)), (2, 2), False, -1, 16, ())
    assert uneven.plan(attention).header.max_kv_indices == pages
    with pytest.raises(flashbsr.errors.CapacityError, match=r"max_kv_pages: got 10; .*at most 9"):
        Problem(((1, 150),), (2, 2), False, -1, 16, ()).plan(attention)
    with pytest.raises(flashbsr.errors.CapacityError, match=r"max_kv_pages: got 20; .*at most 9"):
        dataclasses.replace(longest, page_size=4, lens=((1, 40), (1, 40))).plan(attention)
    with pytest.raises(flashbsr.errors.FlashbsrError, match=r"max_kv_len: .*beside max_kv_pages"):
        longest.attention(**fields, max_kv_len=40, max_kv_pages=9)
    with pytest.raises(flashbsr.errors.FlashbsrError, match=r"max_q_tokens: .*all three"):
        longest.attention(max_batch_size=3, max_kv_len=40)


def pieces(plan: Plan, request: int) -> list[tuple[int, ...]]:
    """How a request's work was cut."""
    mine = plan.items[plan.items["request"] == request]
    names = ["kv_head", "row_begin", "row_count", "kv_begin", "kv_end"]
    return sorted(zip(*(mine[name].tolist() for name in names), strict=True))


@given(PROBLEMS, LENS, st.integers(1, 300))
def test_fixed_split_is_batch_invariant(problem: Problem, others: Any, split: int) -> None:
    """With `fixed_split_size` the rest of the batch does not change how a request is cut."""
    problem = dataclasses.replace(problem, task=(("fixed_split_size", split),))
    batch = dataclasses.replace(problem, lens=(*others, *problem.lens))
    together = batch.plan(batch.attention(num_workers=5))
    for request, lens in enumerate(problem.lens):
        alone = dataclasses.replace(problem, lens=(lens,))
        plan = alone.plan(alone.attention())
        assert pieces(plan, 0) == pieces(together, len(others) + request)
        for _, _, _, begin, end in pieces(plan, 0):
            # Within one run of `split` positions: a longer prefix does not move the cuts.
            assert end - begin <= split
            assert end == begin or begin // split == (end - 1) // split


@given(PROBLEMS)
def test_disabled_split_never_merges(problem: Problem) -> None:
    plan = dataclasses.replace(problem, task=()).plan(
        problem.attention(disable_split_kv=True, fixed_split_size=None)
    )
    assert plan.header.num_merges == plan.header.num_slots == 0
    assert (plan.items["slot"] == -1).all()


def test_one_long_request_is_split() -> None:
    """The reason to split: one long request among short ones keeps every worker busy."""
    problem = Problem(((1, 50_000), (1, 10), (1, 10)), (1, 1), False, -1, 16, (("num_workers", 8),))
    plan = problem.plan(problem.attention())
    parts = plan.items[plan.items["request"] == 0]
    assert len(parts) >= 8
    assert plan.header.num_merges == 1
    assert plan.balance > 0.9
    assert len(plan.items[plan.items["request"] == 1]) == 1


def test_page_table_and_rows() -> None:
    """The requests and the page table arrive as given; the plan knows what `run` must bring."""
    problem = Problem(((2, 9), (0, 4), (3, 5)), (1, 2), True, -1, 4, ())
    attention = problem.attention()
    attention.plan(
        flashbsr.Paged(
            np.array([0, 2, 2, 5]),
            np.array([0, 3, 4, 6]),
            np.array([7, 2, 9, 0, 3, 1]),
            kv_lens=np.array([9, 4, 5]),
            page_size=4,
        )
    )
    plan = attention.plan_info
    assert plan.requests["q_begin"].tolist() == [0, 2, 2]
    assert plan.requests["q_len"].tolist() == [2, 0, 3]
    assert plan.requests["kv_len"].tolist() == [9, 4, 5]
    starts = plan.requests["kv_begin"].tolist()
    used = [
        plan.kv_indices[start : start + -(-kv_len // 4)].tolist()
        for start, kv_len in zip(starts, (9, 4, 5), strict=True)
    ]
    assert used == [[7, 2, 9], [0], [3, 1]]
    assert plan.header.num_kv_rows == 10  # highest page + 1
    assert plan.header.page_size == 4
    assert plan.paged
    assert plan.causal


def test_printed_plan() -> None:
    """`str` and `repr` name what is in the plan."""
    problem = Problem(((1, 3000), (1, 20)), (2, 4), True, 100, 16, (("fixed_split_size", 32),))
    plan = problem.plan(problem.attention())
    text = str(plan)
    for part in ("page size 16", "causal", "window 100", "2 KV heads", f"{plan.header.num_items}"):
        assert part in text
    assert "2 requests" in repr(plan)


def test_plan_rejects_other_buffers() -> None:
    problem = Problem(((1, 3),), (1, 1), False, -1, None, ())
    buffer = problem.plan(problem.attention()).buffer
    for bad in (buffer[:10], buffer.astype(np.int64), np.zeros(64, np.int32), buffer.tolist()):
        with pytest.raises(flashbsr.FlashbsrError, match="buffer"):
            Plan(bad)
    wrong = buffer.copy()
    wrong[1] = 99
    with pytest.raises(flashbsr.FlashbsrError, match="version 99"):
        Plan(wrong)
