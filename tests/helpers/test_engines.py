# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/engines.py and how it judges, without an engine."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
engines = importlib.import_module("engines")
of_vllm = importlib.import_module("engines_vllm")
of_gpus = importlib.import_module("engines_vllm_gpu")
gpu_hash = importlib.import_module("gpu_hash")
processes = importlib.import_module("processes")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """An engine of two versions and cases, whose sources are a file."""
    (tmp_path / "source.py").write_text("x = 1\n")
    module = SimpleNamespace(
        VERSIONS=("1", "2"),
        SOURCES=("source.py",),
        CASES={"a": lambda: {"ok": True}, "b": lambda: {"ok": True}},
        version=lambda: module.now,
        packages=lambda: {"torch": "9"},
        now="1",
        record=tmp_path / "records" / "engines.json",
    )
    monkeypatch.setitem(sys.modules, "engines_abacus", module)
    monkeypatch.setattr(engines, "engines", lambda: ["abacus"])
    hashed = engines.source_hash
    monkeypatch.setattr(engines, "source_hash", lambda patterns: hashed(patterns, tmp_path))
    return module


def run(module: Any, *args: str) -> int:
    return engines.main([*args, "--out", str(module.record)])


def test_a_record_of_two_versions(engine: SimpleNamespace, capsys: Any) -> None:
    assert run(engine, "--check") == 1, "no record"
    assert run(engine, "--engine", "abacus") == 0
    assert run(engine, "--check") == 1, "the other version is missing"
    engine.now = "2"
    assert run(engine, "--engine", "abacus") == 0
    assert run(engine, "--check") == 0
    assert "abacus 2: 2 of 2 cases ok" in capsys.readouterr().out


def test_stale_and_incomplete_records(engine: SimpleNamespace, capsys: Any) -> None:
    engine.VERSIONS = ("1",)
    run(engine, "--engine", "abacus")
    source = engine.record.parent.parent / "source.py"
    source.write_text("x = 1  \n# a comment\n")
    assert run(engine, "--check") == 0
    source.write_text("x = 2\n")
    assert run(engine, "--check") == 1
    assert "STALE" in capsys.readouterr().out
    run(engine, "--engine", "abacus")
    engine.CASES["c"] = lambda: {"ok": True}
    assert run(engine, "--check") == 1
    assert "MISSING c" in capsys.readouterr().out


def test_failures_stay_visible(engine: SimpleNamespace, capsys: Any) -> None:
    """A case that says no, and one that cannot run; the others run all the same."""

    def unable() -> Any:
        raise RuntimeError("no memory")

    engine.VERSIONS = ("1",)
    engine.CASES = {"no": lambda: {"ok": False}, "unable": unable, "yes": lambda: {"ok": True}}
    assert run(engine, "--engine", "abacus") == 1
    kept = json.loads(engine.record.read_text())["engines"]["abacus"]["1"]["cases"]
    assert kept["unable"]["problem"] == "RuntimeError: no memory" and kept["yes"]["ok"]
    assert run(engine, "--check") == 1
    assert "FAILED no, unable" in capsys.readouterr().out


def test_what_is_found_is_kept_at_once(engine: SimpleNamespace) -> None:
    """Two cases at once, of which one waits for the other to be in the record."""

    def second() -> Any:
        for _ in range(500):
            if engine.record.exists():
                return {"ok": True}
            time.sleep(0.01)
        return {"ok": False}

    engine.VERSIONS = ("1",)
    engine.CASES = {"second": second, "first": lambda: {"ok": True}}
    assert run(engine, "--engine", "abacus", "--jobs", "2") == 0
    assert run(engine, "--check") == 0


def test_records_of_places(engine: SimpleNamespace) -> None:
    assert engines.record_of(engine).name == "engines-cpu.json"
    assert engines.record_of(of_gpus).name == "engines-gpu.json"


