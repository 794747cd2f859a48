# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Two builds of a wheel are equal bytes, and it says what it is made of.

    FLASHBSR_SLOW=1 python -m pytest tests/build/test_reproducible.py

Two builds of everything without a compiler's cache take three minutes of CPU time, so they are
asked for; the workflow of releases does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from toolchain import ROOT, compiler, run

PARTS = ("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "cmake", "cpp", "include",
         "python")  # fmt: skip
SBOM = ROOT / "cmake/sbom.py"


def copy_tree(folder: Path) -> Path:
    """The sources, without what builds in place leave beside them."""
    folder.mkdir(parents=True)
    built = shutil.ignore_patterns("*.so", "_core.pyi", "__pycache__")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=built)
        else:
            shutil.copyfile(ROOT / name, folder / name)
    for path in (folder / "python/flashbsr").iterdir():
        if path.is_symlink():
            path.unlink()
    return folder


def build_wheel(source: Path, out: Path, *environment: str) -> Path:
    """Build the CPU engine's wheel, from nothing."""
    unset = ("SKBUILD_BUILD_DIR", "SKBUILD_CMAKE_DEFINE", "FLASHBSR_CUDA_TOOLKIT")
    options = [f"--unset={name}" for name in (*unset, "CMAKE_CXX_COMPILER_LAUNCHER")]
    command = ["env", *options, f"CXX={compiler()}", *environment]
    command += [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out)]
    outcome = run([*command, "-C", "cmake.define.FLASHBSR_CUDA=OFF", str(source)])
    assert outcome.status == 0, outcome.output
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.skipif(not os.environ.get("FLASHBSR_SLOW"), reason="minutes; FLASHBSR_SLOW=1 runs it")
@pytest.mark.timeout(1800)
def test_two_builds_are_equal(tmp_path: Path) -> None:
    """In folders of other names and lengths, other time zones, by one job and by many."""
    first = build_wheel(copy_tree(tmp_path / "a/flashbsr"), tmp_path / "out")
    second = build_wheel(
        copy_tree(tmp_path / "another/folder/of/sources"), tmp_path / "out2",
        "TZ=Asia/Tokyo", "CMAKE_BUILD_PARALLEL_LEVEL=1",
    )  # fmt: skip
    with zipfile.ZipFile(first) as a, zipfile.ZipFile(second) as b:
        assert a.namelist() == b.namelist()
        different = [name for name in a.namelist() if a.read(name) != b.read(name)]
        assert not different
        (sbom,) = [name for name in a.namelist() if ".dist-info/sboms/" in name]
        assert json.loads(a.read(sbom))["bomFormat"] == "CycloneDX"
        module = next(a.read(name) for name in a.namelist() if name.endswith(".so"))
        assert str(tmp_path).encode() not in module
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (first, second)}
    assert len(digests) == 1


def sbom(folder: Path, *options: str) -> dict:
    """What the step of the build writes."""
    package = folder / "site/nanobind-3.9.7.dist-info"  # whether or not it is installed here
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nanobind\nVersion: 3.9.7\n")
    path = folder / "flashbsr.cdx.json"
    command = ["env", f"PYTHONPATH={package.parent}", sys.executable, SBOM, path, *options]
    outcome = run([*command, "--version=0.1.0", "--compiler=GNU 14.2.1"])
    assert outcome.status == 0, outcome.output
    return dict(json.loads(path.read_text()))


def test_bill_of_materials(tmp_path: Path) -> None:
    """What readers of CycloneDX look for; every reference leads somewhere; nothing changes."""
    found = sbom(tmp_path, "--cuda=nvrtc 12.8")
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert {"serialNumber", "timestamp"}.isdisjoint({*found, *found["metadata"]})
    parts = {
        part["bom-ref"]: part for part in [found["metadata"]["component"], *found["components"]]
    }
    assert set(parts) == {"flashbsr", "nanobind", "robin-map"}
    assert all(part["licenses"] for part in parts.values())
    assert parts["nanobind"]["purl"] == "pkg:pypi/nanobind@3.9.7"
    links = {link["ref"]: link.get("dependsOn", []) for link in found["dependencies"]}
    assert set(links) == set(parts) >= {ref for refs in links.values() for ref in refs}
    tools = found["metadata"]["tools"]["components"]
    assert [(tool["name"], tool["version"]) for tool in tools] == [
        ("GNU", "14.2.1"),
        ("nvrtc", "12.8"),
    ]
    assert sbom(tmp_path, "--cuda=nvrtc 12.8") == found


def test_bill_of_materials_without_kernels(tmp_path: Path) -> None:
    tools = sbom(tmp_path)["metadata"]["tools"]["components"]
    assert [tool["name"] for tool in tools] == ["GNU"]
