# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The step of the build that compiles a CUDA kernel: when, and by what. No nvcc is needed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from test_consumer import tool
from toolchain import INCLUDE, ROOT, Outcome, run

sys.path.insert(0, str(ROOT / "cmake"))
import compile_kernel
import nvrtc_packages

# It notes each call and "compiles" the text of the source.
NVCC = """#!/bin/sh
echo "$*" >> {folder}/calls
for last; do :; done
grep -q broken {folder}/k.cu && {{ echo "error: broken"; exit 2; }}
cp {folder}/k.cu "$last"
echo "ptxas info    : Compiling entry function 'k' for 'sm_80'"
echo "    0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads"
echo "ptxas info    : Used 96 registers, used 1 barriers"
"""


class Kernel:
    """A kernel that includes one header, which includes another; and a compiler for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers = folder / "include/flashbsr"
        self.headers.mkdir(parents=True)
        (self.headers / "a.h").write_text("#include <flashbsr/b.h>\n")
        (self.headers / "b.h").write_text("int b;\n")
        self.source = folder / "k.cu"
        self.source.write_text("#include <flashbsr/a.h>\n")
        self.output = folder / "k.fatbin"
        self.compiler = self.nvcc("nvcc")

    def nvcc(self, name: str, spills: int = 0) -> Path:
        path = self.folder / name
        path.write_text(NVCC.format(folder=self.folder, spills=spills))
        path.chmod(0o755)
        return path

    def build(self, *more: str | Path, version: str = "13.0.88", sass: str = "80") -> int:
        return compile_kernel.main(
            [str(x) for x in (
                self.source, self.output, "--include", self.folder / "include",
                "--compiler", f"nvcc {version}", "--nvcc", self.compiler, "--ccbin", "c++",
                "--sass", *sass.split(), "--ptx", "80", "--compress=--compress-mode=size", *more)]
        )  # fmt: skip

    def calls(self) -> list[str]:
        noted = self.folder / "calls"
        return noted.read_text().splitlines() if noted.exists() else []


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_what_is_written(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.build(sass="80 90") == 0
    (call,) = kernel.calls()
    # One PTX, from which the machine code of the higher one is assembled, too.
    assert "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=sm_90" in call
    assert "-gencode arch=compute_80,code=compute_80" in call
    assert "--compress-mode=size" in call
    assert call.index("/cmake/nvcc ") < call.index(f"-I{kernel.folder}/include ")
    assert capsys.readouterr().out == "k  sm_80 96 registers\n"
    assert "Used 96 registers" in kernel.output.with_suffix(".log").read_text()


def test_a_spill_is_said(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    kernel.nvcc("nvcc", spills=24)
    assert kernel.build() == 0
    assert capsys.readouterr().out == "k  sm_80 SPILLS 24 bytes 96 registers\n"


def test_what_has_not_changed_is_not_compiled(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernel.build() == 0
    made = kernel.output.stat().st_mtime_ns
    for path in (kernel.source, kernel.headers / "b.h"):
        os.utime(path)  # newer, with the same text
    kernel.compiler = kernel.nvcc("moved")  # another isolated environment
    assert kernel.build() == 0
    assert len(kernel.calls()) == 1
    assert "k  unchanged" in capsys.readouterr().out
    assert kernel.output.stat().st_mtime_ns >= made, "ninja must see it as made"


@pytest.mark.parametrize(
    "change",
    [
        lambda k: (k.headers / "b.h").write_text("int c;\n") and k.build(),
        lambda k: k.source.write_text("#include <flashbsr/b.h>\n") and k.build(),
        lambda k: k.build(version="13.1.0"),
        lambda k: k.build(sass="80 90"),
        lambda k: k.output.unlink() or k.build(),
        lambda k: k.output.with_suffix(".log").unlink() or k.build(),
    ],
    ids=["header", "source", "version", "targets", "no fatbin", "no log"],
)
def test_what_has_changed_is(kernel: Kernel, change: object) -> None:
    assert kernel.build() == 0
    assert change(kernel) == 0  # type: ignore[operator]
    assert len(kernel.calls()) == 2


def test_an_error_is_shown_and_leaves_nothing(
    kernel: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.build()
    kernel.source.write_text("broken\n")
    assert kernel.build() == 1
    said = capsys.readouterr().err
    assert "error: broken" in said
    assert "k: nvcc failed (2)" in said
    assert kernel.build() == 1, "it is tried again"


def test_builds_share_a_cache(kernel: Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    cache = kernel.folder / "cache"
    assert kernel.build("--cache", cache) == 0
    content = kernel.output.read_text()
    kernel.output = kernel.folder / "other.fatbin"
    assert kernel.build("--cache", cache) == 0
    assert len(kernel.calls()) == 1
    assert "k  of the cache" in capsys.readouterr().out
    assert kernel.output.read_text() == content
    assert "Used 96" in kernel.output.with_suffix(".log").read_text()
    assert [len(path.name) for path in cache.iterdir()] == [64], "nothing half-made is left"


def test_headers_are_all_of_flashbsr() -> None:
    """What a kernel is made of is found by reading: an include of another form would be missed."""
    for path in [*INCLUDE.rglob("*.h"), *(ROOT / "cpp/kernels").glob("*.in")]:
        for line in re.findall(r"^\s*#\s*include.*", path.read_text(), re.MULTILINE):
            assert re.search(r"<[\w/]+(\.h)?>", line), f"{path}: {line}"
    found = compile_kernel.dependencies("#include <flashbsr/kernel/decode/kernel.h>\n", INCLUDE)
    assert {"config.h", "plan.h", "kernel.h"} < {path.name for path in found}


def test_flags_are_those_of_run_time() -> None:
    text = (ROOT / "python/flashbsr/jit/nvrtc.py").read_text()
    (flags,) = re.findall(r"^FLAGS = \((.*)\)$", text, re.MULTILINE)
    assert [f.strip(' "') for f in flags.split(",")] == list(compile_kernel.FLAGS["nvrtc"][:-1])


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for packages, the only one that is looked at."""

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(nvrtc_packages.importlib.util, "find_spec", lambda _: Spec)
    return tmp_path


