# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/gpu_record.py and what it runs, on a machine without a GPU."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from harness import framework

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
gpu_hash = importlib.import_module("gpu_hash")
gpu_steps = importlib.import_module("gpu_steps")
gpu_record = importlib.import_module("gpu_record")

DEVICE = {"name": "NVIDIA Abacus 9", "driver": "580.1"}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[cuda]"/>
<testcase classname="tests.test_a" name="test_two[cuda]"><skipped/></testcase>
<testcase classname="tests.test_b" name="test_three[cuda]"><failure message="no"/></testcase>
<testcase classname="tests.test_b" name="test_four[cuda]"><error message="no"/></testcase>
</testsuite></testsuites>"""
CLEAN = """ran decode_sm90_d128_bf16_r8_plain
ran rope
========= ERROR SUMMARY: 0 errors
"""


def tree(root: Path, **files: str) -> Path:
    """A tree with one file of each kind."""
    content = {
        "include/flashbsr/core/a.h": 'int a;  // one\nconst char* s = "// no comment";\n',
        "cpp/instances.txt": "# a table\ndecode sm80\n",
        "cpp/cuda/b.cpp": "/* two\n lines */ int b;\n",
        "python/flashbsr/c.py": '"""Doc."""\n\n# a comment\nx = 1\n\n\ndef f():\n    """More."""\n',
        "python/flashbsr/cli.py": "y = 1\n",
        "include/flashbsr/cpu/d.h": "int d;\n",
        **files,
    }
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        ("include/flashbsr/core/a.h", 'int a;\n\n  const char* s = "// no comment";\n', True),
        ("include/flashbsr/core/a.h", 'int a;\nconst char* s = "// other";\n', False),
        ("include/flashbsr/core/a.h", 'int a = 1;\nconst char* s = "// no comment";\n', False),
        ("cpp/instances.txt", "# the table\ndecode sm80  # here\n", True),
        ("cpp/instances.txt", "decode sm80,sm90\n", False),
        ("cpp/cuda/b.cpp", "int b;  // two lines\n", True),
        ("cpp/cuda/e.cpp", "int e;\n", False),
        ("python/flashbsr/c.py", '"""Longer\ndoc."""\nx = 1\ndef f():\n    """."""\n', True),
        ("python/flashbsr/c.py", '"""Doc."""\nx = 2\ndef f():\n    """More."""\n', False),
        ("python/flashbsr/cli.py", "y = 2\n", True),
        ("python/flashbsr/bench/runner.py", "z = 1\n", True),
        ("include/flashbsr/cpu/d.h", "int dd;\n", True),
    ],
)
def test_hash(name: str, text: str, same: bool, tmp_path: Path) -> None:
    """Code counts where it decides a GPU's results; words about it do not."""
    before = gpu_hash.source_hash(tree(tmp_path / "a"))
    after = gpu_hash.source_hash(tree(tmp_path / "b", **{name: text}))
    assert (before == after) == same


def test_hash_covers_the_tree() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in gpu_hash.hashed_files()}
    for name in (
        "include/flashbsr/core/launch.h",
        "include/flashbsr/plan/schedule.h",
        "cpp/api/attention.cpp",
        "python/flashbsr/engine/attention.py",
        "python/flashbsr/arrays/torch.py",
    ):
        assert name in names
    assert not [name for name in names if "/cpu/" in name or "__pycache__" in name]


def test_junit() -> None:
    found = gpu_steps.read_junit(JUNIT)
    assert not found["ok"]
    assert found["counts"] == {"passed": 1, "failed": 1, "errors": 1, "skipped": 1}
    assert found["failures"] == ["tests.test_b.test_three[cuda]", "tests.test_b.test_four[cuda]"]
    assert not gpu_steps.read_junit("<testsuites/>")["ok"], "no test is no success"


@pytest.mark.parametrize(
    ("text", "status", "ok"),
    [
        (CLEAN, 0, True),
        (CLEAN.replace("0 errors", "3 errors"), 9, False),
        (CLEAN, 1, False),
        (CLEAN + "not run: prefill: decode ran instead\n", 0, False),
        ("========= ERROR SUMMARY: 0 errors\n", 0, False),
        ("ran rope\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", 0, True),
        ("ran rope\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)\n", 9, False),
    ],
)
def test_sanitizer_output(text: str, status: int, ok: bool) -> None:
    found = gpu_steps.read_sanitizer(text, status)
    assert found["ok"] == ok
    assert json.dumps(found)


