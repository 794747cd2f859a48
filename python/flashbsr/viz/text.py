# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`render_lanes`, `render_parts` and `render_bsr`: a plan in a terminal.

In all of them digits and letters are requests; ``#@*%&+=$``, in this order and then again, are
shared parts.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ..terminal import table_lines
from .lanes import spans
from .matrix import cells_of_plan
from .style import Color, count_of, owner_colors, owner_name

if TYPE_CHECKING:
    from flashbsr.engine.plan import Plan

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PART_SYMBOLS = "#@*%&+=$"
MAX_TEXT_LANES = 48
MAX_TEXT_ROWS = 64


def render_lanes(plan: Plan, width: int = 100, *, color: bool = False) -> str:
    """Draw the lanes as text: a character per slice of cost, naming the request.

    Parameters
    ----------
    plan : Plan
    width : int
        Columns of the terminal.
    color : bool
        Colour the slices with 24-bit ANSI escapes.

    Returns
    -------
    str
    """
    lanes = spans(plan)
    end = max([lane[1][-1] for lane in lanes] + [1.0])
    label = len(f"worker {max(len(lanes) - 1, 0)}")
    slots = max(width - label - 10, 16)
    colors = owner_colors(plan)
    lines = []
    for worker, (ids, ends) in enumerate(lanes[:MAX_TEXT_LANES]):
        # The item under the middle of every slice; past the end of the queue there is none.
        where = np.searchsorted(ends, (np.arange(slots) + 0.5) * end / slots, side="right") - 1
        cells = []
        for position in where:
            if position >= len(ids):
                cells.append(" ")
                continue
            owner = int(plan.items[ids[position]]["request"])
            symbol = _symbol(owner, len(plan.requests))
            cells.append(_paint(symbol, colors[owner]) if color else symbol)
        load = ends[-1] / end
        lines.append(f"{f'worker {worker}':<{label}} |{''.join(cells)}| {load:>5.1%}")
    if len(lanes) > MAX_TEXT_LANES:
        lines.append(f"... {len(lanes) - MAX_TEXT_LANES} more workers")
    return "\n".join(lines)


def render_parts(plan: Plan) -> str:
    """List the shared parts, a line each: KV positions, requests, row tiles that load them.

    Parameters
    ----------
    plan : Plan

    Returns
    -------
    str
    """
    parts = plan.parts
    if not parts:
        return "shared parts: none"
    first = len(plan.requests)
    table = [
        (
            f"{_symbol(number, first)} {owner_name(plan, number)}",
            f"KV {part.kv_begin} to {part.kv_end}",
            f"{count_of(len(part.requests), 'request')}: {_ranges(part.requests.tolist())}",
            f"{count_of(part.loads, 'load')} instead of {part.loads_apart}",
            f"{(part.loads_apart - part.loads) * (part.kv_end - part.kv_begin)} tokens saved",
        )
        for number, part in enumerate(parts, first)
    ]
    return "\n".join(["shared parts, of every KV head:", *table_lines(table[0], table[1:])])


def render_bsr(plan: Plan, width: int = 100, *, color: bool = False) -> str:
    """Draw the block-sparse matrix as text: a line per row tile, as `plot_bsr` draws it.

    A character is a KV page of the cache, or a run of them where there are more than columns of the
    terminal, and names whoever loads most of it. ``.``: nobody of this row does.

    Parameters
    ----------
    plan : Plan
    width : int
        Columns of the terminal.
    color : bool
        Colour the cells with 24-bit ANSI escapes.

    Returns
    -------
    str
    """
    cells = cells_of_plan(plan)
    names = [owner_name(plan, int(request)) for request in cells.requests]
    label = max(map(len, names), default=2)
    run = max(1, -(-cells.columns // max(width - label - 3, 16)))
    slots = -(-cells.columns // run)
    size = f"{count_of(len(names), 'row tile')} x {count_of(cells.columns, 'column')}"
    each = "" if run == 1 else f", {run} per character"
    lines = [f"{size}{each}; column: {cells.column_name}"]
    rows = list(zip(names, cells.shares, cells.owners, strict=True))
    for name, (columns, _), owners in rows[:MAX_TEXT_ROWS]:
        count = np.zeros((len(cells.colors) + 1, slots), np.int64)
        np.add.at(count, (owners, columns // run), 1)
        count[-1] = count[:-1].sum(0) == 0
        line = ""
        for owner in count.argmax(0):
            symbol = "." if owner == len(cells.colors) else _symbol(owner, len(plan.requests))
            line += _paint(symbol, cells.colors[owner]) if color and symbol != "." else symbol
        lines.append(f"{name:<{label}} |{line}|")
    if len(rows) > MAX_TEXT_ROWS:
        lines.append(f"... {len(rows) - MAX_TEXT_ROWS} more row tiles")
    return "\n".join(lines)


def _ranges(numbers: list[int]) -> str:
    """[6, 0, 1, 2] -> ``0-2, 6``."""
    runs = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    ends = [(group[0][1], group[-1][1]) for group in (list(run) for _, run in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def _symbol(owner: int, num_requests: int) -> str:
    if owner < num_requests:
        return _SYMBOLS[owner % len(_SYMBOLS)]
    return _PART_SYMBOLS[(owner - num_requests) % len(_PART_SYMBOLS)]


def _paint(symbol: str, color: Color) -> str:
    red, green, blue = (round(255 * c) for c in color)
    return f"\x1b[48;2;{red};{green};{blue};38;2;255;255;255m{symbol}\x1b[0m"