def put(folder: Path, *names: str, version: int = 0) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#define CUDA_VERSION {version}\n")


def test_the_lowest_whole_version_is_taken(packages: Path) -> None:
    put(packages, "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvfatbin.so.13")
    put(packages, "cu13/include/cuda.h", version=13000)
    assert nvrtc_packages.find().nvrtc.name == "libnvrtc.so.13"
    put(packages, "cuda_nvrtc/lib/libnvrtc.so.12", "nvfatbin/lib/libnvfatbin.so.12")
    assert nvrtc_packages.find().nvrtc.name == "libnvrtc.so.13", "there is no cuda.h of 12"
    put(packages, "cuda_runtime/include/cuda.h", version=12080)
    found = nvrtc_packages.find()
    assert found.nvrtc == packages / "cuda_nvrtc/lib/libnvrtc.so.12"
    assert found.include == packages / "cuda_runtime/include"


def test_what_is_missing_is_named(packages: Path) -> None:
    put(packages, "cuda_nvrtc/lib/libnvrtc.so.12")
    with pytest.raises(nvrtc_packages.BuildError) as raised:
        nvrtc_packages.find()
    for name in ("libnvrtc.so.12", *nvrtc_packages.PACKAGES.split(), "=nvrtc in the environment"):
        assert name in str(raised.value)


def test_nvrtc_makes_what_nvcc_would(tmp_path: Path) -> None:
    try:
        toolkit = nvrtc_packages.find()
    except nvrtc_packages.BuildError as error:
        pytest.skip(str(error))
    version, include, known = nvrtc_packages.describe(toolkit).split(";")
    assert Path(include, "cuda.h").exists()
    assert {"75", "80", "90"} <= set(known.split())
    source, output = tmp_path / "k.cu", tmp_path / "k.fatbin"
    source.write_text(
        "#include <flashbsr/core/math.h>\n"
        'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2; }\n'
    )
    argv = ["--include", INCLUDE, "--compiler", f"nvrtc {version}", "--sass", "75", "80"]
    assert compile_kernel.main([str(x) for x in (source, output, *argv, "--ptx", "80")]) == 0
    assert output.read_bytes()[:4] == bytes.fromhex("50ed55ba"), "the mark of a fatbin"
    log = output.with_suffix(".log").read_text()
    assert re.findall(r"entry function 'k' for '(\w+)'", log) == ["sm_75", "sm_80"]
    assert len(re.findall(r"Used \d+ registers", log)) == 2


