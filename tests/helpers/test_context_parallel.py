# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/context_parallel.py, on a machine without GPUs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="process groups are PyTorch's")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
rows = importlib.import_module("context_parallel_rows")
tool = importlib.import_module("context_parallel")

SMALL = {
    "decode": rows.Row(3, 5 * rows.PAGE, 1.9, 1, 8, 2, 64),
    "verify": rows.Row(2, 3 * rows.PAGE, 1.9, 4, 8, 2, 64),
    "MLA": rows.Row(2, 2 * rows.PAGE, 1.9, 1, 4, 1, 576, 512),
    "prefill": rows.Row(1, 301, 1.9, 301, 4, 2, 64),
    "refused": rows.Row(1, rows.PAGE, 1.9, 1, 4, 3, 64),
}


def outcome(**changes: Any) -> dict[str, Any]:
    found = {"ok": True, "one_us": 968.0, "us": {"a": 508.0}, "best": "a", "times": 1.9}
    return {**found, "errors": {"a": 0.0}, "goal": 1.9, **changes}


def content(**changes: Any) -> dict[str, Any]:
    kept = {"device": "NVIDIA Abacus", "ranks": 2, "date": "2026-11-24", "source_hash": "now"}
    return {**kept, "rows": {name: outcome() for name in tool.ROWS}, **changes}


def test_rows_run_and_agree_with_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """The same code as on GPUs, over gloo: the times say nothing, the results do."""
    found = tool.run(2, "cpu", SMALL)
    assert "heads" in found.pop("refused")["problem"]
    for name, result in found.items():
        assert result["ok"], (name, result)
        assert 0 < max(result["errors"].values()) < rows.TOLERANCE
        assert result["us"][result["best"]] == min(result["us"].values())
        assert result["times"] == pytest.approx(result["one_us"] / min(result["us"].values()))
        assert set(result["predicted_us"]) == {*SMALL[name].methods(), "one"}
    assert set(found["decode"]["us"]) == {
        f"{method} {travel}" for method in SMALL["decode"].methods("cpu") for travel in rows.TRAVEL
    }
    assert len(capsys.readouterr().out.splitlines()) == len(SMALL)


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"one_us": 2.0, "us": {"a": 1.0}, "errors": {"a": 0.1}}
    monkeypatch.setattr(rows, "_decode", lambda row, here: found)
    said = rows.measure(SMALL["decode"], rows.Here(2, 0, "cpu"))
    assert not said["ok"] and "WRONG" in tool.line("decode", said)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_dry_run(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--dry-run", f"--ranks={ranks}"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:27].strip() for line in lines] == list(tool.ROWS)
    for line in lines:
        times = float(re.search(r"([\d.]+) times", line)[1])
        assert 0 < times <= ranks * 1.01


def test_as_many_gpus_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match=r"--ranks 4 needs 4 GPUs, here are 1: .*--dry-run"):
        tool.main(["--ranks", "4"])


@pytest.mark.parametrize("argv", [["--ranks", "1"], ["--only", "decode"]])
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.main(argv)
    assert re.search("--ranks is 2 or more|no row decode; there are decode 1 x",
                     capsys.readouterr().err)  # fmt: skip


def test_what_a_record_must_have() -> None:
    assert tool.verdict(content(), "now")[0]
    good, lines = tool.verdict(content(), "later")
    assert not good and "STALE" in lines[0]
    some = content()
    some["rows"].popitem()
    good, lines = tool.verdict(some, "now")
    assert not good and "MISSING" in lines[-1]
    bad = content()
    bad["rows"]["decode 16 x 8192"] = {"ok": False, "problem": "no kernel"}
    good, lines = tool.verdict(bad, "now")
    assert not good and any("FAILED: no kernel" in line for line in lines)


def test_missed_goals_are_told_of_two() -> None:
    good, lines = tool.verdict(content(), "now")
    assert good and sum("goal missed" in line for line in lines) == 3
    assert not any("goal missed" in line for line in tool.verdict(content(ranks=4), "now")[1])


def test_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "RECORDS", tmp_path)
    assert tool.main(["--check"]) == 1
    path = tmp_path / "ranks-nvidia-abacus-x2.json"
    path.write_text(json.dumps(content(source_hash=tool.source_hash())))
    assert tool.main(["--check"]) == 0


def test_records_of_one_gpu_are_others() -> None:
    record = importlib.import_module("gpu_record")
    (line,) = [x for x in Path(record.__file__).read_text().splitlines() if "others = " in x]
    assert "ranks-" in line
