# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of plans: all that a plan has, once, and nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import cli, viz


def data_of(path: Path) -> Any:
    page = path.read_text()
    assert not re.search(r"https?://|src=|@import|url\(", page), "one file, no network"
    return json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page, re.S)[1])  # type: ignore[index]


def planned(kv_lens: Any, heads: int = 2, workers: int = 8) -> flashbsr.Plan:
    task = flashbsr.TaskInfo(4 * heads, heads, 64, num_workers=workers)
    attention = flashbsr.Attention(flashbsr.AttentionSpec(), task)
    count = len(kv_lens)
    attention.plan(flashbsr.Ragged(np.arange(count + 1), np.concatenate([[0], np.cumsum(kv_lens)])))
    return attention.plan_info


@pytest.mark.parametrize("kv_lens", [[100, 5000, 3], [0], [700] * 31 + [60000]])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_item_is_in_a_lane(kv_lens: list[int], heads: int, tmp_path: Path) -> None:
    plan = planned(kv_lens, heads)
    viz.write_page(plan, tmp_path / "p.html")
    (part,) = data_of(tmp_path / "p.html")["plans"]
    lanes = part["lanes"]
    assert sum(lane["count"] for lane in lanes) == plan.header.num_workers
    assert sum(lane["count"] * len(lane["items"]) for lane in lanes) == plan.header.num_items
    cost = sum(lane["count"] * sum(item[0] for item in lane["items"]) for lane in lanes)
    assert cost == plan.cost().sum() == pytest.approx(part["mean"] * plan.header.num_workers)
    kept = {tuple(item[4:7]) for lane in lanes for item in lane["items"] if item[7] >= 0}
    split = plan.items[plan.items["slot"] >= 0]
    rows = zip(split["row_count"], split["kv_begin"], split["kv_end"], strict=True)
    assert kept == {tuple(map(int, row)) for row in rows}
    assert len(part["names"]) == len(part["colors"]) == len(kv_lens)


def test_lanes_of_heads_are_one(tmp_path: Path) -> None:
    viz.write_page(planned([4000, 4000], heads=4, workers=8), tmp_path / "p.html")
    lanes = data_of(tmp_path / "p.html")["plans"][0]["lanes"]
    assert [lane["count"] for lane in lanes] == [4, 4]
    assert lanes[0]["name"] == "0 and 3 more"


def test_names_are_text(tmp_path: Path) -> None:
    viz.write_page({"</script><b>": planned([9])}, tmp_path / "p.html")
    assert data_of(tmp_path / "p.html")["plans"][0]["text"].startswith("</script><b>: 1 request")


def test_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.html"
    line = ["plan", "--kv-lens", "100,7", "--qo-lens", "3,1", "--causal", "--page-size", "4"]
    assert cli.main([*line, "--ranks", "3", "--interleave", "4", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert [said.count(f"rank {r}\n") for r in range(3)] == [1, 1, 1]
    plans = data_of(page)["plans"]
    assert [plan["text"][:7] for plan in plans] == ["Rank 0:", "Rank 1:", "Rank 2:"]
    keys = [max(item[6] for lane in p["lanes"] for item in lane["items"]) for p in plans]
    assert keys == [36, 32, 32]
    assert cli.main([*line, "--ranks", "2", "--out", str(page)]) == 2
    assert "--html or the terminal" in capsys.readouterr().err
