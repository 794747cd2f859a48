# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVRTC, the run-time compiler, from its Python packages: no toolkit, no driver, no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path

import pytest
from toolchain import INCLUDE

PACKAGES = "flashbsr[nvrtc-test]"


class Nvrtc:
    """The library, and the toolkit's two include folders. No third one is ever needed."""

    def __init__(self, library: Path) -> None:
        # NVRTC opens this one by name alone, which finds it where it has been opened by its path.
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        self._lib = ctypes.CDLL(str(library))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        folder = library.parent.parent / "include"
        toolkit = [folder, folder / "cccl"]
        assert (folder / "cuda_fp16.h").exists(), f"nvidia-cuda-runtime has no {folder}"
        assert (toolkit[1] / "cuda").is_dir(), f"nvidia-cuda-cccl has no {toolkit[1]}"
        self._options = ["-std=c++20", *(f"-I{path}" for path in (INCLUDE, *toolkit))]

    def compile(self, source: str, target: str, *options: str) -> tuple[bool, str]:
        """Compile to machine code of ``target``, ``sm_90a`` for example; returns (ok, messages)."""
        image, messages = self._run(source, target, options)
        return image is not None, messages

    def cubin(self, source: str, target: str, *options: str) -> bytes:
        """Compile to machine code; an error fails the test."""
        image, messages = self._run(source, target, options)
        assert image is not None, messages
        return image

    def _run(self, source: str, target: str, options: tuple[str, ...]) -> tuple[bytes | None, str]:
        program = ctypes.c_void_p()
        text = source.encode()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), text, b"test.cu", 0, None, None)
        )
        try:
            arguments = [*self._options, f"--gpu-architecture={target}", *options]
            array = (ctypes.c_char_p * len(arguments))(*(a.encode() for a in arguments))
            status = self._lib.nvrtcCompileProgram(program, len(arguments), array)
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode()
            return None if status else self._get(program, "CUBIN"), log
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, status: int) -> None:
        assert status == 0, self._lib.nvrtcGetErrorString(status).decode()


@functools.cache
def nvrtc() -> Nvrtc:
    """Load it, or skip; in CI its absence is an error."""
    found: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += sorted(Path(folder).glob("cu*/lib/libnvrtc.so.*"))
    if not found:
        message = f"NVRTC is missing: pip install '{PACKAGES}'"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    return Nvrtc(found[-1])
