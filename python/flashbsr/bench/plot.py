# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The plot of a benchmark run, drawn from its JSON record."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashbsr.viz.style import GRID, INK, MUTED, load_pyplot

__all__ = ["draw"]

OURS = {"float32": "#1f6f8b", "bfloat16": "#d1495b", "float16": "#8d6a9f"}
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write the figure of `record` to `path`; panels without results are left out."""
    plt = load_pyplot("flashbsr.bench.plot_results")
    results = [r for r in record["results"] if r["times"]]
    panels = [
        (painter, found)
        for painter, kinds in (_CUDA if record.get("device") == "cuda" else _CPU)
        if (found := [r for r in results if r["kind"] in kinds])
    ]
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    fig, axes = plt.subplots(
        rows,
        columns,
        figsize=(5.6 * columns, (4.6 if record.get("device") == "cuda" else 3.7) * rows + 0.5),
        squeeze=False,
        layout="constrained",
    )
    flat = list(axes.flat)
    for ax, (painter, found) in zip(flat, panels, strict=False):
        painter(ax, found, record["limits"])
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(MUTED)
        ax.tick_params(colors=INK, length=3, labelsize=8.5)
        ax.set_axisbelow(True)
    for ax in flat[len(panels) :]:
        ax.set_axis_off()
    fig.suptitle(_machine(record["machine"]), fontsize=10.5, color=INK)
    fig.savefig(path, dpi=160, facecolor="white")
    plt.close(fig)


def _machine(machine: dict[str, Any]) -> str:
    versions = machine["versions"]
    peer = f", torch {versions['torch']}" if "torch" in versions else ""
    where = f"{machine['cores']} cores of {machine['cpu']['name']} ({machine['isa']})"
    if "device" in machine:
        where = f"one {machine['device']['name']}"
    return f"flashbsr {versions['flashbsr']} on {where}{peer}, {machine['date'][:10]}"


def _title(ax: Any, text: str, ylabel: str) -> None:
    ax.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.8)


def _lines(ax: Any, found: list[dict[str, Any]], ours: str, torch: str) -> None:
    """Ours solid, torch dashed, a colour per dtype, over the KV length."""
    for dtype in dict.fromkeys(r["shape"]["dtype"] for r in found):
        rows = [r for r in found if r["shape"]["dtype"] == dtype]
        for metric, style, name in ((ours, "-o", "flashbsr"), (torch, "--s", "torch")):
            points = [
                (max(r["shape"]["kv_lens"]), r["metrics"][metric])
                for r in rows
                if metric in r["metrics"]
            ]
            if points:
                ax.plot(
                    *zip(*sorted(points), strict=True),
                    style,
                    color=OURS[dtype],
                    markersize=5,
                    linewidth=1.8,
                    alpha=1.0 if name == "flashbsr" else 0.55,
                    label=f"{name} {SHORT[dtype]}",
                )
    lengths = sorted({max(r["shape"]["kv_lens"]) for r in found})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)


def _prefill(ax: Any, found: list[dict[str, Any]], _: dict[str, Any]) -> None:
    _lines(ax, found, "gflops", "torch_gflops")
    _title(ax, "Prefill, causal", "GFLOP/s (unmasked pairs)")
    ax.set_xlabel("tokens", fontsize=9, color=INK)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.22)
    ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=3)


def _decode(ax: Any, found: list[dict[str, Any]], limits: dict[str, Any]) -> None:
    _lines(ax, found, "kv_gbs", "torch_kv_gbs")
    _title(ax, "Decode, batch 16, paged", "GB/s (KV bytes once)")
    ax.set_xlabel("KV tokens per request", fontsize=9, color=INK)
    names = {"triad": limits["triad_gbs"], "read": limits["read_gbs"]}
    for value in names.values():
        ax.axhline(value, color=MUTED, linewidth=1, linestyle=":")
    labels = [(value, f"{name} {value:.0f}") for name, value in names.items()]
    if max(names.values()) < 1.08 * min(names.values()):  # one would lie on the other
        labels = [(max(names.values()), ", ".join(text for _, text in labels))]
    for value, text in labels:
        ax.annotate(
            text,
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=MUTED,
        )
    top = max(limits["triad_gbs"], limits["read_gbs"], *(r["metrics"]["kv_gbs"] for r in found))
    ax.set_ylim(0, top * 1.15)
    ax.legend(fontsize=8, frameon=False, loc="lower left", ncols=2)


def _bars(ax: Any, bars: list[tuple[str, float, str, str]]) -> Any:
    """Horizontal bars of (name, value, label, colour), first on top."""
    names, values, _, colors = zip(*bars, strict=True)
    drawn = ax.barh(names, values, color=colors, height=0.66)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color=GRID, linewidth=0.8)
    return drawn


def _label_bars(ax: Any, bars: list[tuple[str, float, str, str]], room: float, size: float) -> None:
    """Write each label into its bar if that is longer than `room`, else behind it."""
    for row, (_, value, label, _) in enumerate(bars):
        inside = value > room
        ax.annotate(
            label,
            (0 if inside else value, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            color="white" if inside else INK,
            fontsize=size,
        )


def _uneven(ax: Any, found: list[dict[str, Any]], limits: dict[str, Any]) -> None:
    bars = []
    for r in found:
        metrics = r["metrics"]
        label = f"{metrics['kv_gbs']:.1f} GB/s"
        if "skew_penalty" in metrics:
            label += f", {metrics['skew_penalty']:+.1%} over equal"
        else:
            label += f", cores within {metrics['busy_gap']:.1%}"
        bars.append((r["name"], metrics["kv_gbs"], label, OURS[r["shape"]["dtype"]]))
    _title(ax, "Uneven batches", "")
    _bars(ax, bars)
    longest = max(limits["triad_gbs"], *(bar[1] for bar in bars))
    _label_bars(ax, bars, 0.55 * longest, 8.5)
    ax.axvline(limits["triad_gbs"], color=MUTED, linewidth=1, linestyle=":")
    ax.set_xlabel("GB/s (KV bytes once); dotted: triad", fontsize=9, color=INK)


def _host(ax: Any, found: list[dict[str, Any]], _: dict[str, Any]) -> None:
    bars = []
    for r in found:
        names = ("plan_us", "overhead_us", "host_us")
        value = next(r["metrics"][name] for name in names if name in r["metrics"])
        bars.append((r["name"], max(value, 0.1), f"{value:.1f} us", "#4c6085"))
    _title(ax, "Host time", "")
    ax.bar_label(_bars(ax, bars), [b[2] for b in bars], padding=4, fontsize=8.5, color=INK)
    decades = [math.log10(bar[1]) for bar in bars]
    ax.set_xscale("log")
    ax.set_xlim(10 ** math.floor(min(decades)), 10 ** (math.ceil(max(decades)) + 0.5))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel("us, median (log)", fontsize=9, color=INK)


_COPIES = "gpu-append", "gpu-append-slots", "gpu-append-codes", "gpu-merge"
SIDES = {"ragged": "#d1495b", "paged": "#e79a86", "flash": "#8fa3b5", "cudnn": "#c9b458"}


def _gpu_memory(ax: Any, found: list[dict[str, Any]], limits: dict[str, Any]) -> None:
    """GB/s of what reads or copies memory, beside what the device reads and copies."""
    bars = []
    for r in found:
        metrics = r["metrics"]
        label = f"{metrics['us']:.1f} us, {metrics['read_fraction']:.0%} of read"
        if r["kind"] in _COPIES:
            label = f"{metrics['us']:.1f} us, {metrics['copy_fraction']:.0%} of copy"
        color = OURS["float16" if r["kind"] == "gpu-fp8" else "bfloat16"]
        bars.append((r["name"], metrics["gbs"], label, color))
    _title(ax, "Decode, append, merge", "")
    _bars(ax, bars)
    _label_bars(ax, bars, 0.5 * limits["read_gbs"], 6.5)
    for name, style in (("read_gbs", "-"), ("copy_gbs", ":")):
        ax.axvline(limits[name], color=MUTED, linewidth=1, linestyle=style)
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlabel("GB/s (least bytes); line: read, dotted: copy", fontsize=9, color=INK)


def _gpu_prefill(ax: Any, found: list[dict[str, Any]], limits: dict[str, Any]) -> None:
    """TFLOP/s of ours, ragged and in pages of 16, and of PyTorch's backends, side by side."""
    results = {r["name"].removeprefix("prefill-"): r["metrics"] for r in found}
    shapes = list(
        dict.fromkeys(
            r["name"].removeprefix("prefill-").removeprefix("paged-")
            for r in found
            if r["shape"]["page_size"] in (None, 16)
        )
    )
    sides = {
        "ragged": ("", "tflops"),
        "paged": ("paged-", "tflops"),
        "flash": ("", "flash_tflops"),
        "cudnn": ("", "cudnn_tflops"),
    }
    width = 0.21
    for offset, (side, (prefix, metric)) in enumerate(sides.items()):
        points = [
            (row + (offset - 1.5) * width, results[prefix + shape][metric])
            for row, shape in enumerate(shapes)
            if metric in results.get(prefix + shape, {})
        ]
        if points:
            drawn = ax.bar(*zip(*points, strict=True), width, color=SIDES[side], label=side)
            ax.bar_label(drawn, fmt="{:.0f}", fontsize=5.5, color=INK, padding=1)
    ax.set_xticks(range(len(shapes)), shapes, fontsize=8)
    _title(ax, "Prefill, causal, bf16", "TFLOP/s (unmasked pairs)")
    ax.axhline(limits["matmul_tflops"], color=MUTED, linewidth=1, linestyle=":")
    ax.set_ylim(0, ax.get_ylim()[1] * 1.1)
    ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")