def test_logits_of_gpus() -> None:
    """One step of a bfloat16 between 8 and 16 is rounding, two are not."""
    for shift, good in ((2**-4, True), (2**-3, False)):
        found = of_gpus.alike(generated([1, 2]), generated([1, 2], shift=shift))
        assert found["ok"] == good and found["logits_apart"] == shift
    assert not of_gpus.alike(generated([1, 2]), generated([1, 9]))["ok"]


def test_nearness_on_gpus() -> None:
    """As far from the finer pass as the coarse one, and as much again, is near."""
    fine, coarse = generated([1, 2]), generated([1, 2], shift=2**-6)
    for shift, good in ((2**-6, True), (2**-5, True), (2**-4, False)):
        found = of_gpus.as_near(fine, coarse, generated([1, 2], shift=shift))
        assert found["ok"] == good and found["mean_error"] == shift / 2  # of two tokens, one
    assert not of_gpus.as_near(fine, coarse, generated([1, 9]))["ok"]
    rough = generated([1, 2], shift=2.0)
    assert not of_gpus.as_near(fine, rough, generated([1, 2], shift=2**-3))["ok"], "as of others"


def test_chosen_cases_are_not_recorded(engine: SimpleNamespace) -> None:
    assert run(engine, "--engine", "abacus", "--only", "a") == 0
    assert not engine.record.exists()
    with pytest.raises(SystemExit, match="no case z"):
        run(engine, "--engine", "abacus", "--only", "z")


def generated(*tokens: list[int], gap: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
    """A pass; the second best token of every place is `gap` behind."""
    return {
        "tokens": list(tokens),
        "logprobs": [
            [{str(t): -0.5 + shift, str(t + 1): -0.5 - gap} for t in row] for row in tokens
        ],
    }


def test_equal_tokens() -> None:
    same = of_vllm.compare(generated([1, 2, 3]), generated([1, 2, 3]), "float32")
    assert same["ok"] and same["compared"] == same["tokens"] == 3


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (generated([1, 2, 3]), generated([1, 9, 3])),  # no tie
        (generated([1, 2, 3]), generated([1, 2, 3], shift=1e-3)),  # other probabilities
        (generated([1, 2, 3]), generated([1, 2])),  # fewer tokens
        (generated([]), generated([])),  # two that failed are equal
        (generated([1, 2], gap=0.0), generated([5, 6], gap=0.0)),  # nothing is left to compare
    ],
)
def test_what_is_not_equal(want: dict[str, Any], got: dict[str, Any]) -> None:
    assert not of_vllm.compare(want, got, "float32")["ok"]


def test_behind_a_tie_nothing_is_compared() -> None:
    long = list(range(20, 40))
    want, got = generated(long, [1], gap=1e-6), generated([*long[:19], 7], [1], gap=1e-6)
    judged = of_vllm.compare(want, got, "float32")
    assert judged["ok"] and judged["compared"] == 20 and judged["tokens"] == 21


def test_errors_are_of_places_with_the_same_past() -> None:
    exact = generated([1, 2, 3])
    assert of_vllm.error(exact, generated([1, 2, 3], shift=0.25)) == pytest.approx(0.125)
    assert of_vllm.error(exact, generated([1, 9, 3])) == 0


def test_the_record_of_a_gpu_does_not_hang_on_an_engine() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in gpu_hash.hashed_files()]
    assert not [name for name in names if "/vllm/" in name]
    assert "python/flashbsr/engine/attention.py" in names


def test_a_process_ends_before_its_workers(tmp_path: Path) -> None:
    """Its end is what is waited for, though a worker holds the output; and the worker's end."""
    program = tmp_path / "engine.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
        "os._exit(int(sys.argv[1]))\n"
    )
    begin = time.monotonic()
    for status in (0, 7):
        command = [sys.executable, str(program), str(status)]
        found, said = processes.to_its_end(command, dict(os.environ), 30)
        assert found == status
        deadline = time.monotonic() + 10
        while is_running(int(said)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert time.monotonic() - begin < 30
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(subprocess.TimeoutExpired):
        processes.to_its_end(command, dict(os.environ), 0.2)


def is_running(process: int) -> bool:
    """Not a zombie, whose parent has not asked for its end."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