def test_parts_of_a_sanitizer_are_one_outcome() -> None:
    good = gpu_steps.read_sanitizer(CLEAN, 0)
    bad = gpu_steps.read_sanitizer(CLEAN.replace("0 errors", "3 errors"), 9)
    assert gpu_steps.join_parts([good, good]) == {
        "ok": True,
        "errors": 0,
        "kernels": sorted(2 * good["kernels"]),
    }
    found = gpu_steps.join_parts([good, bad, good])
    assert not found["ok"]
    assert found["errors"] == 3
    assert found["failures"] == bad["failures"]


def test_parts_are_all_kernels() -> None:
    framework("torch")
    cases = importlib.import_module("sanitizer_cases")
    kernels = list(range(8))
    parts = [cases.part(f"{i}/3") for i in range(3)]
    assert sorted(k for first, step in parts for k in kernels[first::step]) == kernels
    for text in ("3/3", "-1/2", "0/0"):
        with pytest.raises(argparse.ArgumentTypeError, match="I/N"):
            cases.part(text)


def test_sanitizer_without_a_summary_could_not_run() -> None:
    with pytest.raises(gpu_steps.StepError, match="Device not supported"):
        gpu_steps.read_sanitizer("========= Device not supported\n", 1)


def test_bench_figures() -> None:
    results = [
        {
            "name": "decode",
            "metrics": {"us_scaled": 130.0},
            "goals": [{"metric": "us_scaled", "at_most": 124.5, "met": False}],
        },
        {"name": "plan", "metrics": {"plan_us": 9.0}, "goals": []},
        {"name": "e4m3", "metrics": {}, "goals": [], "note": "not run: no kernel"},
    ]
    limits = {"read_gbs": 4500.0, "samples": [1, 2]}
    found = gpu_steps.read_bench({"results": results, "limits": limits})
    assert found["ok"]
    assert found["missed"] == ["decode: us_scaled 130, goal <= 124.5", "e4m3: not run: no kernel"]
    assert set(found["figures"]) == {"decode", "plan", "e4m3"}
    assert found["limits"] == {"read_gbs": 4500.0}


def test_a_step_has_its_time() -> None:
    with pytest.raises(gpu_steps.StepError, match="ran out of 1 s"):
        gpu_steps.run([sys.executable, "-c", "import time; time.sleep(60)"], 1)
    # A process of its own that holds the pipe does not hold the tool.
    with pytest.raises(gpu_steps.StepError, match="ran out of 1 s"):
        gpu_steps.run(["sh", "-c", "sleep 60 & sleep 60"], 1)


def outcome(ok: bool = True, **more: Any) -> dict[str, Any]:
    return {"ok": ok, "counts": {"passed": 5}, "output": "ok", **more}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Steps that give what the test says, records in a folder of their own."""
    steps = {name: outcome() for name in gpu_record.STEPS}
    monkeypatch.setattr(gpu_record, "RECORDS", tmp_path)
    monkeypatch.setattr(gpu_record, "source_hash", lambda: "aaaa")
    monkeypatch.setattr(gpu_steps, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu_record, "runner", lambda name, _: lambda *_: steps[name])
    return steps


def test_records(recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs complete a record; other sources make it stale; a failure stays visible."""
    assert gpu_record.main(["--check"]) == 1, "no record"
    assert gpu_record.main(["--only", "tests,bench"]) == 0
    path = tmp_path / "nvidia-abacus-9.json"
    assert list(json.loads(path.read_text())["steps"]) == ["tests", "bench"]
    assert gpu_record.main(["--check"]) == 1, "incomplete"
    assert gpu_record.main(["--only", "sanitize,first,consumer,captures", "--merge"]) == 0
    assert list(json.loads(path.read_text())["steps"]) == list(gpu_record.STEPS)
    assert gpu_record.main(["--check"]) == 0
    monkeypatch.setattr(gpu_record, "source_hash", lambda: "bbbb")
    assert gpu_record.main(["--check"]) == 1, "stale"
    recorded["tests"] = outcome(ok=False, failures=["tests.test_a"])
    assert gpu_record.main(["--only", "tests", "--merge"]) == 1
    assert list(json.loads(path.read_text())["steps"]) == ["tests"], "stale steps go"
    assert gpu_record.main(["--check"]) == 1, "failed"


