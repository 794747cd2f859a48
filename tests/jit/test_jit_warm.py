# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr warm``: what it compiles, and what it is told wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
from flashbsr import AttentionSpec, FlashbsrError, TaskInfo
from flashbsr.cli import main
from flashbsr.jit import cache
from flashbsr.warm import load_spec, warm
from harness import CPU, DEVICES

SPECS = """
import flashbsr
import numpy as np
SLOPES = np.ones(4, np.float32)
CAPTURED = flashbsr.AttentionSpec.from_functions(
    score_mod=lambda score, b, h, q_idx, kv_idx: score + SLOPES[h] * (kv_idx - q_idx)
)
NAMED = flashbsr.AttentionSpec.from_functions(
    score_mod=lambda score, b, h, q_idx, kv_idx, cap, table: score * cap + table[h, kv_idx],
    extras={"cap": "float32", "table": ("float16", 2)},
)
PLAIN = flashbsr.AttentionSpec()
NUMBER = 3
"""
SIZES = ["--num-qo-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--backend", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHBSR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHBSR_QUIET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_specs.py").write_text(SPECS)
    return tmp_path


@pytest.mark.parametrize("name", ["my_specs.py:CAPTURED", "my_specs:NAMED"])
def test_a_variant_is_in_the_cache_afterwards(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["warm", "--spec", name, "--dtype", "float32", "--page-size", "8", *SIZES]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith(f"{name}: cpu_")
    assert len(cache.entries()) == 1

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cache, "_build", refuse)
    assert main(command) == 0


def task(**changes: object) -> TaskInfo:
    fields = {"q_dtype": "float32", "kv_dtype": "float32", "backend": "cpu", **changes}
    return TaskInfo(4, 2, 16, **fields)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [None, 8])
def test_what_the_build_has_is_not_compiled(kv_layout: str, page_size: int | None) -> None:
    spec = AttentionSpec(causal=True)
    assert warm(spec, task(kv_layout=kv_layout, head_dim_vo=8), page_size=page_size)
    assert cache.entries() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_specs", "module:NAME"),
        ("my_specs:MISSING", "MISSING"),
        ("my_specs.py:MISSING", "MISSING"),
        ("no_such_module:SPEC", "no_such_module"),
        ("no_such_file.py:SPEC", "no_such_file"),
        ("my_specs:NUMBER", "got int; expected an AttentionSpec"),
    ],
)
def test_wrong_specs(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--spec", text, "--dtype", "float32", *SIZES]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["q_dtype", "kv_dtype"])
def test_types_are_needed(missing: str) -> None:
    with pytest.raises(FlashbsrError, match=missing):
        warm(AttentionSpec(), task(**{missing: None}))


@pytest.mark.skipif(DEVICES == [CPU], reason="needs a GPU")
def test_on_a_gpu() -> None:
    names = warm(load_spec("my_specs.py:NAMED"), TaskInfo(
        8, 2, 128, q_dtype="bfloat16", kv_dtype="bfloat16", backend="cuda"
    ))  # fmt: skip
    assert len(cache.entries()) == len(set(names)) == 2
