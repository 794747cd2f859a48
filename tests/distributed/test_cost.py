# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The model of cost: against what two H200s took, and the tables of docs/distributed.md."""

from __future__ import annotations

import sys
from pathlib import Path

import flashbsr
import pytest

pytest.importorskip("torch", reason="flashbsr.distributed is for its process groups")
from flashbsr.distributed import Cost, Link

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import draw_ranks

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
# Batch, tokens, microseconds of one and of two H200s, all heads, float32 on the way, in CUDA graphs
# (tools/context_parallel.py, 2026-11-25).
ONE = {(1, 1 << 20): 946, (16, 65536): 943, (64, 8192): 475, (16, 8192): 121}
TWO = {
    "reduce_scatter": (544, 554, 339, 142),
    "all_to_all": (519, 538, 323, 121),
    "peers": (483, 481, 251, 68),
}


@pytest.mark.parametrize(("method", "measured"), TWO.items())
def test_it_says_what_two_gpus_took(method: str, measured: tuple[float, ...]) -> None:
    cost, close = Cost(), 0.02 if method == "peers" else 0.1
    for (batch, kv_len), two in zip(ONE, measured, strict=True):
        assert cost.decode_us(batch, kv_len) == pytest.approx(ONE[batch, kv_len], rel=0.01)
        predicted = cost.decode_us(batch, kv_len, 2, method=method)
        assert predicted == pytest.approx(two, rel=close), (batch, kv_len)


def test_the_page_has_its_figures() -> None:
    text = PAGE.read_text().split("<!-- cost -->")[1].split("<!-- /cost -->")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    cost, seen = Cost(), 0
    for name, *cells in rows:
        if name.startswith(("decode", "prefill")):
            ranks = [int(cell.split()[0]) for cell in cells]
            continue
        for n, cell in zip(ranks, cells, strict=True):
            if cell == "-":
                continue
            if " x " in name:
                shape, _, method = name.partition(", ")
                batch, kv_len = map(int, shape.split(" x "))
                us = cost.decode_us(batch, kv_len, n, method=method or "reduce_scatter")
                assert cell == f"{us:.0f}", name
            else:
                tokens, method = name.split(", ")
                us = cost.prefill_us(int(tokens), n, method=method)
                assert cell == f"{us / 1000:.2f}", name
            seen += 1
    assert seen == 48 + 20


@pytest.mark.parametrize(("ranks", "way", "apart"), [
    (2, "peers", 0.1), (2, "reduce_scatter", 0.1), (4, "peers", 0.1), (4, "reduce_scatter", 0.15),
])  # fmt: skip
def test_the_picture_has_what_was_measured(ranks: int, way: str, apart: float) -> None:
    """tools/draw_ranks.py: its dots lie beside its lines."""
    measured = draw_ranks.measured(ranks)
    assert set(measured) == set(draw_ranks.DECODE)
    for shape, ways in measured.items():
        lines = dict(draw_ranks.decode(*shape, way))
        assert lines[1] == 1
        assert ways[way] == pytest.approx(lines[ranks], rel=apart), shape


def test_more_bytes_take_longer() -> None:
    cost = Cost()
    for method in ("reduce_scatter", "all_to_all", "peers"):
        few, many = (cost.decode_us(16, 8192, 4, q_len=n, method=method) for n in (1, 8))
        assert few < many
        assert cost.decode_us(16, 8192, 4, method=method, all_heads=False) < few
        assert cost.decode_us(16, 8192, 4, method=method, travel_bytes=2) < few
    slow = Cost(link=Link(bandwidth=25e9))
    assert slow.prefill_us(65536, 8, method="all_gather") > cost.prefill_us(
        65536, 8, method="all_gather"
    )
    with pytest.raises(flashbsr.FlashbsrError, match="method"):
        cost.decode_us(1, 1, method="ring")
    with pytest.raises(flashbsr.FlashbsrError, match="method"):
        cost.prefill_us(1, method="all_to_all")
    with pytest.raises(flashbsr.FlashbsrError, match="ranks"):
        cost.decode_us(1, 1, 0)
