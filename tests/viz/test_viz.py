# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures say what the plan says: bars, merges, cells and readers are counted against it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flashbsr
import matplotlib.pyplot as plt
import numpy as np
import pytest
from flashbsr.engine.plan import Plan
from flashbsr.viz import (
    plot_bsr,
    plot_plan,
    render_bsr,
    render_lanes,
    render_parts,
    request_colors,
)
from flashbsr.viz.lanes import spans
from flashbsr.viz.matrix import cells_of_plan
from matplotlib.collections import PathCollection, PolyCollection


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def make_plan(
    q_lens: list[int],
    kv_lens: list[int],
    *,
    page_size: int | None = 16,
    shared_pages: int = 0,
    causal: bool = False,
    window_left: int = -1,
    **task: Any,
) -> Plan:
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=causal, window_left=window_left),
        flashbsr.TaskInfo(
            **{
                "num_qo_heads": 8,
                "num_kv_heads": 2,
                "head_dim_qk": 64,
                "q_dtype": "float32",
                "kv_dtype": "float32",
                **task,
            }
        ),
    )
    qo_indptr = np.cumsum([0, *q_lens])
    if page_size is None:
        attention.plan(flashbsr.Ragged(qo_indptr, np.cumsum([0, *kv_lens])))
    else:
        pages = [-(-n // page_size) for n in kv_lens]
        indices, unused = [], shared_pages
        for count in pages:
            common = min(shared_pages, count)
            indices += [*range(common), *range(unused, unused + count - common)]
            unused += count - common
        attention.plan(
            flashbsr.Paged(
                qo_indptr,
                np.cumsum([0, *pages]),
                np.asarray(indices, np.int32),
                kv_lens=np.asarray(kv_lens, np.int64),
                page_size=page_size,
            )
        )
    return attention.plan_info


# fmt: off
PLANS = {
    "decode": {"q_lens": [1, 1, 1], "kv_lens": [512, 33, 20000], "num_workers": 4},
    "prefill": {"q_lens": [300, 7], "kv_lens": [300, 900], "causal": True, "num_workers": 3},
    "ragged": {"q_lens": [40, 1], "kv_lens": [100, 5000], "page_size": None, "num_workers": 2},
    "many workers": {"q_lens": [1] * 16, "kv_lens": [4000] * 16, "num_workers": 64},
    "shared": {"q_lens": [1, 0, 3, 2], "kv_lens": [1300, 1200, 1250, 1111], "shared_pages": 64,
               "causal": True, "num_workers": 4},
    "empty requests": {"q_lens": [0, 3, 0], "kv_lens": [0, 0, 50], "num_workers": 2},
    "no request": {"q_lens": [], "kv_lens": [], "num_workers": 2},
}
# fmt: on


@pytest.fixture(params=PLANS, ids=lambda name: name.replace(" ", "-"))
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_plan(**PLANS[request.param])


def test_lanes_hold_every_item_once(plan: Plan) -> None:
    lanes = spans(plan)
    assert len(lanes) == plan.header.num_workers
    seen = np.concatenate([ids for ids, _ in lanes]) if lanes else np.empty(0)
    assert sorted(seen.tolist()) == list(range(plan.header.num_items))
    ends = [ends[-1] for _, ends in lanes]
    assert max(ends, default=0.0) == plan.header.max_cost
    if plan.header.max_cost:
        assert np.mean(ends) / max(ends) == pytest.approx(plan.balance, rel=1e-3)


def test_plot_plan_draws_bars_and_merges(plan: Plan) -> None:
    ax = plot_plan(plan)
    bars = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_zorder() == 2]
    assert sum(len(c.get_paths()) for c in bars) == plan.header.num_items
    feet = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_zorder() == 3]
    assert sum(len(c.get_paths()) for c in feet) == plan.header.num_slots
    nodes = [c for c in ax.collections if isinstance(c, PathCollection) and c.get_zorder() == 8]
    assert sum(len(c.get_offsets()) for c in nodes) == plan.header.num_merges
    assert f"balance {plan.balance:.3f}" in ax.get_title("left")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_save(tmp_path: Path, suffix: str) -> None:
    plan = make_plan(**PLANS["decode"])
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    before = plt.get_fignums()  # another test's may be open
    for draw in (plot_plan, plot_bsr):
        path = tmp_path / f"{draw.__name__}.{suffix}"
        draw(plan, path)
        assert path.read_bytes().startswith(magic)
    assert plt.get_fignums() == before


def test_save_names_the_path_it_cannot_write(tmp_path: Path) -> None:
    plan = make_plan(**PLANS["decode"])
    for path in (tmp_path / "plan.docx", tmp_path / "missing" / "plan.png"):
        with pytest.raises(flashbsr.FlashbsrError, match="path: got"):
            plot_plan(plan, path)


def test_draws_on_the_axes_given(plan: Plan) -> None:
    before = len(plt.get_fignums())  # another test's may be open
    _, axes = plt.subplots(2)
    assert plot_plan(plan, ax=axes[0]) is axes[0]
    assert plot_bsr(plan, ax=axes[1]) is axes[1]
    assert len(plt.get_fignums()) == before + 1