def test_verdict_names_what_is_wrong(
    recorded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise gpu_steps.StepError("compute-sanitizer is not installed")

    recorded["tests"] = outcome(ok=False, failures=["tests.test_a.test_one"])
    recorded["bench"] = {"ok": True, "figures": {}, "missed": ["decode: 130, goal <= 124.5"]}
    steps = dict(recorded)
    monkeypatch.setattr(
        gpu_record,
        "runner",
        lambda name, _: broken if name == "racecheck" else lambda *_: steps[name],
    )
    assert gpu_record.main([]) == 1
    capsys.readouterr()
    assert gpu_record.main(["--check"]) == 1
    text = capsys.readouterr().out
    for part in ("NVIDIA Abacus 9", "test_one", "goal missed: decode", "is not installed"):
        assert part in text


def test_the_records_that_are_kept_are_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of engines beside them have programs of their own."""
    gpu_record.check()
    said = capsys.readouterr().out
    assert said.count("tests/records/") == len(list(gpu_record.RECORDS.glob("nvidia-*.json"))) > 0


def test_names_of_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_record.parse_steps("all") == list(gpu_record.STEPS)
    assert gpu_record.parse_steps("bench,sanitize") == ["bench", *gpu_record.SANITIZERS]
    with pytest.raises(SystemExit):
        gpu_record.main(["--only", "magic"])
    assert "magic" in capsys.readouterr().err


def test_device_slug() -> None:
    assert gpu_steps.slug("NVIDIA H200") == "nvidia-h200"
    assert gpu_steps.slug("Tesla T4 (16GB)") == "tesla-t4-16gb"


def test_sanitizer_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the table has problems and each helper kernel a call; here the CPU runs them."""
    framework("torch")
    cases = importlib.import_module("sanitizer_cases")
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    columns = ("family", "arch", "head_dim", "kv", "rows", "variant")
    kernels: list[dict[str, Any]] = []
    for line in (ROOT / "cpp/instances.txt").read_text().splitlines():
        values = line.partition("#")[0].split()[:6]  # without "rare"
        if not values:
            continue
        parts = [x.split(",") for x in values]
        for arch, tile, variant in product(parts[1], parts[4], parts[5]):
            dims, types = (x[-1] for x in parts[2:4])
            row = dict(zip(columns, (parts[0][0], arch, dims, types, tile, variant), strict=True))
            dim, _, dim_vo = row["head_dim"].partition("x")
            texts = {"head_dim": dim, "head_dim_vo": dim_vo or dim, "rows": row["rows"]}
            numbers = {k: None if text == "-" else int(text) for k, text in texts.items()}
            kernels.append({**row, **numbers, "name": "_".join(row.values())})
    hopper = {kernel["name"] for kernel in kernels if kernel["arch"] == "sm90a"}
    assert hopper
    assert not hopper & {kernel["name"] for kernel in cases.reachable(kernels, 100)}
    chosen = cases.reachable(kernels, 90)
    assert hopper < {kernel["name"] for kernel in chosen}
    assert len(chosen) < len(kernels)
    monkeypatch.setattr(cases, "check_pages", lambda: None)
    for name in ("check_pages", "merge_peers"):  # for which there is nothing on the CPU
        monkeypatch.setitem(cases.OPS, name, lambda: None)
    for kernel in chosen:
        others = cases.run_kernel(kernel)
        # The CPU's kernel is none of the table's, which is what it must say.
        assert all(name.startswith("cpu_") for name in others)
        assert bool(others) == (kernel["rows"] is not None)


def test_a_case_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row says how it went, in the words that the record reads."""
    framework("torch")
    cases = importlib.import_module("sanitizer_cases")

    def run_kernel(kernel: dict[str, Any]) -> list[str]:
        if kernel["name"] == "bad":
            raise KeyError("mixed", 192)
        return [] if kernel["name"] == "good" else ["good", "good"]

    monkeypatch.setattr(cases, "run_kernel", run_kernel)
    assert [cases.report({"name": name}) for name in ("bad", "good", "other")] == [0, 1, 0]
    said = capsys.readouterr().out
    assert (
        said
        == "not run: bad: KeyError: ('mixed', 192)\nran good\nnot run: other: good ran instead\n"
    )
    found = gpu_steps.read_sanitizer("========= ERROR SUMMARY: 0 errors\n" + said, 1)
    assert not found["ok"]
    assert found["kernels"] == ["good"]
    assert len([line for line in found["failures"] if line.startswith("not run: ")]) == 2


def test_the_first_decode_is_the_middle_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.9, 0.2, 0.4, 0.6, 0.6, 0.1))

    def said(command: list[str], *_: Any) -> subprocess.CompletedProcess[str]:
        line = json.dumps({"import_s": 0.03, "first_decode_s": next(seconds)})
        return subprocess.CompletedProcess(command, 0, f"a warning\n{line}\n")

    monkeypatch.setattr(gpu_steps, "run", said)
    found = gpu_steps.first(60)
    assert found["ok"]
    assert found["output"] == "import 0.030 s, then 0.400 s"
    assert not gpu_steps.first(60)["ok"]
