# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`plot_bsr`: the block-sparse matrix behind a plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashbsr.arrays import to_values
from flashbsr.errors import FlashbsrError, UnsupportedError
from flashbsr.layout.layouts import Bsr

from .style import (
    AMBER,
    GRID,
    INK,
    MUTED,
    SHARED,
    Color,
    count_of,
    kilo,
    load_pyplot,
    owner_colors,
    owner_name,
    request_colors,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashbsr.engine.plan import Plan
    from flashbsr.engine.plan_parts import SharedPart

MAX_COLUMNS = 2048
MAX_LEGEND_PARTS = 12


@dataclass(slots=True)
class _Cells:
    """The matrix by rows: a row's request, and the visible share of every column it touches.

    `owners` says whose items the columns of a row belong to, the request's or a shared part's:
    a number in `colors`. `parts` names the shared parts, whose numbers are the last ones.
    """

    requests: npt.NDArray[np.int64]
    names: list[str]
    shares: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]
    owners: list[npt.NDArray[np.int64]]
    colors: list[Color]
    parts: list[str]
    columns: int
    column_tokens: int
    column_name: str


def _cells_of_layout(layout: Bsr) -> _Cells:
    height, width = layout.block
    for name, drawn in (
        ("block", isinstance(height, (int, np.integer))),
        ("per_head", not layout.per_head),
    ):
        if not drawn:
            raise UnsupportedError(
                name, "rows of any sizes or of each head", "one matrix of blocks; or draw the plan"
            )
    indptr = to_values(layout.indptr, "indptr").astype(np.int64)
    indices = to_values(layout.indices, "indices").astype(np.int64)
    rows, columns = len(indptr) - 1, -(-layout.shape[1] // width)
    if rows != -(-layout.shape[0] // height):
        raise FlashbsrError("indptr", f"{rows} block rows", f"{-(-layout.shape[0] // height)}")
    if indices.size and (indices.min() < 0 or indices.max() >= columns):
        raise FlashbsrError(
            "indices", f"{indices.min()} to {indices.max()}", f"block columns of 0 to {columns - 1}"
        )
    shares = [(indices[a:b], np.ones(b - a)) for a, b in itertools.pairwise(indptr)]
    names = [f"block row {i}" for i in range(rows)]
    owners = [np.full(b - a, row) for row, (a, b) in enumerate(itertools.pairwise(indptr))]
    return _Cells(
        np.arange(rows),
        names,
        shares,
        owners,
        request_colors(rows),
        [],
        columns,
        width,
        f"block column ({width} tokens)",
    )


def cells_of_plan(plan: Plan) -> _Cells:
    """Rows: the requests' row tiles of the plan's items for one KV head, in token order.

    Requests that share stand together, in the order of the shared parts' rows, so that a part is
    one block over the rows of all of them.
    """
    h = plan.header
    items = plan.items[(plan.items["kv_head"] == 0) & (plan.items["request"] < h.num_requests)]
    tiles = {(int(i["request"]), int(i["row_begin"]), int(i["row_count"])) for i in items}
    place = np.full(h.num_requests, len(plan.q_rows))
    request_of = np.repeat(np.arange(h.num_requests), plan.requests["q_len"])
    np.minimum.at(place, request_of[plan.q_rows], np.arange(len(plan.q_rows)))
    parts_of: list[list[int]] = [[] for _ in range(h.num_requests)]
    parts = plan.parts
    for number, part in enumerate(parts):
        for request in part.requests:
            parts_of[request].append(number)
    # A ragged KV has one token per "page"; group tokens so that the picture keeps a sane width.
    wide = 1 if plan.paged else max(1, -(-h.num_kv_rows // MAX_COLUMNS))
    requests, shares, owners = [], [], []
    for request, row_begin, row_count in sorted(tiles, key=lambda t: (place[t[0]], t)):
        r = plan.requests[request]
        first, last = row_begin // h.group_size, (row_begin + row_count - 1) // h.group_size
        own_begin = max([parts[n].own_begin for n in parts_of[request]], default=0)
        columns, share = _share_of_tile(plan, request, (first, last), wide, own_begin)
        owner = [np.full(len(columns), request)]
        for number in reversed(parts_of[request]):
            pages = _pages_of_part(plan, r, parts[number])
            columns, share = np.append(pages, columns), np.append(np.ones(len(pages)), share)
            owner.insert(0, np.full(len(pages), h.num_requests + number))
        requests.append(request)
        shares.append((columns, share))
        owners.append(np.concatenate(owner))
    names = [
        f"r{i}: q {kilo(int(r['q_len']))}, kv {kilo(int(r['kv_len']))}"
        for i, r in enumerate(plan.requests)
    ]
    part_names = [
        f"{owner_name(plan, h.num_requests + i)}: {kilo(p.kv_begin)} to {kilo(p.kv_end)} of "
        f"{len(p.requests)} requests"
        for i, p in enumerate(parts)
    ]
    return _Cells(
        np.asarray(requests, np.int64),
        names,
        shares,
        owners,
        owner_colors(plan),
        part_names,
        -(-h.num_kv_rows // wide),
        h.page_size * wide,
        f"KV page ({h.page_size} tokens)" if plan.paged else f"KV, tokens per column: {wide}",
    )


def _pages_of_part(plan: Plan, request: Any, part: SharedPart) -> npt.NDArray[np.int64]:
    """Pages of a shared part, from the list of a request that has it."""
    size, begin = plan.header.page_size, int(request["kv_begin"])
    pages = plan.kv_indices[begin + part.kv_begin // size : begin + part.own_begin // size]
    return pages.astype(np.int64)


def _share_of_tile(
    plan: Plan, number: int, tokens: tuple[int, int], wide: int, own_begin: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Columns that query tokens [first, last] touch, with the share of (token, key) pairs kept.

    Of what a token sees `own_begin` and what follows count.
    """
    h, request = plan.header, plan.requests[number]
    first, last = tokens
    kv_len, kv_begin = int(request["kv_len"]), int(request["kv_begin"])
    position = plan.first_positions[number] + np.arange(first, last + 1)
    begin, end = plan.visible(position, kv_len)
    begin = np.maximum(begin, own_begin)
    size = h.page_size if plan.paged else wide
    offset = 0 if plan.paged else kv_begin % wide
    blocks = -(-(kv_len + offset) // size)
    low = np.arange(blocks) * size - offset
    overlap = np.minimum(end[:, None], low + size) - np.maximum(begin[:, None], low)
    share = np.clip(overlap, 0, size).sum(0) / (len(position) * size)
    full = np.clip(np.minimum(kv_len, low + size) - np.maximum(low, 0), 1, size) / size
    share = np.minimum(
        share / full, 1.0
    )  # the last page is short: all of what it holds is a full cell
    columns = (
        plan.kv_indices[kv_begin : kv_begin + blocks].astype(np.int64)
        if plan.paged
        else kv_begin // wide + np.arange(blocks)
    )
    return columns[share > 0], share[share > 0]


def plot_bsr(
    plan_or_layout: Plan | Bsr, path: str | Path | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the block-sparse matrix: a row per row tile, a column per KV page or block.

    A cell is filled in its request's colour, lighter where a mask hides part of it; what a shared
    part loads for all of its requests is amber. Columns that several requests read are underlaid;
    the strip on top counts the readers of every column.

    Parameters
    ----------
    plan_or_layout : Plan or Bsr
        For a plan, columns are the physical pages of the cache, so that a page two requests share
        is one column. Custom masks are not drawn, nor those of a layout's blocks.
    path : path-like, optional
        Where to save the figure.
    ax : matplotlib Axes, optional
        Draw here instead of on a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    UnsupportedError
        matplotlib is not installed; a layout with rows of any sizes or with a matrix for each head.
    FlashbsrError
        A layout whose blocks lie outside of its shape.
    """
    plt = load_pyplot("plot_bsr")
    if isinstance(plan_or_layout, Bsr):
        cells = _cells_of_layout(plan_or_layout)
    else:
        cells = cells_of_plan(plan_or_layout)
    rows = len(cells.shares)
    if ax is None:
        _, ax = plt.subplots(
            figsize=(11, min(max(2.8, 1.6 + 0.16 * rows), 9)), layout="constrained"
        )
    assert ax is not None
    bins = min(max(cells.columns, 1), MAX_COLUMNS)
    image = np.ones((max(rows, 1), bins, 3))
    readers: list[set[int]] = [set() for _ in range(max(cells.columns, 1))]
    for row, (columns, _) in enumerate(cells.shares):
        for column in columns:
            readers[column].add(int(cells.requests[row]))
    users = np.fromiter((len(r) for r in readers), np.int64, len(readers))
    place = np.arange(len(readers)) * bins // len(readers)
    image[:, np.unique(place[users > 1])] = tuple(
        int(SHARED[i : i + 2], 16) / 255 for i in (1, 3, 5)
    )
    colors = np.asarray(cells.colors or [(0.0, 0.0, 0.0)])
    for row, (columns, share) in enumerate(cells.shares):
        alpha = (0.3 + 0.7 * share)[:, None]
        target = place[columns]
        image[row, target] = alpha * colors[cells.owners[row]] + (1 - alpha) * image[row, target]
    extent = (-0.5, len(readers) - 0.5, len(image) - 0.5, -0.5)
    ax.imshow(image, aspect="auto", interpolation="nearest", extent=extent, zorder=1)
    _finish_bsr(ax, cells, users)
    if path is not None:
        save(ax, path)
    return ax


def _finish_bsr(ax: Axes, cells: _Cells, users: npt.NDArray[np.int64]) -> None:
    """Cell borders, request labels, the readers strip, the title."""
    rows, columns = len(cells.shares), len(users)
    if columns <= 160:
        ax.vlines(
            np.arange(columns + 1) - 0.5, -0.5, rows - 0.5, color="white", linewidth=0.7, zorder=2
        )
    if rows <= 80:
        ax.hlines(
            np.arange(rows + 1) - 0.5, -0.5, columns - 0.5, color="white", linewidth=0.7, zorder=2
        )
        _join_blocks(ax, cells)
    starts = np.flatnonzero(np.diff(cells.requests, prepend=-1))
    ends = np.append(starts[1:], rows)
    if len(starts) < rows:  # a request of several tiles: say where the next begins
        ax.hlines(starts[1:] - 0.5, -0.5, columns - 0.5, color=INK, linewidth=0.8, zorder=3)
    step = max(1, -(-len(starts) // 32))
    ax.set_yticks(
        ((starts + ends - 1) / 2)[::step], [cells.names[cells.requests[s]] for s in starts[::step]]
    )
    ax.tick_params(axis="y", length=0, labelsize=8.5, colors=INK)
    ax.tick_params(axis="x", length=3, labelsize=8.5, colors=INK)
    ax.set_xlabel(cells.column_name, fontsize=9, color=INK)
    for spine in ax.spines.values():
        spine.set_color(GRID)
    filled = sum(len(c) for c, _ in cells.shares)
    shared = int((users > 1).sum())
    sharing = f"{count_of(shared, 'column')} shared" if shared else "none shared"
    if cells.parts:
        sharing += f", {count_of(len(cells.parts), 'shared part')}"
        _parts_legend(ax, cells)
    titled = _readers_strip(ax, users) if shared else ax
    titled.set_title(
        f"{count_of(rows, 'row tile')} x {count_of(columns, 'column')}: "
        f"{filled / max(rows * columns, 1):.1%} filled, {sharing}",
        loc="left",
        fontsize=11,
        fontweight="bold",
        color=INK,
    )


def _join_blocks(ax: Axes, cells: _Cells) -> None:
    """Cover the borders between rows inside of a shared part: it is one block of them all."""
    first = len(cells.colors) - len(cells.parts)
    for row, (above, below) in enumerate(itertools.pairwise(range(len(cells.shares)))):
        for part in np.unique(cells.owners[above]):
            if part < first or part not in cells.owners[below]:
                continue
            columns = cells.shares[above][0][cells.owners[above] == part]
            ax.hlines(
                np.full(len(columns), row + 0.5),
                columns - 0.5,
                columns + 0.5,
                color=cells.colors[part],
                linewidth=0.9,
                zorder=2.5,
            )


def _parts_legend(ax: Axes, cells: _Cells) -> None:
    """Name the first shared parts."""
    from matplotlib.patches import Patch

    colors = cells.colors[-len(cells.parts) :]
    named = list(zip(colors, cells.parts, strict=True))[:MAX_LEGEND_PARTS]
    handles = [Patch(facecolor=color, label=label) for color, label in named]
    if len(cells.parts) > len(named):
        more = count_of(len(cells.parts) - len(named), "more shared part")
        handles.append(Patch(facecolor="none", label=f"and {more}"))
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.005, 1.02),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=1.4,
        borderaxespad=0.0,
    )


def _readers_strip(ax: Axes, users: npt.NDArray[np.int64]) -> Axes:
    """Count the readers of every column above the matrix; shared columns in amber."""
    figure: Any = ax.figure
    figure.canvas.draw()  # settles the layout, so that the height is known
    inches = ax.get_window_extent().height / figure.dpi
    strip = ax.inset_axes((0.0, 1.0 + 0.06 / inches, 1.0, 0.36 / inches), sharex=ax)
    edges = np.arange(len(users) + 1) - 0.5
    strip.stairs(users, edges, fill=True, color=MUTED)
    strip.stairs(np.where(users > 1, users, 0), edges, fill=True, color=AMBER)
    most = int(users.max())
    strip.set_ylim(0, most)
    strip.set_yticks([most])
    strip.tick_params(axis="x", bottom=False, labelbottom=False)
    strip.tick_params(axis="y", length=0, labelsize=8.5, colors=INK)
    strip.set_yticklabels([f"{most} readers"])
    strip.spines[["top", "right", "left"]].set_visible(False)
    strip.spines["bottom"].set_visible(False)
    return strip
