# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Results as a table, as JSON with the machine they came from, and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import table_lines
from .cuda_workloads import CUDA_KINDS
from .machine import describe_machine, source_hash
from .results import Result
from .workloads import KINDS

if TYPE_CHECKING:
    from .cuda_runner import CudaSession
    from .session import Session

__all__ = [
    "COLUMNS",
    "describe_machine",
    "limits_text",
    "plot_results",
    "render_table",
    "result_tables",
    "source_hash",
    "time_text",
    "to_json",
]

SCHEMA = 1

_GPU_DECODE = (
    ("us_scaled", "us at 4.55 TB/s", "{:.1f}"),
    ("kv_ready_us", "us, kv_ready", "{:.1f}"),
    ("gbs", "GB/s", "{:.0f}"),
    ("read_fraction", "of read", "{:.1%}"),
    ("copy_fraction", "of copy", "{:.1%}"),
    ("flash_speedup", "x flash", "{:.2f}x"),
    ("cudnn_speedup", "x cuDNN", "{:.2f}x"),
    ("page_penalty", "over page 16", "{:+.1%}"),
)
_GPU_COPY = (("gbs", "GB/s", "{:.0f}"), ("copy_fraction", "of copy", "{:.1%}"))

_GPU_PREFILL = (
    ("tflops", "TFLOP/s", "{:.0f}"),
    ("matmul_fraction", "of matmul", "{:.0%}"),
    ("flash_tflops", "flash", "{:.0f}"),
    ("flash_speedup", "x flash", "{:.2f}x"),
    ("cudnn_tflops", "cuDNN", "{:.0f}"),
    ("cudnn_speedup", "x cuDNN", "{:.2f}x"),
    ("paged_penalty", "over ragged", "{:+.1%}"),
    ("variant_penalty", "over plain", "{:+.1%}"),
)

