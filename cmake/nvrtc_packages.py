# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVRTC and nvFatbin, as Python packages bring them, in the place of nvcc.

``python nvrtc_packages.py`` prints NVRTC's version, the folder of cuda.h and known architectures,
separated by semicolons, or says what is missing. Of the packages of several CUDA versions those of
the lowest are taken: machine code loads on drivers of its own major version and of later ones.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# LZ4: every driver of CUDA 12 reads it; modes "size" and "balance" need 550 or later.
CONTAINER = ("-64", "-compress-all", "-compress-mode=speed")
PACKAGES = "nvidia-cuda-nvrtc-cu12 nvidia-nvfatbin-cu12 nvidia-cuda-runtime-cu12"


class BuildError(RuntimeError):
    """What stops a build, in one message."""


@dataclass(frozen=True)
class Toolkit:
    """What the packages of one CUDA version have."""

    nvrtc: Path
    nvfatbin: Path
    include: Path  # of cuda.h


@dataclass(frozen=True)
class Images:
    """What is wanted: machine code for ``sass``, PTX of one of these; ``"0"``: none."""

    source: Path
    include: Path
    sass: tuple[str, ...]
    ptx: str
    flags: tuple[str, ...]


def major(path: Path) -> int:
    return int(path.name.rpartition(".")[2])


def find() -> Toolkit:
    """Take the lowest CUDA version that is whole."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(x) for x in (spec.submodule_search_locations or [])] if spec else []

    def all_of(pattern: str) -> Iterator[Path]:
        for folder in folders:
            yield from sorted(folder.glob(pattern))

    # Of CUDA 13 in nvidia/cu13, of CUDA 12 in nvidia/<package>.
    headers = {}
    for header in all_of("*/include/cuda.h"):
        version = re.search(r"^#define CUDA_VERSION (\d+)$", header.read_text(), re.MULTILINE)
        if version:
            headers[int(version[1]) // 1000] = header.parent
    containers = {major(path): path for path in all_of("*/lib/libnvfatbin.so.*")}
    compilers = {major(path): path for path in all_of("*/lib/libnvrtc.so.*")}
    for number, path in sorted(compilers.items()):
        if number in containers and number in headers:
            return Toolkit(path, containers[number], headers[number])
    have = [str(p) for p in (*compilers.values(), *containers.values(), *headers.values())]
    raise BuildError(
        f"the packages of {sys.executable} have no NVRTC with nvFatbin and cuda.h of one CUDA "
        f"version ({', '.join(have) or 'nothing'} was found). FLASHBSR_CUDA_TOOLKIT=nvrtc in the "
        f"environment lets pip bring them for the build; with --no-build-isolation "
        f"pip install {PACKAGES}"
    )


class Library:
    """A C library of functions that return 0, or what its <prefix>GetErrorString explains."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.prefix = prefix
        self.library = ctypes.CDLL(str(path))
        getattr(self.library, f"{prefix}GetErrorString").restype = ctypes.c_char_p

    def __call__(self, function: str, *arguments: object) -> None:
        status = self.status(function, *arguments)
        if status:
            text = getattr(self.library, f"{self.prefix}GetErrorString")(status).decode()
            raise BuildError(f"{self.prefix}{function}: {text}")

    def status(self, function: str, *arguments: object) -> int:
        return int(getattr(self.library, self.prefix + function)(*arguments))

    def content(self, handle: ctypes.c_void_p, get: str, size: str) -> bytes:
        length = ctypes.c_size_t()
        self(size, handle, ctypes.byref(length))
        content = ctypes.create_string_buffer(length.value)
        self(get, handle, content)
        return content.raw


def strings(values: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(os.fsencode(value) for value in values))


def open_nvrtc(path: Path) -> Library:
    # NVRTC opens this one by its name alone, which succeeds where it has been opened before.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return Library(path, "nvrtc")


def describe(toolkit: Toolkit) -> str:
    nvrtc = open_nvrtc(toolkit.nvrtc)
    first, second, count = (ctypes.c_int() for _ in range(3))
    nvrtc("Version", ctypes.byref(first), ctypes.byref(second))
    nvrtc("GetNumSupportedArchs", ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc("GetSupportedArchs", archs)
    known = " ".join(str(arch) for arch in archs)
    return f"{first.value}.{second.value};{toolkit.include};{known}"


def compile_for(nvrtc: Library, wanted: Images, target: str) -> tuple[bytes, bytes, str]:
    """Machine code, PTX and what the compiler says."""
    program = ctypes.c_void_p()
    text, label = wanted.source.read_bytes(), wanted.source.name.encode()
    nvrtc("CreateProgram", ctypes.byref(program), text, label, 0, None, None)
    try:
        options = (*wanted.flags, f"-I{wanted.include}", f"--gpu-architecture=sm_{target}")
        status = nvrtc.status("CompileProgram", program, len(options), strings(options))
        raw = nvrtc.content(program, "GetProgramLog", "GetProgramLogSize")
        log = raw.rstrip(b"\0").decode(errors="replace").rstrip() + "\n"
        if status:
            name = wanted.source.stem
            raise BuildError(f"{log}{name} for sm_{target}: NVRTC failed ({status})")
        machine_code = nvrtc.content(program, "GetCUBIN", "GetCUBINSize")
        return machine_code, nvrtc.content(program, "GetPTX", "GetPTXSize"), log
    finally:
        nvrtc.library.nvrtcDestroyProgram(ctypes.byref(program))


def compile_by_nvrtc(toolkit: Toolkit, wanted: Images) -> tuple[bytes, str]:
    """Compile for every target; returns a fatbin and ptxas' reports."""
    nvrtc, nvfatbin = open_nvrtc(toolkit.nvrtc), Library(toolkit.nvfatbin, "nvFatbin")
    size, label, logs = ctypes.c_size_t, wanted.source.stem.encode(), ""
    handle = ctypes.c_void_p()
    nvfatbin("Create", ctypes.byref(handle), strings(CONTAINER), size(len(CONTAINER)))
    try:
        for target in wanted.sass:
            code, ptx, log = compile_for(nvrtc, wanted, target)
            logs += log
            nvfatbin("AddCubin", handle, code, size(len(code)), target.encode(), label)
            if target == wanted.ptx:
                nvfatbin("AddPTX", handle, ptx, size(len(ptx)), target.encode(), label, b"")
        return nvfatbin.content(handle, "Get", "Size"), logs
    finally:
        nvfatbin.library.nvFatbinDestroy(ctypes.byref(handle))


def main() -> int:
    try:
        print(describe(find()))
    except (BuildError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
