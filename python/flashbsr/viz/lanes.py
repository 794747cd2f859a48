# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`plot_plan`: the workers of a plan as lanes."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .style import (
    INK,
    LANE,
    MUTED,
    Color,
    count_of,
    darker,
    kilo,
    load_pyplot,
    owner_colors,
    owner_name,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashbsr.engine.plan import Plan

MAX_CONNECTED_PARTS = 24
MAX_LEGEND_REQUESTS = 10
MAX_LEGEND_PARTS = 4


def spans(plan: Plan) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]]:
    """Per worker: the item ids of its queue and the len + 1 positions on the cost axis."""
    costs = plan.cost().astype(np.float64)
    lanes = []
    for worker in range(plan.header.num_workers):
        ids = plan.queue(worker)
        lanes.append((ids, np.concatenate(([0.0], np.cumsum(costs[ids])))))
    return lanes


def plot_plan(plan: Plan, path: str | Path | None = None, ax: Axes | None = None) -> Axes:
    """Draw who does what: a lane per worker, a bar per work item.

    A bar is as wide as the item's cost in the scheduler's model and has its request's colour;
    items of shared parts are amber, ``s0`` for the first. A dark foot marks an item that leaves a
    partial state: its row tile was split, or its request shares KV. States are joined to a circled
    plus where they are merged: at the one that the model expects to be finished last. The dashed
    line is the mean load: a perfect plan ends every lane there.

    Parameters
    ----------
    plan : Plan
        ``Attention.plan_info``.
    path : path-like, optional
        Where to save the figure; the suffix (.png, .svg, .pdf) chooses the format.
    ax : matplotlib Axes, optional
        Draw here instead of on a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    plt = load_pyplot("plot_plan")
    from matplotlib.ticker import EngFormatter, FuncFormatter

    workers = plan.header.num_workers
    lanes = spans(plan)
    end = max([lane[1][-1] for lane in lanes] + [1.0])
    if ax is None:
        height = min(
            1.9 + workers * (0.46 if workers <= 12 else 0.24 if workers <= 40 else 0.08), 12
        )
        _, ax = plt.subplots(figsize=(12, height), layout="constrained")
    assert ax is not None
    colors = owner_colors(plan)
    _draw_bars(ax, plan, lanes, colors)
    ax.set_xlim(0, end * 1.01)
    ax.set_ylim(workers - 0.4, -0.6)
    mean = sum(float(lane[1][-1]) for lane in lanes) / max(workers, 1)
    _label_bars(ax, plan, lanes, colors, mean)
    _draw_merges(ax, plan, lanes, colors)
    ax.axvline(mean, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=5)

    step = max(1, -(-workers // 24))
    ax.set_yticks(range(0, workers, step), [f"worker {w}" for w in range(0, workers, step)])
    ax.tick_params(axis="y", length=0, labelsize=9, colors=INK)
    ax.tick_params(axis="x", labelsize=8.5, colors=INK, length=3)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    h = plan.header
    if h.units_per_us:
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / h.units_per_us:g}"))
    else:
        ax.xaxis.set_major_formatter(EngFormatter())
    unit = "us" if h.units_per_us else "cost"
    ax.set_xlabel(f"{unit} in the scheduler's model", fontsize=9, color=INK)
    merges = f", {h.num_merges} merged tiles" if h.num_merges else ", no tile split"
    shared = ""
    if h.num_shared:
        merges = f", {count_of(h.num_merges, 'merge')}"
        shared = f", {count_of(h.num_shared, 'shared part')}"
    ax.set_title(
        f"{count_of(h.num_requests, 'request')}{shared}: {count_of(h.num_items, 'work item')} on "
        f"{count_of(workers, 'worker')}{merges}, balance {plan.balance:.3f}\n"
        + textwrap.fill(f"cut: {plan.reason}", 120),
        loc="left",
        fontsize=11,
        fontweight="bold",
        color=INK,
        pad=10,
    )
    _plan_legend(ax, plan, colors)
    if path is not None:
        save(ax, path)
    return ax


def _draw_bars(ax: Axes, plan: Plan, lanes: Sequence[Any], colors: Sequence[Color]) -> None:
    """Lane backgrounds, bars, and the dark foot of split items."""
    items = plan.items
    end = max([lane[1][-1] for lane in lanes] + [1.0])
    edge = 0.9 if len(items) <= 400 else 0.3 if len(items) <= 2000 else 0.0
    for worker, (ids, ends) in enumerate(lanes):
        ax.broken_barh([(0, end)], (worker - 0.4, 0.8), facecolors=LANE, zorder=1)
        if len(ids) == 0:
            continue
        ranges = [(float(a), float(b - a)) for a, b in itertools.pairwise(ends)]
        faces = [colors[r] for r in items["request"][ids]]
        ax.broken_barh(
            ranges,
            (worker - 0.4, 0.8),
            facecolors=faces,
            edgecolors="white",
            linewidths=edge,
            zorder=2,
        )
        split = items["slot"][ids] >= 0
        if split.any():
            ax.broken_barh(
                list(itertools.compress(ranges, split)),
                (worker + 0.28, 0.12),
                facecolors=[darker(colors[r]) for r in items["request"][ids][split]],
                edgecolors="white",
                linewidths=edge,
                zorder=3,
            )


def _label_bars(
    ax: Axes, plan: Plan, lanes: Sequence[Any], colors: Sequence[Color], mean: float
) -> None:
    """Request and KV head on bars that have the room; the KV range too where there is more.

    Where the line of the mean load crosses a bar its label stands on the longer side.
    """
    figure: Any = ax.figure
    figure.canvas.draw()  # settles the layout, so that widths are known
    box = ax.get_window_extent()
    per_cost = box.width / figure.dpi / ax.get_xlim()[1]
    lane_inches = box.height / figure.dpi / max(len(lanes), 1) * 0.8
    if lane_inches < 0.16:
        return
    size = 7.5 if lane_inches >= 0.22 else 6.5
    for worker, (ids, ends) in enumerate(lanes):
        for item_id, left, right in zip(ids, ends[:-1], ends[1:], strict=True):
            item = plan.items[item_id]
            if left < mean < right:
                left, right = (left, mean) if mean - left > right - mean else (mean, right)
            width = (right - left) * per_cost
            if width < 0.42:
                continue
            text = _label(plan, item, width)
            red, green, blue = colors[item["request"]]
            bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.6
            ax.text(
                (left + right) / 2,
                worker - 0.06 if item["slot"] >= 0 else worker,
                text,
                ha="center",
                va="center",
                fontsize=size,
                color=INK if bright else "white",
                zorder=10,
                clip_on=True,
            )


def _label(plan: Plan, item: Any, inches: float) -> str:
    """Say whose item it is, as far as a bar of this width has room."""
    text = f"{owner_name(plan, int(item['request']))} h{item['kv_head']}"
    group = plan.header.group_size
    first = int(item["row_begin"]) // group
    last = (int(item["row_begin"]) + int(item["row_count"]) - 1) // group
    if last - first + 1 < plan.owners["q_len"][item["request"]] and inches > 1.0:
        text += f"  q {first} to {last}"  # one of several row tiles
        inches -= 0.7
    if inches > 1.25:
        text += f"  kv {kilo(int(item['kv_begin']))} to {kilo(int(item['kv_end']))}"
    return text


def _draw_merges(ax: Axes, plan: Plan, lanes: Sequence[Any], colors: Sequence[Color]) -> None:
    """Draw a circled plus at the last state of every merge, joined to the others."""
    parts: dict[int, list[tuple[float, int]]] = {}
    for worker, (ids, ends) in enumerate(lanes):
        for item_id, right in zip(ids, ends[1:], strict=True):
            item = plan.items[item_id]
            first, count = int(item["merge"]), int(item["merge_count"])
            for merge in range(first, first + count):
                parts.setdefault(merge, []).append((float(right), worker))
    if not parts:
        return
    connect = plan.header.num_slots <= MAX_CONNECTED_PARTS
    nodes = []
    for merge, members in parts.items():
        last_end, last_worker = max(members)
        nodes.append((last_end, last_worker + 0.34))
        if not connect:
            continue
        color = darker(colors[plan.merges["request"][merge]], 0.62)
        for right, worker in members:
            if (right, worker) == (last_end, last_worker):
                continue
            ax.annotate(
                "",
                xy=(last_end, last_worker + 0.34),
                xytext=(right, worker + 0.34),
                arrowprops={
                    "arrowstyle": "-",
                    "color": color,
                    "linewidth": 1.0,
                    "alpha": 0.6,
                    "connectionstyle": "arc3,rad=0.12",
                    "shrinkA": 0,
                    "shrinkB": 3,
                },
                zorder=7,
            )
    size = 46 if len(lanes) <= 12 and connect else 14
    xs, ys = zip(*nodes, strict=True)
    ax.scatter(xs, ys, s=size, facecolors="white", edgecolors=INK, linewidths=1.0, zorder=8)
    ax.scatter(xs, ys, s=size * 0.5, c=INK, marker="+", linewidths=1.0, zorder=9)


def _plan_legend(ax: Axes, plan: Plan, colors: Sequence[Color]) -> None:
    """Name the requests with the most KV and what the marks mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    requests = plan.requests
    order = sorted(range(len(requests)), key=lambda r: (-int(requests["kv_len"][r]), r))
    parts = list(enumerate(plan.parts, len(requests)))
    handles: list[Any] = [
        Patch(
            facecolor=colors[number],
            label=f"{owner_name(plan, number)}: of {len(part.requests)}, "
            f"kv {kilo(part.kv_begin)} to {kilo(part.kv_end)}",
        )
        for number, part in parts[:MAX_LEGEND_PARTS]
    ]
    if len(parts) > MAX_LEGEND_PARTS:
        rest = len(parts) - MAX_LEGEND_PARTS
        handles.append(Patch(facecolor="none", label=f"and {count_of(rest, 'more shared part')}"))
    handles += [
        Patch(
            facecolor=colors[r],
            label=f"r{r}: q {kilo(int(requests['q_len'][r]))}, "
            f"kv {kilo(int(requests['kv_len'][r]))}",
        )
        for r in order[:MAX_LEGEND_REQUESTS]
    ]
    if len(order) > MAX_LEGEND_REQUESTS:
        rest = len(order) - MAX_LEGEND_REQUESTS
        handles.append(Patch(facecolor="none", label=f"and {rest} more"))
    if plan.header.num_merges:
        foot = "leaves a partial state" if parts else "part of a split tile"
        handles.append(Patch(facecolor=INK, label=f"foot: {foot}"))
        handles.append(
            Line2D([], [], marker="$\\oplus$", color=INK, linestyle="", markersize=8, label="merge")
        )
    handles.append(
        Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1.1, label="mean load")
    )
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
