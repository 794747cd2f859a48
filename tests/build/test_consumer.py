# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""tests/consumer, a CMake project of its own, builds and runs against the installed package."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import flashbsr
import pytest
from toolchain import INCLUDE, ROOT, Outcome, run

CONSUMER = ROOT / "tests/consumer"


def tool(name: str) -> str:
    """`cmake` and `ninja` of this environment, whether or not it is activated."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert path is not None, f"{name} is missing: pip install '.[test]' brings it"
    return path


def build_and_run(build: Path, *options: str) -> str:
    """Configures, compiles and starts the consumer; returns what it printed."""
    configure = [tool("cmake"), "-S", CONSUMER, "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release", *options]
    for command in (configure, [tool("cmake"), "--build", build], [build / "consumer"]):
        outcome = run(command)
        assert outcome.status == 0, outcome.output
    return outcome.output


def test_installed_headers_are_these_headers() -> None:
    """What is tested is what was installed: a stale install fails here."""
    installed = Path(flashbsr.get_include())
    ours = {p.relative_to(INCLUDE).as_posix(): p.read_bytes() for p in INCLUDE.rglob("*.h")}
    theirs = {p.relative_to(installed).as_posix(): p.read_bytes() for p in installed.rglob("*.h")}
    stale = sorted(name for name in ours | theirs if ours.get(name) != theirs.get(name))
    assert not stale, f"reinstall flashbsr: installed headers differ from the tree: {stale}"


def test_cmake_package_has_the_version_of_the_module() -> None:
    text = (Path(flashbsr.get_cmake_dir()) / "flashbsrConfigVersion.cmake").read_text()
    assert f'set(PACKAGE_VERSION "{flashbsr.__version__}")' in text


def test_against_the_installed_package(tmp_path: Path) -> None:
    output = build_and_run(tmp_path / "build", f"-Dflashbsr_DIR={flashbsr.get_cmake_dir()}")
    assert "causal attention" in output
    assert "WRONG" not in output


def test_as_a_subdirectory_without_python(tmp_path: Path) -> None:
    """add_subdirectory and FetchContent need neither an install nor Python."""
    options = [f"-DFLASHBSR_SOURCE={ROOT}", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"]
    assert "WRONG" not in build_and_run(tmp_path / "build", *options)


def configure(folder: Path, *options: str) -> Outcome:
    """Configure the compiled core, which is where CUDA comes in."""
    command = [tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", "-DFLASHBSR_TESTS=ON"]
    return run([*command, f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *options])


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["-DFLASHBSR_CUDA=maybe"], ["got 'maybe'", "expected AUTO, ON or OFF"]),
        (
            ["-DFLASHBSR_CUDA=ON", "-DFLASHBSR_CUDA_TOOLKIT=/nowhere"],
            ["no bin/nvcc in FLASHBSR_CUDA_TOOLKIT=/nowhere", "FLASHBSR_CUDA=OFF"],
        ),
    ],
    ids=["unknown", "no nvcc"],
)
def test_cuda_option_fails_with_the_way_out(
    tmp_path: Path, options: list[str], messages: list[str]
) -> None:
    outcome = configure(tmp_path, *options)
    assert outcome.status != 0
    text = " ".join(outcome.output.split())
    assert all(message in text for message in messages), text


OLD_NVCC = """#!/bin/sh
echo "Cuda compilation tools, release 11.8, V11.8.89"
"""


def test_old_nvcc_is_refused(tmp_path: Path) -> None:
    nvcc = tmp_path / "toolkit/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(OLD_NVCC)
    nvcc.chmod(0o755)
    toolkit = f"-DFLASHBSR_CUDA_TOOLKIT={nvcc.parent.parent}"
    outcome = configure(tmp_path / "build", "-DFLASHBSR_CUDA=ON", toolkit)
    assert outcome.status != 0
    assert "is 11.8.89; 12.4 or later is needed" in " ".join(outcome.output.split())