def _gpu_options(ax: Any, found: list[dict[str, Any]], limits: dict[str, Any]) -> None:
    """TFLOP/s of what is not plain causal bf16, and the ratio to what it is judged against."""
    ratios = {
        "variant_penalty": ", {:+.1%} over plain",
        "kv16_fraction": ", {:.0%} of bf16 KV",
        "us": ", {:.0f} us",
    }
    bars = []
    for r in found:
        metrics = r["metrics"]
        label = f"{metrics['tflops']:.0f}"
        label += "".join(f.format(metrics[m]) for m, f in ratios.items() if m in metrics)
        color = OURS["float16" if r["kind"] == "gpu-prefill-fp8" else "bfloat16"]
        bars.append((r["name"].removeprefix("prefill-"), metrics["tflops"], label, color))
    _title(ax, "Prefill: other masks, head dims, variants and types", "")
    _bars(ax, bars)
    _label_bars(ax, bars, 0.5 * max(bar[1] for bar in bars), 6.5)
    ax.axvline(limits["matmul_tflops"], color=MUTED, linewidth=1, linestyle=":")
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlabel("TFLOP/s (unmasked pairs); dotted: bf16 product", fontsize=9, color=INK)


_Panel = tuple[Callable[[Any, list[dict[str, Any]], dict[str, Any]], None], tuple[str, ...]]
_CPU: tuple[_Panel, ...] = (
    (_prefill, ("prefill",)),
    (_decode, ("decode",)),
    (_uneven, ("skew", "balance")),
    (_host, ("plan", "overhead")),
)
_CUDA: tuple[_Panel, ...] = (
    (_gpu_memory, ("gpu-decode", "gpu-fp8", *_COPIES)),
    (_gpu_prefill, ("gpu-prefill",)),
    (_gpu_options, ("gpu-variants", "gpu-prefill-fp8", "gpu-short", "gpu-sparse")),
    (_host, ("gpu-plan", "gpu-plan-bounds", "gpu-run")),
)
