# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`write_page`: the workers of plans as lanes of a page that zooms, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lanes import spans
from .style import count_of, kilo, owner_colors, owner_name

if TYPE_CHECKING:
    from flashbsr.engine.plan import Plan

TEMPLATE = Path(__file__).with_name("lanes.html")


def write_page(plans: Plan | Mapping[str, Plan], path: str | Path) -> None:
    """Write a page with the lanes of a plan, for a browser: no other file, nothing from a network.

    Lanes zoom and move, so that a thousand requests can be read. Lanes that differ in the KV head
    alone are one, with their number.

    Parameters
    ----------
    plans : Plan or mapping of str to Plan
        ``Attention.plan_info``; several by their names, such as ranks that share the keys.
    path : path-like
        Where to write it (.html).

    Examples
    --------
    >>> import tempfile
    >>> from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
    >>> attention = Attention(AttentionSpec(), TaskInfo(4, 1, 64, num_workers=2))
    >>> attention.plan(Ragged([0, 1, 2], [0, 100, 5000]))
    >>> page = Path(tempfile.mkdtemp()) / "plan.html"
    >>> write_page(attention.plan_info, page)
    >>> page.stat().st_size > 1000
    True
    """
    named = plans if isinstance(plans, Mapping) else {"": plans}
    parts = [_data(name, plan) for name, plan in named.items()]
    title = f"{count_of(len(parts), 'plan')}" if len(parts) > 1 else "A plan"
    text = json.dumps({"title": title, "plans": parts}, separators=(",", ":"))
    # A script ends at "</", whatever is quoted.
    page = TEMPLATE.read_text().replace("@DATA@", text.replace("</", "<\\/"))
    Path(path).write_text(page)


def _data(name: str, plan: Plan) -> dict[str, Any]:
    h = plan.header
    merges = f", {count_of(h.num_merges, 'merge')}" if h.num_merges else ", nothing is split"
    shared = f", {count_of(h.num_shared, 'shared part')}" if h.num_shared else ""
    text = (
        f"{count_of(h.num_requests, 'request')}{shared}, {kilo(h.max_kv_len)} keys at most: "
        f"{count_of(h.num_items, 'work item')} on {count_of(h.num_workers, 'worker')}{merges}, "
        f"balance {plan.balance:.3f}. Cut: {plan.reason}"
    )
    lanes, total = _lanes(plan)
    return {
        "text": f"{name}: {text}" if name else text,
        "group": h.group_size,
        "units_per_us": h.units_per_us,
        "mean": total / max(h.num_workers, 1),
        "names": [owner_name(plan, i) for i in range(len(plan.owners))],
        "colors": [_hex(color) for color in owner_colors(plan)],
        "lanes": lanes,
    }


def _lanes(plan: Plan) -> tuple[list[dict[str, Any]], float]:
    """Lanes with their items, those that are alike but for the KV head together; the total cost."""
    fields = ("request", "kv_head", "row_begin", "row_count", "kv_begin", "kv_end", "merge")
    costs, found, total = plan.cost().tolist(), {}, 0.0  # type: ignore[var-annotated]
    for worker, (ids, ends) in enumerate(spans(plan)):
        total += float(ends[-1])
        rows = [
            [costs[i], *row]
            for i, row in zip(ids.tolist(), plan.items[list(fields)][ids].tolist(), strict=True)
        ]
        # All but the head, and the merge, of which each head has its own.
        key = (tuple((c, r, *rest) for c, r, _, *rest, _ in rows), _heads(rows) == 1)
        lane = found.setdefault(key, {"workers": [], "items": rows})
        lane["workers"].append(worker)
    lanes = []
    for lane in found.values():
        workers = lane.pop("workers")
        more = len(workers) - 1
        name = f"{workers[0]}" + (f" and {more} more" if more else "")
        lanes.append({"name": name, "count": len(workers), **lane})
    return lanes, total


def _heads(rows: list[list[Any]]) -> int:
    return len({row[2] for row in rows})


def _hex(color: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * x):02x}" for x in color)
