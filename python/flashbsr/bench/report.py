# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Results as a table, as JSON with the machine they came from, and as a plot."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.util
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .results import Result
from .runner import Session
from .workloads import KINDS

__all__ = ["describe_machine", "plot_results", "render_table", "source_hash", "to_json"]

SCHEMA = 1

# kind -> (metric, heading, format) of its columns between time and goal.
_COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "prefill": (
        ("gflops", "GFLOP/s", "{:.0f}"),
        ("torch_gflops", "torch", "{:.0f}"),
        ("speedup", "speed-up", "{:.2f}x"),
        ("matmul_fraction", "of matmul", "{:.0%}"),
    ),
    "decode": (
        ("kv_gbs", "GB/s", "{:.1f}"),
        ("torch_kv_gbs", "torch", "{:.1f}"),
        ("speedup", "speed-up", "{:.2f}x"),
        ("triad_fraction", "of triad", "{:.0%}"),
        ("read_fraction", "of read", "{:.0%}"),
    ),
    "skew": (
        ("kv_gbs", "GB/s", "{:.1f}"),
        ("torch_kv_gbs", "torch", "{:.1f}"),
        ("speedup", "speed-up", "{:.2f}x"),
        ("triad_fraction", "of triad", "{:.0%}"),
        ("skew_penalty", "over equal", "{:+.1%}"),
    ),
    "balance": (
        ("kv_gbs", "GB/s", "{:.1f}"),
        ("triad_fraction", "of triad", "{:.0%}"),
        ("busy_gap", "busy gap", "{:.1%}"),
    ),
    "plan": (("plan_us", "us", "{:.1f}"),),
    "overhead": (
        ("kernel_us", "kernel us", "{:.1f}"),
        ("overhead_us", "above us", "{:.1f}"),
    ),
}


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _goals(result: Result) -> str:
    parts = []
    for goal in result.workload.goals:
        if goal.metric in result.metrics:
            fmt = next(f for m, _, f in _COLUMNS[result.workload.kind] if m == goal.metric)
            sign = ">=" if goal.at_least else "<="
            verdict = "ok" if goal.met(result.metrics[goal.metric]) else "MISSED"
            parts.append(f"{sign} {fmt.format(goal.bound).lstrip('+')} {verdict}")
    return ", ".join(parts)


def render_table(results: Sequence[Result], limits: dict[str, Any] | None = None) -> str:
    """Format the results as text, a block per kind.

    Parameters
    ----------
    results : sequence of Result
    limits : dict, optional
        `Session.limits()`, printed first.
    """
    lines: list[str] = []
    if limits is not None:
        rates = "".join(
            f", {d} product {r:.0f} GFLOP/s" for d, r in limits["matmul_gflops"].items()
        )
        memory = f"triad {limits['triad_gbs']:.1f} GB/s, read {limits['read_gbs']:.1f} GB/s"
        lines += [f"This machine: {memory}{rates}", ""]
    for kind, title in KINDS.items():
        block = [r for r in results if r.workload.kind == kind]
        if not block:
            continue
        columns = [c for c in _COLUMNS[kind] if any(c[0] in r.metrics for r in block)]
        table = [["workload", "time", *(heading for _, heading, _ in columns), "goal", "note"]]
        for r in block:
            cells = [fmt.format(r.metrics[m]) if m in r.metrics else "-" for m, _, fmt in columns]
            time = "-" if r.skipped else _time(r.times["flashbsr"].median)
            table.append([r.workload.name, time, *cells, _goals(r), r.note])
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines.append(title)
        for row in table:
            # Names and words to the left, numbers to the right.
            cells = [
                cell.ljust(w) if i == 0 or i >= len(row) - 2 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()


def source_hash() -> str:
    """First 12 hex digits of SHA-256 over the engine's installed headers, names and contents.

    A record whose hash differs from the installed package's was taken on other kernels.
    """
    import flashbsr

    root = Path(flashbsr.get_include())
    digest = hashlib.sha256()
    for path in sorted(root.rglob("flashbsr/**/*.h")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _cpu_model() -> dict[str, Any]:
    """Name, family, model and L3 of the first CPU as Linux reports them; else what Python knows."""
    found: dict[str, Any] = {"name": platform.processor() or platform.machine()}
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields: dict[str, str] = {}
        for line in info.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        found["name"] = fields.get("model name", found["name"])
        for key, label in (("cpu family", "family"), ("model", "model"), ("cache size", "cache")):
            if key in fields:
                found[label] = fields[key]
    l3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if l3.exists():
        found["l3"] = l3.read_text().strip()
    return found


def describe_machine(threads: int) -> dict[str, Any]:
    """Collect the machine and the versions that a result depends on."""
    import flashbsr
    from flashbsr.info import engine_info

    engine = engine_info()
    versions = {"python": platform.python_version(), "flashbsr": flashbsr.__version__}
    for package in ("numpy", "ml_dtypes", "torch"):
        if importlib.util.find_spec(package) is not None:
            versions[package] = metadata.version(package)
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": threads,
        "isa": engine["isa"],
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "source_hash": source_hash(),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        machine["memory_gib"] = round(size / 2**30, 1)
    return machine


def to_json(results: Sequence[Result], session: Session) -> dict[str, Any]:
    """Everything of a run, ready for `json.dump`."""
    return {
        "schema": SCHEMA,
        "machine": describe_machine(session.threads),
        "quick": session.quick,
        "limits": {**session.limits(), "bandwidth_samples": session.bandwidth},
        "results": [r.as_dict() for r in results],
    }


def plot_results(record: dict[str, Any], path: str | Path) -> None:
    """Draw a run: prefill, decode, skew and host time beside their limits.

    Parameters
    ----------
    record : dict
        What `to_json` gives, or a file of it loaded.
    path : path-like
        PNG, SVG or PDF.

    Raises
    ------
    UnsupportedError
        Without matplotlib.
    """
    from .plot import draw

    draw(record, Path(path))