def brute_force_cells(
    plan: Plan, q_lens: list[int], kv_lens: list[int], causal: bool, window_left: int
) -> set[tuple[int, int, int]]:
    """(request, query token, physical column) of every pair the mask keeps."""
    size = plan.header.page_size
    kept = set()
    for r, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        begin = int(plan.requests["kv_begin"][r])
        for t in range(q_len):
            own = kv_len - q_len + t
            for j in range(kv_len):
                if (causal and j > own) or (window_left >= 0 and j < own - window_left):
                    continue
                page = begin + j // size
                kept.add((r, t, int(plan.kv_indices[page]) if plan.paged else page))
    return kept


@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize(
    ("causal", "window_left"), [(False, -1), (True, -1), (True, 10), (False, 4)]
)
def test_cells_are_what_the_mask_keeps(
    page_size: int | None, causal: bool, window_left: int
) -> None:
    q_lens, kv_lens = [40, 1, 3, 60], [40, 77, 90, 50]
    plan = make_plan(
        q_lens, kv_lens, page_size=page_size, causal=causal, window_left=window_left, num_workers=3
    )
    cells = cells_of_plan(plan)
    group = plan.header.group_size
    tiles = sorted(
        {
            (int(i["request"]), int(i["row_begin"]), int(i["row_count"]))
            for i in plan.items[plan.items["kv_head"] == 0]
        }
    )
    assert [t[0] for t in tiles] == cells.requests.tolist()
    kept = brute_force_cells(plan, q_lens, kv_lens, causal, window_left)
    for (request, row_begin, row_count), (columns, share) in zip(tiles, cells.shares, strict=True):
        tokens = range(row_begin // group, (row_begin + row_count - 1) // group + 1)
        expected = {column for r, t, column in kept if r == request and t in tokens}
        assert set(columns.tolist()) == expected
        assert (share > 0).all()
        assert (share <= 1).all()


def test_unmasked_cells_are_full() -> None:
    plan = make_plan([1, 5], [70, 33], num_workers=2)
    for columns, share in cells_of_plan(plan).shares:
        assert len(columns)
        np.testing.assert_allclose(share, 1.0)


def test_shared_pages_count_their_readers() -> None:
    plan = make_plan([1, 1, 1], [100, 90, 130], shared_pages=4, num_workers=2)
    ax = plot_bsr(plan)
    (strip,) = ax.child_axes
    assert strip.get_yticklabels()[0].get_text() == "3 readers"
    assert "4 columns shared" in strip.get_title("left")


def shared_tree() -> tuple[Plan, list[list[int]]]:
    """Ten requests that share 1024 tokens; 6 to 9, and 1 with 5, have 512 more in common."""
    stem, left, right, unused = [*range(64)], [*range(64, 96)], [*range(96, 128)], 128
    lists = []
    for request in range(10):
        own = [*range(unused, unused + 8 + request)]
        unused += len(own)
        lists.append([*stem, *(left if request > 5 else right if request % 4 == 1 else []), *own])
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(),
        flashbsr.TaskInfo(8, 2, 64, q_dtype="float32", num_workers=4),
    )
    lens = np.array([16 * len(pages) - 5 for pages in lists])
    table = np.cumsum([0, *map(len, lists)]), np.concatenate(lists)
    attention.plan(flashbsr.Paged(np.arange(11) * 3, *table, kv_lens=lens, page_size=16))
    return attention.plan_info, lists


