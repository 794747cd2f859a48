# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/sglang_speed.py: what its check says of records. Measuring needs a GPU, and SGLang."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sglang_speed = importlib.import_module("sglang_speed")


def found(name: str, **changes: Any) -> dict[str, Any]:
    """What an engine leaves; flashbsr's take 10 ms where triton takes 12."""
    ms = 12.0 if name == sglang_speed.THEIRS else 10.0
    one = {
        "first_ms": ms, "step_ms": ms, "step_ms_least_and_most": [ms, ms], "total_ms": ms,
        "tokens_per_s": 1e3, "agreement": 0.95,
    }  # fmt: skip
    return {workload: {**one, **changes} for workload in sglang_speed.JUDGED}


def kept(folder: Path, **changes: Any) -> Path:
    content = {
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "version": "0.5.23",
        "date": "2026-11-30T00:00:00+00:00",
        "source_hash": sglang_speed.source_hash(),
        "outcomes": {name: found(name) for name in sglang_speed.ENGINES},
    }
    (folder / "sglang-nvidia-h200.json").write_text(json.dumps(content | changes))
    return folder


def test_a_good_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sglang_speed.check(kept(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "mixed  first    12.0 ms, step 12.00 ms (12.00 to 12.00),   1000 tokens/s" in said
    assert said.count("as float32 95.0%; 1.20, 1.20, 1.20 times as fast") == 4


def test_no_record(tmp_path: Path) -> None:
    assert sglang_speed.check(tmp_path) == 1


def test_tokens_that_float32_would_not_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of flashbsr, more often than triton's."""
    outcomes = {name: found(name) for name in sglang_speed.ENGINES}
    outcomes[sglang_speed.OURS] = found(sglang_speed.OURS, agreement=0.91)
    assert sglang_speed.check(kept(tmp_path, outcomes=outcomes)) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"source_hash": "0" * 16}, "STALE"),
        ({"outcomes": {}}, "INCOMPLETE"),
        (
            {"outcomes": {n: {"problem": "late"} for n in sglang_speed.ENGINES}},
            "FAILED: late",
        ),
    ],
)
def test_a_bad_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], word: str
) -> None:
    assert sglang_speed.check(kept(tmp_path, **changes)) == 1
    assert word in capsys.readouterr().out


def test_prompts_fill_no_graph() -> None:
    """`mixed` is padded, which is what serving mostly does."""
    assert [len(batch) for batch in sglang_speed.prompts().values()] == [60, 16]
