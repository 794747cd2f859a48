# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A benchmark run as one page for a browser: tables, and bars beside the limits of the machine."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from .cuda_workloads import CUDA_KINDS
from .report import COLUMNS, limits_text, time_text
from .workloads import KINDS

__all__ = ["write_report"]

# Fractions of a limit that was measured in the same run, the first that a workload has; its name.
LIMITS = {
    "read_fraction": "reading alone",
    "triad_fraction": "the triad",
    "copy_fraction": "a copy",
    "matmul_fraction": "a matrix product",
}
BAR, ROW = 200, 18  # pixels
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #22303c; margin: 1rem auto; padding: 0 1rem; }
body { max-width: 1200px; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; } p { color: #5b6873; }
.wide { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { padding: .12rem .6rem; text-align: right; border-bottom: 1px solid #e4e8eb; }
th:first-child, td:first-child, td.words { text-align: left; } .missed { color: #b3261e; }
"""


def write_report(record: dict[str, Any], path: str | Path, *, goals: bool = False) -> None:
    """Write a run as a page, for a browser: no other file, nothing from a network.

    Parameters
    ----------
    record : dict
        What `to_json` gives, or a file of it loaded.
    path : path-like
        Where to write it (.html).
    goals : bool
        Show each workload's goals, and by how much one was missed.
    """
    machine = record["machine"]
    where = machine.get("device", machine["cpu"])["name"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>flashbsr bench: {escape(where)}</title><link rel=icon href='data:,'>",
        f"<style>{STYLE}</style><h1>flashbsr bench: {escape(where)}</h1>",
        f"<p>{escape(machine['date'][:16])}, {machine['cores']} cores of",
        f"{escape(machine['cpu']['name'])}; {escape(versions)}.<br>",
        f"In the same run: {escape(limits_text(record['limits']))}.</p>",
    ]
    for kind, title in {**KINDS, **CUDA_KINDS}.items():
        rows = [row for row in record["results"] if row["kind"] == kind]
        if rows:
            parts.append(_section(title, COLUMNS[kind], rows, goals=goals))
    Path(path).write_text("\n".join(parts) + "\n")


def _section(title: str, columns: Any, rows: list[dict[str, Any]], *, goals: bool) -> str:
    columns = [c for c in columns if any(c[0] in row["metrics"] for row in rows)]
    limit = next((m for m in LIMITS if any(m in row["metrics"] for row in rows)), None)
    most = max([1.0, *(row["metrics"].get(limit, 0) for row in rows)])
    head = ["workload", "time", *(heading for _, heading, _ in columns)]
    cells = "".join(f"<th>{escape(x)}</th>" for x in head)
    if limit:
        cells += f"<th>the line: {LIMITS[limit]}</th>"
    if goals:
        cells += "<th>goals</th>"
    lines = [f"<h2>{escape(title)}</h2><div class=wide><table><tr>{cells}</tr>"]
    for row in rows:
        metrics = row["metrics"]
        found = [
            row["name"],
            time_text(row["times"]["flashbsr"]["median_s"]) if row["times"] else "-",
        ]
        found += [form.format(metrics[m]) if m in metrics else "-" for m, _, form in columns]
        cells = "".join(f"<td>{escape(x)}</td>" for x in found)
        if limit:
            cells += f"<td class=words>{_bar(metrics.get(limit), most)}</td>"
        if goals:
            cells += f"<td class=words>{_goals(row)}</td>"
        lines.append(f"<tr>{cells}</tr>")
    notes = dict.fromkeys(row["note"] for row in rows if row["note"])
    said = f"<p>{escape('; '.join(notes))}</p>" if notes else ""
    return "\n".join(lines) + f"</table></div>{said}"


def _bar(fraction: float | None, most: float) -> str:
    """Draw a fraction of the limit, and the limit, which a fraction of more than 1 is beyond."""
    if fraction is None:
        return ""
    width, line = (BAR * x / most for x in (fraction, 1.0))
    return (
        f'<svg width="{BAR + 44}" height="{ROW}" role="img" aria-label="{fraction:.1%}">'
        f'<rect y="3" width="{width:.1f}" height="{ROW - 6}" fill="#5b8db8"/>'
        f'<path d="M{line:.1f} 0V{ROW}" stroke="#22303c" stroke-dasharray="3 2"/>'
        f'<text x="{max(width, line) + 4:.1f}" y="{ROW - 5}" font-size="11">{fraction:.0%}</text>'
        "</svg>"
    )


def _goals(row: dict[str, Any]) -> str:
    said = []
    for goal in row["goals"]:
        bound = goal.get("at_least", goal.get("at_most"))
        sign, value = ("≥" if "at_least" in goal else "≤"), row["metrics"][goal["metric"]]
        text = f"{goal['metric']} {sign} {bound:g}"
        if not goal["met"]:
            by = abs(value - bound) / abs(bound) if bound else abs(value - bound)
            text = f"<span class=missed>{escape(text)}, missed by {by:.1%}</span>"
        said.append(text if goal["met"] is False else escape(text))
    return ", ".join(said)
