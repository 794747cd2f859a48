# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVRTC for tests: the package's own way to it, with the headers and templates of this tree."""

from __future__ import annotations

import functools
import os

import pytest
from flashbsr.errors import UnsupportedError
from flashbsr.jit import nvrtc as jit_nvrtc
from toolchain import INCLUDE


class Compiler:
    """No include folder of a toolkit is given: none is ever needed."""

    def __init__(self, library: jit_nvrtc.Nvrtc) -> None:
        self.library = library

    def compile(self, source: str, target: str) -> tuple[bool, str]:
        """Compile to machine code of ``target``, ``sm_90a`` for example; returns (ok, messages)."""
        image, messages = self.library.try_compile(source, "test", target, INCLUDE)
        return image is not None, messages

    def cubin(self, source: str, target: str) -> bytes:
        """Compile to machine code; an error fails the test."""
        return self.library.compile(source, "test", target, INCLUDE)


@functools.cache
def nvrtc() -> Compiler:
    """Load it, or skip; in CI its absence is an error."""
    try:
        return Compiler(jit_nvrtc.nvrtc())
    except UnsupportedError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
