# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tools/wheel_record.py: what it keeps, and what it does not let pass."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from toolchain import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import wheel_record

FOUND = {"cuda_kernels": 206, "import_flashbsr_s": 0.05, "first_attention_s": 0.03}


def keep(
    folder: Path,
    name: str,
    *more: str,
    tests: str = "9 passed, 2 skipped in 1.00s",
    **found: float,
) -> int:
    """Note a made-up wheel."""
    (folder / "a.whl").write_bytes(b"wheel")
    (folder / "found.json").write_text(json.dumps(FOUND | found))
    (folder / "tests.log").write_text(f"....\n== {tests} ==\n")
    files = {"wheel": "a.whl", "found": "found.json", "tests": "tests.log", "out": "record.json"}
    options = [f"--{option}={folder / file}" for option, file in files.items()]
    return wheel_record.main([f"--name={name}", "--install-seconds=2.04", *options, *more])


def check(folder: Path) -> int:
    return wheel_record.main(["--check", f"--out={folder / 'record.json'}"])


def test_good_ones_are_kept_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path) == 1
    assert keep(tmp_path, "abi3") == 0
    assert check(tmp_path) == 1
    assert "cp311: MISSING" in capsys.readouterr().out
    assert keep(tmp_path, "cp311") == 0
    # A processor of software is as slow as it is.
    assert keep(tmp_path, "arm64", "--emulated", import_flashbsr_s=2.5) == 0
    assert check(tmp_path) == 0
    entry = json.loads((tmp_path / "record.json").read_text())["abi3"]
    assert (entry["install_s"], entry["bytes"], entry["cuda_kernels"]) == (2.0, 5, 206)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tests": "1 failed, 9 passed in 1.00s"}, "tests: 1 failed"),
        ({"tests": "9 passed, 1 error in 1.00s"}, "tests: 9 passed, 1 error"),
        ({"tests": "no tests ran in 0.01s"}, "tests: no tests ran"),
        ({"import_flashbsr_s": 0.7}, "import_flashbsr_s 0.7; expected 0.5 at most"),
        ({"first_attention_s": 1.2}, "first_attention_s 1.2; expected 1.0 at most"),
    ],
)
def test_bad_ones_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, said: str
) -> None:
    assert keep(tmp_path, "abi3") == keep(tmp_path, "cp311", **changes) - 1 == 0
    assert said in capsys.readouterr().out
    assert check(tmp_path) == 1


@pytest.mark.parametrize(
    ("name", "old", "new", "stale"),
    [
        ("pyproject.toml", 'wheel.py-api = "cp312"', 'wheel.py-api = "cp313"', True),
        ("pyproject.toml", "SOURCE_DATE_EPOCH", "OTHER", True),
        ("pyproject.toml", "line-length = 100", "line-length = 101", False),
        ("CMakeLists.txt", "project(flashbsr", "project(other", True),
        ("CMakeLists.txt", "# Targets:", "# Other words:", False),
        ("tools/check_wheel.py", "MEGABYTES = 25", "MEGABYTES = 26", True),
    ],
)
def test_what_makes_it_stale(tmp_path: Path, name: str, old: str, new: str, stale: bool) -> None:
    for part in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copyfile(ROOT / part, tmp_path / part)
    for part in ("cmake", "cpp/bind", "cpp/cpu", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    assert wheel_record.decisive_hash(tmp_path) == wheel_record.decisive_hash(ROOT)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    changed = wheel_record.decisive_hash(tmp_path) != wheel_record.decisive_hash(ROOT)
    assert changed == stale
