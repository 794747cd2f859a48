# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`render_lanes`: the lanes of a plan in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .lanes import spans
from .style import Color, owner_colors

if TYPE_CHECKING:
    from flashbsr.plan import Plan

_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PART_SYMBOLS = "#@*%&+=$"
MAX_TEXT_LANES = 48


def render_lanes(plan: Plan, width: int = 100, *, color: bool = False) -> str:
    """Draw the lanes as text: a character per slice of cost, naming the request.

    Digits and letters are requests; ``#@*%&+=$``, in this order and then again, shared parts.

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


def _symbol(owner: int, num_requests: int) -> str:
    if owner < num_requests:
        return _SYMBOLS[owner % len(_SYMBOLS)]
    return _PART_SYMBOLS[(owner - num_requests) % len(_PART_SYMBOLS)]


def _paint(symbol: str, color: Color) -> str:
    red, green, blue = (round(255 * c) for c in color)
    return f"\x1b[48;2;{red};{green};{blue};38;2;255;255;255m{symbol}\x1b[0m"
