# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/transformers_speed.py: what its check says of records. Measuring needs a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
transformers_speed = importlib.import_module("transformers_speed")


def row(**changes: Any) -> dict[str, Any]:
    return {
        "ok": True,
        "tokens_per_s": {"sdpa": 100.0, "fbsr": 110.0},
        "times": 1.1,
        "goal": 1.0,
        "agreement": {"sdpa": 0.9, "fbsr": 0.91},
    } | changes


def kept(folder: Path, **changes: Any) -> Path:
    content = {
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "version": "5.17.0",
        "date": "2026-11-25T00:00:00+00:00",
        "source_hash": transformers_speed.source_hash(),
        "outcomes": {name: row() for name in transformers_speed.ROWS},
    }
    (folder / "transformers-nvidia-h200.json").write_text(json.dumps(content | changes))
    return folder


def test_a_good_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transformers_speed.check(kept(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "1.10 times (goal 1.0); as float32: 90.0%, 91.0%" in said
    assert "missed" not in said


def test_no_record(tmp_path: Path) -> None:
    assert transformers_speed.check(tmp_path) == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"source_hash": "0" * 16}, "STALE"),
        ({"outcomes": {}}, "INCOMPLETE"),
        ({"outcomes": {name: row(ok=False) for name in transformers_speed.ROWS}}, "WRONG"),
        (
            {"outcomes": {n: {"ok": False, "problem": "late"} for n in transformers_speed.ROWS}},
            "FAILED: late",
        ),
    ],
)
def test_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], word: str
) -> None:
    assert transformers_speed.check(kept(tmp_path, **changes)) == 1
    assert word in capsys.readouterr().out


def test_a_missed_goal_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {name: row(times=0.5) for name in transformers_speed.ROWS}
    assert transformers_speed.check(kept(tmp_path, outcomes=rows)) == 0
    assert "goal missed" in capsys.readouterr().out
