# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""examples/cpp, a CMake project of its own, builds and runs against the installed package."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import flashbsr
import pytest
from nvrtc import nvrtc
from toolchain import INCLUDE, ROOT, Outcome, compiler, run

EXAMPLE = ROOT / "examples/cpp"


def tool(name: str) -> str:
    """`cmake` and `ninja` of this environment, whether or not it is activated."""
    path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert path is not None, f"{name} is missing: pip install '.[test]' brings it"
    return path


def build_and_run(build: Path, *options: str) -> str:
    """Configures, compiles and tests the example; returns what its programs printed."""
    configure = [tool("cmake"), "-S", EXAMPLE, "-B", build, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *options]
    test = [tool("ctest"), "--test-dir", build, "--verbose", "--no-tests=error"]
    for command in (configure, [tool("cmake"), "--build", build], test):
        outcome = run(command)
        assert outcome.status == 0, outcome.output
    assert "causal attention: largest error" in outcome.output
    assert "FlashSigmoid: largest error" in outcome.output
    assert "WRONG" not in outcome.output
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
    """Where there is nvcc, with the GPU's program: it runs, or says that there is no GPU."""
    output = build_and_run(tmp_path / "build", f"-Dflashbsr_DIR={flashbsr.get_cmake_dir()}")
    if (tmp_path / "build/gpu").exists():
        assert ("no GPU" in output) != ("prefill: largest" in output and "decode: " in output)


def test_as_a_subdirectory_without_python(tmp_path: Path) -> None:
    """add_subdirectory and FetchContent need neither an install nor Python, nor nvcc."""
    options = [f"-DFLASHBSR_SOURCE={ROOT}", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"]
    build_and_run(tmp_path / "build", *options, "-DCMAKE_CUDA_COMPILER=NOTFOUND")
    assert not (tmp_path / "build/gpu").exists()


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_kernels_of_the_example_compile(target: str) -> None:
    """Most machines of CI have no nvcc: NVRTC takes the same text of variant and kernels."""
    image, messages = nvrtc().library.try_compile(
        '#include "kernels.h"\n', "example", target, INCLUDE, [f"-I{EXAMPLE}"]
    )
    assert image is not None, messages
    for kernel in (b"sigmoid_prefill", b"sigmoid_decode"):
        assert kernel in image


def test_a_wrong_signature_is_named(tmp_path: Path) -> None:
    """The concept says what a variant's struct got wrong, not the depths of a kernel."""
    text = (EXAMPLE / "flash_sigmoid.h").read_text()
    wrong = text.replace("typename M::Float activation(", "double activation(")
    assert wrong != text
    (tmp_path / "flash_sigmoid.h").write_text(wrong)
    source = (EXAMPLE / "cpu.cpp").read_text()
    flags = ["-std=c++20", f"-I{tmp_path}", f"-I{INCLUDE}", f"-I{EXAMPLE}", "-fsyntax-only"]
    outcome = run([compiler(), *flags, "-x", "c++", "-"], stdin=source)
    assert outcome.status != 0
    assert "AttentionVariant" in outcome.output


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


NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  --list-gpu-arch) printf 'compute_%s\\n' 75 80 90 ;;
  --dryrun) echo '#$ INCLUDES="-I'"$(dirname "$0")"'/../include"' >&2 ;;
esac
"""


def test_a_kernel_that_was_compiled_again_is_embedded_again(tmp_path: Path) -> None:
    """Of sources that are compiled together CMake forgets what they depend on."""
    nvcc, header = tmp_path / "toolkit/bin/nvcc", tmp_path / "toolkit/include/cuda.h"
    for path, text in ((nvcc, NVCC), (header, "")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    nvcc.chmod(0o755)
    options = ["-DFLASHBSR_TESTS=OFF", "-DFLASHBSR_C=ON", "-DFLASHBSR_CUDA=ON"]
    toolkit = f"-DFLASHBSR_CUDA_TOOLKIT={tmp_path / 'toolkit'}"
    outcome = configure(tmp_path / "build", *options, toolkit)
    assert outcome.status == 0, outcome.output
    lines = (tmp_path / "build/build.ninja").read_text().splitlines()
    sources = [line.split(" | ")[0] for line in lines if "kernels/merge_state.fatbin" in line]
    assert any(line.endswith("kernels/embed.cpp") and ".o: CXX_" in line for line in sources)
