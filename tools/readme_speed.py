# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The README's picture of speed, beside the peers of a record, and the sentence above it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PEERS = {"cudnn_speedup": "cuDNN", "flash_speedup": "FlashAttention 2"}
SHOWN = {
    "decode-16x1024": "decode, 16 x 1024",
    "decode-64x4096": "decode, 64 x 4096",
    "decode-1x131072": "decode, 1 x 131072",
    "chunk-1x512-8192": "chunk of 512 on 8192",
    "chunk-16x64-8192": "16 chunks of 64 on 8192",
    "chunk-3x256-30000": "3 chunks of 256 on 30000",
    "prefill-16x1024": "prefill, 16 x 1024",
    "prefill-1x8192": "prefill, 1 x 8192",
    "prefill-1x32768": "prefill, 1 x 32768",
}


def speedups(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times as fast as each peer, by workload."""
    return {
        row["name"]: {key: row["metrics"][key] for key in PEERS if key in row["metrics"]}
        for row in record["results"]
        if any(key in row["metrics"] for key in PEERS)
    }


def sentence(cuda: Path, cpu: Path) -> str:
    """Say it in words, without a number that was typed."""
    record = json.loads(cuda.read_text())
    best = [min(row.values()) for row in speedups(record).values()]
    mean = math.exp(sum(map(math.log, best)) / len(best))
    decode = [
        row["metrics"]["read_fraction"]
        for row in record["results"]
        if row["kind"] == "gpu-decode" and min(row["shape"]["kv_lens"]) >= 4096
    ]
    cores = json.loads(cpu.read_text())["machine"]["cores"]
    return (
        f"On an {record['machine']['device']['name'].removeprefix('NVIDIA ')} flashbsr is "
        f"{mean:.2f} times as fast as the better of cuDNN and FlashAttention 2, as PyTorch calls "
        f"them: the geometric mean of the {len(best)} workloads that they can run, the least "
        f"{min(best):.2f}. Decode over long caches reads {min(decode):.0%} to {max(decode):.0%} of "
        f"what reading the memory alone reaches. [Benchmarks](docs/benchmarks.md) has all "
        f"workloads, limits and goals, on a GPU and on {cores} cores.\n\n"
        "![How many times as fast as peers](docs/img/speed.png)"
    )


def draw(cuda: Path, to: Path) -> None:
    """Draw a bar for each peer and workload of `SHOWN`; the line at 1 is the peer's own speed."""
    import matplotlib.pyplot as plt

    record = json.loads(cuda.read_text())
    found, device = speedups(record), record["machine"]["device"]["name"].removeprefix("NVIDIA ")
    names = [name for name in SHOWN if name in found]
    figure, ax = plt.subplots(figsize=(9, 4.6), layout="constrained")
    for i, (key, peer) in enumerate(PEERS.items()):
        at = [n + 0.2 * (2 * i - 1) for n in range(len(names))]
        bars = ax.barh(
            at, [found[name].get(key, 0) for name in names], 0.38,
            color=("#5b8db8", "#d9a441")[i], label=f"beside {peer}",
        )  # fmt: skip
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    ax.axvline(1, color="#22303c", linewidth=1, linestyle=(0, (4, 3)))
    ax.set_yticks(range(len(names)), [SHOWN[name] for name in names])
    ax.invert_yaxis()
    ax.set_xlabel(f"times as fast (32 query and 8 KV heads of 128, bfloat16, one {device})")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="lower right")
    figure.savefig(to, dpi=140, facecolor="white")
    plt.close(figure)