# archs.cmake alone, with a compiler of two architectures and, maybe, an nvidia-smi.
SCRIPT = """
include({root}/cmake/archs.cmake)
set(FLASHBSR_CUDA_COMPILER nvcc)
set(FLASHBSR_CUDA_COMPILER_VERSION 13.0)
set(FLASHBSR_KNOWN_ARCHS "75 80 90 100")
set(FLASHBSR_CUDA_ARCHS "{archs}")
flashbsr_choose_targets()
message(NOTICE "targets ${{FLASHBSR_TARGETS}}, highest ${{FLASHBSR_HIGHEST_ARCH}}")
"""


def choose(folder: Path, archs: str, capabilities: str = "") -> Outcome:
    script, smi = folder / "archs.cmake", folder / "nvidia-smi"
    script.write_text(SCRIPT.format(root=ROOT, archs=archs))
    smi.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    smi.chmod(0o755)
    return run(["env", f"PATH={folder}:/usr/bin:/bin", tool("cmake"), "-P", script])


@pytest.mark.parametrize(
    ("archs", "capabilities", "said"),
    [
        ("", "", "targets 75;80;90, highest 90"),
        ("90;80", "", "targets 80;90, highest 90"),
        ("native", "9.0\\n9.0\\n", "targets 90, highest 90"),
        ("native", "10.0\\n8.0\\n", "targets 80;100, highest 100"),
        ("native", "", "'native', and nvidia-smi names no GPU of this machine"),
        ("native", "No devices were found\\n", "names no GPU"),
        ("native", "12.0\\n", "got '120'; expected native, or numbers"),
        (
            "8.0",
            "",
            "got '8.0'; expected native, or numbers separated by semicolons that nvcc 13.0",
        ),
        ("0", "", "got '0'"),
    ],
)
def test_architectures(tmp_path: Path, archs: str, capabilities: str, said: str) -> None:
    outcome = choose(tmp_path, archs, capabilities)
    assert said in " ".join(outcome.output.split())
    assert (outcome.status == 0) == said.startswith("targets")


@pytest.mark.parametrize(
    ("images", "minutes"), [(10, "less than a minute on"), (100000, r"about \d+ minutes on")]
)
def test_the_effort_is_said(tmp_path: Path, images: int, minutes: str) -> None:
    script = tmp_path / "effort.cmake"
    script.write_text(
        f"include({ROOT}/cmake/archs.cmake)\n"
        f"flashbsr_describe_effort({images} text)\nmessage(NOTICE ${{text}})\n"
    )
    outcome = run([tool("cmake"), "-P", script])
    assert re.match(minutes + r" (\d+ cores|one core)$", outcome.output.strip()), outcome.output


def test_less_of_cuda_s_headers_is_the_same_kernel(tmp_path: Path) -> None:
    """nvcc finds our cuda_runtime.h first. What it makes of a kernel is what its own gives."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    source = tmp_path / "rope.cu"
    text = (ROOT / "cpp/kernels/rope.cu.in").read_text()
    source.write_text(re.sub(r"@\w+@", "rope", text))
    made = []
    for folder in (INCLUDE, ROOT / "cmake/nvcc"):
        output = tmp_path / "rope.ptx"
        command = [nvcc, "-ptx", "-arch=compute_80", *compile_kernel.FLAGS["nvcc"]]
        done = run([*command, f"-I{folder}", f"-I{INCLUDE}", source, "-o", output])
        assert done.status == 0, done.output
        assert "warning" not in done.output
        made.append(output.read_bytes())
    assert made[0] == made[1]
