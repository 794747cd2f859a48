# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/img/ranks.png: what `flashbsr.distributed.Cost` predicts, and what was measured.

python tools/draw_ranks.py
"""

from __future__ import annotations

import json

from flashbsr.distributed import Cost
from gpu_hash import ROOT

PICTURE = ROOT / "docs/img/ranks.png"
RECORDS = {n: ROOT / f"tests/records/ranks-nvidia-h200-x{n}.json" for n in (2, 4)}
RANKS = (1, 2, 4, 8, 16, 32, 64)
DECODE = {(1, 1 << 20): "#31688e", (16, 65536): "#5b8db8", (64, 8192): "#3f8f5f",
          (16, 8192): "#c17d11"}  # fmt: skip
PREFILL = {131072: "#31688e", 8192: "#c17d11"}
HOST = 16  # ranks that reach each other's memory, at most


def decode(batch: int, kv_len: int, method: str) -> list[tuple[int, float]]:
    """Give how many times as fast as one GPU, for each number of ranks."""
    cost = Cost()
    ranks = [n for n in RANKS if method != "peers" or n <= HOST]
    one = cost.decode_us(batch, kv_len)
    return [(n, one / cost.decode_us(batch, kv_len, n, method=method)) for n in ranks]


def prefill(tokens: int, method: str) -> list[tuple[int, float]]:
    cost = Cost()
    one = cost.prefill_us(tokens)
    return [(n, one / cost.prefill_us(tokens, n, method=method)) for n in RANKS]


def measured(ranks: int) -> dict[tuple[int, int], dict[str, float]]:
    """Give the same as recorded, by batch and way."""
    rows, found = json.loads(RECORDS[ranks].read_text())["rows"], {}
    for name, row in rows.items():
        if name.startswith("decode "):
            batch, kv_len = map(int, name.removeprefix("decode ").split(" x "))
            found[batch, kv_len] = {
                way: row["one_us"] / min(us for key, us in row["us"].items() if way in key)
                for way in ("peers", "reduce_scatter")
            }
    return found


def main() -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    seen = {n: measured(n) for n in RECORDS}
    for shape, color in DECODE.items():
        batch, kv_len = shape
        name = f"{batch} x {kv_len}"
        left.plot(*zip(*decode(*shape, "peers"), strict=True), color=color, label=name)
        left.plot(*zip(*decode(*shape, "reduce_scatter"), strict=True), color=color, linestyle="--")
        for n, found in seen.items():
            left.plot([n, n], list(found[shape].values()), "o", color=color, markersize=4)
    left.plot([], [], color="gray", label="NVLink, one launch")
    left.plot([], [], color="gray", linestyle="--", label="collectives")
    left.plot([], [], "o", color="gray", markersize=4, label="measured, H200s")
    left.set_title("decode, 32 query and 8 KV heads of 128")
    for tokens, color in PREFILL.items():
        name = f"{tokens} tokens"
        right.plot(*zip(*prefill(tokens, "all_gather"), strict=True), color=color, label=name)
        right.plot(*zip(*prefill(tokens, "ring"), strict=True), color=color, linestyle="--")
    right.plot([], [], color="gray", label="all_gather")
    right.plot([], [], color="gray", linestyle="--", label="ring")
    right.set_title("causal prefill of one prompt")
    for ax in (left, right):
        ax.plot(RANKS, RANKS, color="#c9ced3", linewidth=1, linestyle=(0, (1, 2)), zorder=0)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(RANKS, [str(n) for n in RANKS])
        ax.set_yticks(RANKS, [str(n) for n in RANKS])
        ax.set_ylim(0.5, 64)
        ax.set_xlabel("GPUs")
        ax.set_ylabel("times as fast as one")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(PICTURE, dpi=130, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
