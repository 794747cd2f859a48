# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The host's C++ compiler: variants for the CPU engine become shared objects."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import shutil
from pathlib import Path

from ..errors import FlashbsrError, UnsupportedError
from ..variant.source import cpu_source
from ..variant.variant import Variant
from . import cache
from .cuda import headers_digest
from .messages import own_errors
from .notice import compiling
from .process import compile_text

__all__ = ["compiler", "cpu_library"]

# As cmake/isa.cmake has them, but for -O2. With the cost model for vectors that GCC has at -O3 it
# makes kernels as fast as -O3 (without it, 2 to 5 % slower), in 1.9 s instead of 3.3 (GCC 12, Zen
# 5). No warnings: the text is the user's.
_FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fdiagnostics-color=never"),
]

_GCC_FLAGS = ["-fvect-cost-model=dynamic"]  # clang vectorises at -O2 as at -O3
_MOST_LINES = 12  # of a compiler's messages
_FULL_DISK = re.compile("No space left on device|Disk quota exceeded")
_ERROR = re.compile(r":\d+: error:")  # fatal ones are headers of the compiler's that are missing


def compiler() -> list[str]:
    """Command of the C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ on the path.

    Raises
    ------
    UnsupportedError
        There is none.
    """
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise UnsupportedError("CXX", repr(os.environ["CXX"]), f"a command ({error})") from None
    for command in [given] if given else [["c++"], ["g++"], ["clang++"]]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    raise UnsupportedError(
        "CXX",
        f"{shlex.join(given)!r}, which is not there" if given else "no c++, g++ or clang++",
        "a C++20 compiler to compile the variant for the CPU (apt install g++; dnf install "
        "gcc-c++; conda install cxx-compiler), or its path in CXX",
    )


def cpu_library(variant: Variant, isa: str) -> Path:
    """Shared object of a variant for a SIMD level, from the cache or from the compiler.

    Raises
    ------
    UnsupportedError
        There is no compiler.
    FlashbsrError
        The text does not compile, and the message shows its own lines; the compiler is none, or
        was killed; what `cache.get_or_build` raises.
    """
    import flashbsr._core as _core

    from .._installed import get_include

    command = compiler()
    include = Path(get_include())
    source = cpu_source(variant, isa)
    # The binary's size and time stand for its version: asking it takes longer than the rest.
    binary = Path(command[0]).resolve()
    about = binary.stat()
    flags = [*_FLAGS, *_core.isa_flags(isa).split()]
    if "clang" not in binary.name:
        flags += _GCC_FLAGS
    key = cache.key_of(
        source,
        headers_digest(include),
        shlex.join([str(binary), *command[1:], *flags]),
        f"{about.st_size} {about.st_mtime_ns}",
        platform.machine(),
    )

    def build(path: Path) -> None:
        with compiling(f"{variant.name} for {isa}"):
            _compile([*command, *flags, f"-I{include}"], source, path)

    label = f"{variant.name} {isa}, {binary.name}"
    return cache.get_or_build(key, ".so", build, label=label)


def _compile(command: list[str], source: str, path: Path) -> None:
    status, messages = compile_text(
        [*command, "-x", "c++", "-", "-o", str(path)], source, path.parent
    )
    if status == 0 and path.exists():
        return
    own = own_errors(messages, source)
    full = _FULL_DISK.search(messages)
    if full and not own:
        raise OSError(errno.ENOSPC, f"{Path(command[0]).name}: {full[0]}", str(path))
    raise _failure(shlex.join(command), status, messages, own)


def _failure(command: str, status: int, messages: str, own: list[str]) -> FlashbsrError:
    """Blame the text for errors that have a line, the compiler for others."""
    lines = messages.splitlines()
    # Below a template, the first lines say through which headers one came there.
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), None)
    if own or first is not None:
        shown = "\n".join(own or lines[first:][:_MOST_LINES])
        return FlashbsrError(
            "variant",
            f"C++ that {Path(command.split()[0]).name} does not compile",
            f"text without these errors:\n{shown}",
        )
    shown = "\n".join([f"command: {command}", *lines[:_MOST_LINES]])
    # A compiler of which only a part was killed says so.
    if status < 0 or "signal terminated program" in messages:
        how = f"was killed by signal {-status}" if status < 0 else "was killed"
        expected = "0.3 GB of memory for each compiler that runs"
    else:
        how = f"ended with status {status}"
        expected = "a C++20 compiler that makes a shared object (GCC 12 or Clang 14, or later)"
    return FlashbsrError("CXX", f"a compiler that {how}", f"{expected}\n{shown}")