def test_parts_are_blocks_over_the_rows_of_their_requests() -> None:
    """Each column of a row has its owner, and no part is cut in two by rows of others."""
    plan, lists = shared_tree()
    found = [(p.kv_begin, p.kv_end, sorted(p.requests.tolist())) for p in plan.parts]
    assert found == [
        (0, 1024, [*range(10)]),
        (1024, 1536, [6, 7, 8, 9]),
        (1024, 1536, [1, 5]),
    ] or found == [(0, 1024, [*range(10)]), (1024, 1536, [1, 5]), (1024, 1536, [6, 7, 8, 9])]
    cells = cells_of_plan(plan)
    rows_of: dict[int, list[int]] = {}
    for row, (request, (columns, share), owners) in enumerate(
        zip(cells.requests, cells.shares, cells.owners, strict=True)
    ):
        assert columns.tolist() == lists[request]
        np.testing.assert_allclose(share, 1.0)
        ends = [p.kv_end // 16 for p in plan.parts if request in p.requests]
        expected = np.full(len(columns), request)
        for number, part in enumerate(plan.parts, 10):
            if request in part.requests:
                expected[part.kv_begin // 16 : part.kv_end // 16] = number
                rows_of.setdefault(number, []).append(row)
        assert max(ends) >= 64
        np.testing.assert_array_equal(owners, expected)
    for rows in rows_of.values():
        assert rows == [*range(rows[0], rows[0] + len(rows))]
    ax = plot_bsr(plan)
    assert "3 shared parts" in ax.child_axes[0].get_title("left")
    assert [t.get_text()[:2] for t in ax.get_legend().get_texts()] == ["s0", "s1", "s2"]


def test_shared_parts_have_names_of_their_own() -> None:
    plan, _ = shared_tree()
    texts = [t.get_text() for t in plot_plan(plan).get_legend().get_texts()]
    assert next(t for t in texts if t.startswith("s")) == "s0: of 10, kv 0 to 1k"
    assert "r9: q 3, kv 1803" in texts
    lanes = render_lanes(plan, 120)
    assert all(symbol in lanes for symbol in "#@*0123456789")


def test_render_parts() -> None:
    """What `Plan.parts` has, in ranges of requests."""
    plan, _ = shared_tree()
    heading, *lines = render_parts(plan).splitlines()
    assert heading == "shared parts, of every KV head:"
    assert [line[2:6] for line in lines] == ["# s0", "@ s1", "* s2"]
    for line, part in zip(lines, plan.parts, strict=True):
        who = {10: "10 requests: 0-9", 4: "4 requests: 6-9", 2: "2 requests: 1, 5"}
        tokens = part.kv_end - part.kv_begin
        assert f"KV {part.kv_begin} to {part.kv_end} " in line
        assert who[len(part.requests)] in line
        assert f"{part.loads} load instead of {part.loads_apart} " in line
        assert line.endswith(f" {(part.loads_apart - part.loads) * tokens} tokens saved")
    assert render_parts(make_plan(**PLANS["decode"])) == "shared parts: none"


def test_render_bsr_is_the_matrix() -> None:
    """A character per column where they fit: whose it is."""
    plan, lists = shared_tree()
    cells = cells_of_plan(plan)
    _, *lines = render_bsr(plan, 400).splitlines()
    assert len(lines) == len(cells.shares) == 10
    for line, request, owners in zip(lines, cells.requests, cells.owners, strict=True):
        row = np.full(cells.columns, ".")
        row[lists[request]] = np.array([*"0123456789#@*"])[owners]
        assert line == f"r{request} |{''.join(row)}|"


def test_plot_layout() -> None:
    layout = flashbsr.Bsr([0, 2, 3, 3], [0, 4, 4], (40, 80), (16, 16))
    ax = plot_bsr(layout)
    assert "3 row tiles x 5 columns: 20.0% filled" in ax.child_axes[0].get_title("left")
    window = flashbsr.block_mask(lambda b, h, q, kv: kv <= q, 256, 256, block_size=64)
    assert "4 row tiles x 4 columns" in plot_bsr(window.layout()).child_axes[0].get_title("left")
    for bad, match in (
        (flashbsr.Bsr([0, 2, 3], [0, 4, 4], (40, 80), (16, 16)), "^indptr"),
        (flashbsr.Bsr([0, 2, 3, 3], [0, 5, 4], (40, 80), (16, 16)), "^indices"),
        (flashbsr.Bsr([0, 2, 3, 3], [0, 4, 4], (40, 80), ([0, 9, 20, 40], 16)), "^block"),
        (flashbsr.Bsr([0, 2, 3, 3], [0, 4, 4], (40, 80), (16, 16), per_head=True), "^per_head"),
    ):
        with pytest.raises(flashbsr.FlashbsrError, match=match):
            plot_bsr(bad)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(**PLANS["decode"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (plot_plan, plot_bsr):
        with pytest.raises(flashbsr.UnsupportedError, match=r"flashbsr\[viz\]"):
            draw(plan)
    assert render_lanes(plan)
    assert render_bsr(plan)


def test_render_lanes(plan: Plan) -> None:
    lines = render_lanes(plan, 80).splitlines()
    assert len(lines) == min(plan.header.num_workers, 48) + (plan.header.num_workers > 48)
    assert all(len(line) <= 80 for line in lines)
    if plan.header.num_items:
        assert "100.0%" in "".join(lines)


def test_render_bsr(plan: Plan) -> None:
    """Columns that the terminal has no room for are run together; what is read shows."""
    shares = cells_of_plan(plan).shares
    for width in (40, 80):
        heading, *lines = render_bsr(plan, width).splitlines()
        assert heading.startswith(f"{len(shares)} row tile")
        for line, (columns, _) in zip(lines, shares, strict=True):
            assert len(line) <= width
            assert bool(set(line.split("|")[1]) - {"."}) == bool(len(columns))


@pytest.mark.parametrize("render", [render_lanes, render_bsr])
def test_render_in_colour(render: Any) -> None:
    plan = make_plan(**PLANS["decode"])
    text = render(plan, 80, color=True)
    assert "\x1b[48;2;" in text
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert plain == render(plan, 80)


def test_colors_differ() -> None:
    colors = request_colors(32)
    assert len(set(colors)) == 32
    assert all(0.0 <= channel <= 1.0 for color in colors for channel in color)