# kind -> (metric, heading, format) of its columns between time and goal.
COLUMNS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "prefill": (
        ("gflops", "GFLOP/s", "{:.0f}"),
        ("torch_gflops", "torch", "{:.0f}"),
        ("speedup", "speed-up", "{:.2f}x"),
        ("matmul_fraction", "of matmul", "{:.0%}"),
    ),
    "chunk": (
        ("gflops", "GFLOP/s", "{:.0f}"),
        ("prefill_fraction", "of a prompt's", "{:.0%}"),
    ),
    "latent": (
        ("gflops", "GFLOP/s", "{:.0f}"),
        ("prefill_fraction", "of a prompt's", "{:.0%}"),
        ("speedup", "x torch", "{:.0f}x"),
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
    "codes": (
        ("kv_gbs", "GB/s", "{:.1f}"),
        ("over_bf16", "x bf16", "{:.2f}x"),
        ("triad_fraction", "of triad", "{:.0%}"),
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
    "gpu-decode": _GPU_DECODE,
    "gpu-fp8": _GPU_DECODE,
    "gpu-codes": _GPU_DECODE,
    "gpu-codes-extend": (
        ("us", "us", "{:.1f}"),
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("kv16_fraction", "of bf16 KV", "{:.0%}"),
    ),
    "gpu-prefill": _GPU_PREFILL,
    "gpu-variants": _GPU_PREFILL,
    # The product that is measured is one of bf16.
    "gpu-prefill-fp8": (
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("kv16_fraction", "of bf16 KV", "{:.0%}"),
    ),
    "gpu-short": (
        ("us_scaled", "us at 4.55 TB/s", "{:.1f}"),
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("gbs", "GB/s", "{:.0f}"),
        ("read_fraction", "of read", "{:.1%}"),
        ("variant_penalty", "over plain", "{:+.1%}"),
    ),
    "gpu-chunk": (
        ("us", "us", "{:.1f}"),
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("flash_speedup", "x flash", "{:.2f}x"),
        ("cudnn_speedup", "x cuDNN", "{:.2f}x"),
    ),
    "gpu-bounds": (
        ("us", "us", "{:.1f}"),
        ("planned_us", "planned", "{:.1f}"),
        ("over_planned", "over planned", "{:+.1%}"),
        ("each_us", "update each", "{:.1f}"),
        ("half_us", "half to all", "{:.1f}"),
        ("over_planned_half", "over planned", "{:+.1%}"),
    ),
    "gpu-update": (("update_us", "us", "{:.1f}"),),
    "gpu-mixed": (
        ("us", "us", "{:.1f}"),
        ("prefill_us", "prefills", "{:.1f}"),
        ("decode_us", "decodes", "{:.1f}"),
        ("apart_gain", "over apart", "{:.2f}x"),
        ("over_larger", "of the longer", "{:.2f}x"),
    ),
    "gpu-mla": (
        ("us", "us", "{:.1f}"),
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("gbs", "GB/s", "{:.0f}"),
        ("page_penalty", "over page 64", "{:+.1%}"),
    ),
    "gpu-sparse": (
        ("us", "us", "{:.0f}"),
        ("tflops", "TFLOP/s", "{:.0f}"),
        ("matmul_fraction", "of matmul", "{:.0%}"),
    ),
    "gpu-share": (
        ("us", "us", "{:.1f}"),
        ("apart_us", "apart", "{:.1f}"),
        ("sharing_gain", "gain", "{:.2f}"),
    ),
    "gpu-append": _GPU_COPY,
    "gpu-append-slots": _GPU_COPY,
    "gpu-append-codes": _GPU_COPY,
    "gpu-merge": _GPU_COPY,
    "gpu-plan": (("plan_us", "us", "{:.1f}"),),
    "gpu-plan-bounds": (("plan_us", "us", "{:.1f}"),),
    "gpu-run": (("host_us", "us", "{:.1f}"),),
}


def time_text(seconds: float) -> str:
    """Format a time with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _goals(result: Result) -> str:
    parts = []
    for goal in result.workload.goals:
        if goal.metric in result.metrics:
            fmt = next(f for m, _, f in COLUMNS[result.workload.kind] if m == goal.metric)
            sign = ">=" if goal.at_least else "<="
            verdict = "ok" if goal.met(result.metrics[goal.metric]) else "MISSED"
            parts.append(f"{sign} {fmt.format(goal.bound).lstrip('+')} {verdict}")
    return ", ".join(parts)


def limits_text(limits: dict[str, Any]) -> str:
    """Say what the machine could do in the same run."""
    if "matmul_tflops" in limits:
        return (
            f"copy {limits['copy_gbs']:.0f} GB/s, read {limits['read_gbs']:.0f} GB/s "
            f"({limits['read_method']}), bf16 product {limits['matmul_tflops']:.0f} TFLOP/s"
        )
    rates = "".join(f", {d} product {r:.0f} GFLOP/s" for d, r in limits["matmul_gflops"].items())
    return f"triad {limits['triad_gbs']:.1f} GB/s, read {limits['read_gbs']:.1f} GB/s{rates}"


def render_table(results: Sequence[Result], limits: dict[str, Any] | None = None) -> str:
    """Format the results as text, a block per kind.

    Parameters
    ----------
    results : sequence of Result
    limits : dict, optional
        `limits()` of the session, printed first.
    """
    lines: list[str] = []
    if limits is not None:
        lines += [f"This machine: {limits_text(limits)}", ""]
    for title, heading, rows, right in result_tables(results):
        lines += [title, *table_lines(heading, rows, right), ""]
    return "\n".join(lines).rstrip()


def result_tables(
    results: Sequence[Result],
) -> Iterator[tuple[str, list[str], list[list[str]], range]]:
    """Yield a table per kind: title, heading, rows, and the columns with numbers."""
    for kind, title in {**KINDS, **CUDA_KINDS}.items():
        block = [r for r in results if r.workload.kind == kind]
        if not block:
            continue
        columns = [c for c in COLUMNS[kind] if any(c[0] in r.metrics for r in block)]
        heading = ["workload", "time", *(name for _, name, _ in columns), "goal", "note"]
        rows = []
        for r in block:
            cells = [fmt.format(r.metrics[m]) if m in r.metrics else "-" for m, _, fmt in columns]
            time = "-" if r.skipped else time_text(r.times["flashbsr"].median)
            rows.append([r.workload.name, time, *cells, _goals(r), r.note])
        yield title, heading, rows, range(1, len(heading) - 2)


def to_json(results: Sequence[Result], session: Session | CudaSession) -> dict[str, Any]:
    """Everything of a run, ready for `json.dump`."""
    return {
        "schema": SCHEMA,
        "device": session.device,
        "machine": session.machine(),
        "quick": session.quick,
        "limits": session.limits(),
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
