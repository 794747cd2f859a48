# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/vllm_speed.py: what its check says of records. Measuring needs a GPU, and vLLM."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
vllm_speed = importlib.import_module("vllm_speed")


def found(name: str, **changes: Any) -> dict[str, Any]:
    """What an engine leaves; flashbsr's take 10 ms where others take 11."""
    ms = 10.0 if vllm_speed.ENGINES[name].backend == vllm_speed.OURS else 11.0
    one = {
        "first_ms": ms, "step_ms": ms, "step_ms_least_and_most": [ms, ms], "total_ms": ms,
        "tokens_per_s": 1e3, "build_us": 9.0, "gpu_first_ms": ms / 2, "gpu_step_ms": ms / 4,
    }  # fmt: skip
    workloads = vllm_speed.ENGINES[name].workloads
    return {
        "waits_per_step": 2.0,
        **{w: {**one, "agreement": 0.95, **changes} for w in workloads},
    }


def kept(folder: Path, **changes: Any) -> Path:
    content = {
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "version": "0.26.0",
        "date": "2026-11-25T00:00:00+00:00",
        "source_hash": vllm_speed.source_hash(),
        "outcomes": {name: found(name) for name in vllm_speed.ENGINES},
    }
    (folder / "vllm-nvidia-h200.json").write_text(json.dumps(content | changes))
    return folder


def test_a_good_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_speed.check(kept(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "mixed  first    10.0 ms" in said
    assert "; GPU 1.10, 1.10; 1.10 (goal 1.15), 1.10, 1.10" in said
    assert "waits for the GPU 2.0 times a step" in said


def test_a_record_of_an_older_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {name: found(name) for name in vllm_speed.ENGINES}
    for one in old.values():
        for workload in one.values():
            if isinstance(workload, dict):
                del workload["gpu_first_ms"]
    assert vllm_speed.check(kept(tmp_path, outcomes=old, source_hash="0" * 16)) == 1
    said = capsys.readouterr().out
    assert "STALE" in said
    assert "no 'gpu_first_ms'" in said


def test_how_long_a_gpu_is_busy() -> None:
    assert vllm_speed.covered([]) == 0.0
    assert vllm_speed.covered([(8.0, 9.0), (1.0, 3.0), (2.0, 5.0), (2.5, 4.0)]) == 5.0


def test_no_record(tmp_path: Path) -> None:
    assert vllm_speed.check(tmp_path) == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"source_hash": "0" * 16}, "STALE"),
        ({"outcomes": {}}, "INCOMPLETE"),
        ({"outcomes": {n: {"problem": "no GPU"} for n in vllm_speed.ENGINES}}, "FAILED: no GPU"),
        (
            {
                "outcomes": {
                    n: found(n, agreement=0.95 - 0.03 * (e.backend == vllm_speed.OURS))
                    for n, e in vllm_speed.ENGINES.items()
                }
            },
            "WRONG",
        ),
    ],
    ids=["stale", "incomplete", "failed", "tokens"],
)
def test_a_bad_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], word: str
) -> None:
    assert vllm_speed.check(kept(tmp_path, **changes)) == 1
    assert word in capsys.readouterr().out


def test_every_engine_has_one_to_be_told_over() -> None:
    assert all(engine.base in vllm_speed.ENGINES for engine in vllm_speed.ENGINES.values())


def test_prompts_of_a_prefix() -> None:
    prompts = vllm_speed.prompts()
    assert prompts == vllm_speed.prompts()
    assert len({tuple(p[:8000]) for p in prompts["shared"]}) == 1
    assert len({tuple(p[8000:]) for p in prompts["shared"]}) == 64
    assert all(3 <= t < vllm_speed.VOCAB for p in prompts["mixed"] for t in p)
