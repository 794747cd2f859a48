# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What may be published: tools/check_wheel.py on made-up wheels, and how wheels are built."""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

import pytest
from toolchain import ROOT, load_tool

WHEEL = load_tool("check_wheel")
NAME = "flashbsr-0.1.0-cp312-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"


def elf(kernels: int, needed: list[str], versions: list[str]) -> bytes:
    """A shared object of the four sections that are looked at."""
    strings = b"\0" + b"".join(text.encode() + b"\0" for text in [*needed, *versions])
    entries = [(1, strings.index(b"\0" + name.encode() + b"\0") + 1) for name in needed]
    sections = {
        "": b"",
        ".dynstr": strings,
        ".dynamic": b"".join(struct.pack("<qQ", *entry) for entry in [*entries, (0, 0)]),
        ".nv_fatbin": (WHEEL.FATBIN + bytes(60)) * kernels,
        ".shstrtab": b"\0.dynstr\0.dynamic\0.nv_fatbin\0.shstrtab\0",
    }
    names, body, headers = sections[".shstrtab"], b"", b""
    for name, content in sections.items():
        at = names.index(name.encode() + b"\0") if name else 0
        offset = 64 + len(body)
        headers += struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, offset, len(content), 0, 0, 1, 0)
        body += content
    start = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body))
    shape = struct.pack("<HHH", 64, len(sections), len(sections) - 1)
    return start.ljust(58, b"\0") + shape + body + headers


def wheel(
    folder: Path,
    name: str = NAME,
    kernels: int = 193,
    needed: tuple[str, ...] = ("libc.so.6",),
    versions: tuple[str, ...] = ("GLIBC_2.2.5", "GLIBC_2.28"),
    more: tuple[str, ...] = (),
    without: str = "",
) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as file:
        for part in (*WHEEL.PARTS, f"flashbsr-0.1.0{WHEEL.SBOM}", *more):
            if part != without:
                file.writestr(part, "")
        file.writestr("flashbsr/_core.abi3.so", elf(kernels, list(needed), list(versions)))
    return path


def test_a_wheel_that_may_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert WHEEL.main([str(wheel(tmp_path))]) == 0
    assert "193 CUDA kernels, glibc 2.28, flashbsr/_core.abi3.so" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kernels": 0}, "0 CUDA kernels; expected 150 or more"),
        ({"needed": ("libc.so.6", "libcuda.so.1")}, "linked with libcuda.so.1"),
        ({"needed": ("libcudart.so.12",)}, "linked with libcudart.so.12"),
        ({"versions": ("GLIBC_2.34",)}, "needs glibc 2.34; expected 2.28 at most"),
        ({"name": "flashbsr-0.1.0-cp311-cp311-linux_x86_64.whl"}, "not manylinux_2_28's"),
        ({"more": ("flashbsr.libs/libcudart-1234.so.12",)}, "libcudart-1234.so.12 is bundled"),
        ({"more": ("flashbsr/_core.cpython-311-x86_64-linux-gnu.so",)}, "2 compiled modules"),
        ({"without": "flashbsr/kernels/decode.cu.in"}, "decode.cu.in is missing"),
        ({"without": "flashbsr-0.1.0.dist-info/sboms/flashbsr.cdx.json"}, "cdx.json is missing"),
    ],
)
def test_a_wheel_that_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: dict[str, object], said: str
) -> None:
    assert WHEEL.main([str(wheel(tmp_path, **wrong))]) == 1  # type: ignore[arg-type]
    assert said in capsys.readouterr().out


def test_what_is_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / NAME).write_text("text")
    assert WHEEL.main([str(tmp_path / NAME)]) == 1
    assert "cannot be read" in capsys.readouterr().out


def table(name: str) -> str:
    text = (ROOT / "pyproject.toml").read_text()
    (found,) = re.findall(
        rf"^\[{re.escape(name)}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL
    )
    return str(found)


def test_releases_are_built_with_kernels() -> None:
    """Once they were not: FLASHBSR_CUDA=OFF stood in the settings, and won."""
    linux = table("tool.cibuildwheel.linux")
    assert 'FLASHBSR_CUDA_TOOLKIT = "nvrtc"' in linux
    assert "tools/check_wheel.py" in linux
    settings = table("tool.cibuildwheel") + linux
    assert "FLASHBSR_CUDA=" not in settings
    assert "FLASHBSR_CUDA =" not in settings
    assert "config-settings" not in settings
    assert "check_installed.py --kernels" in settings
    assert "SOURCE_DATE_EPOCH" in linux  # auditwheel's files would have the time of the build


def test_a_kept_build_folder_keeps_no_option() -> None:
    """Each option of cmake/cuda.cmake is set by every build, else an earlier one's would go on."""
    options = set()
    for path in (ROOT / "CMakeLists.txt", ROOT / "cmake/cuda.cmake"):
        options |= set(re.findall(r"set\((FLASHBSR_\w+) \S+ CACHE STRING", path.read_text()))
    named = set(
        re.findall(r"^(FLASHBSR_\w+) =", table("tool.scikit-build.cmake.define"), re.MULTILINE)
    )
    assert named == options - {"FLASHBSR_SANITIZE"}
