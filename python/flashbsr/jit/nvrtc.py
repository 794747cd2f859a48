# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""NVRTC, NVIDIA's run-time compiler, opened where it is found: source in, machine code out.

Only the library is needed, from its Python package or a toolkit. Device headers of flashbsr include
nothing of the toolkit's, and no GPU or driver takes part.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FlashbsrError, UnsupportedError
from .messages import own_errors

if TYPE_CHECKING:
    import ctypes  # 10 ms: only where something is compiled

__all__ = ["FLAGS", "Nvrtc", "find_library", "nvrtc"]

_EXTRA = "pip install 'flashbsr[jit]'"
# Without them every constexpr function and lambda would need an annotation for the device.
FLAGS = ("-std=c++20", "-default-device")
_COMPILATION_ERROR = 6  # nvrtcResult: what a program's source can cause
_LINES = 30  # of messages: the first error, and where templates led to it
_MAJORS = (13, 12)  # that the loader is asked for by name


class Nvrtc:
    """One NVRTC library.

    Parameters
    ----------
    path : Path
        ``libnvrtc.so.<major>``; its ``libnvrtc-builtins`` lies beside it.

    Attributes
    ----------
    version : tuple of int
        ``(13, 0)``.
    targets : tuple of int
        Architectures that it makes machine code for, ``90`` for sm_90.

    Raises
    ------
    OSError
        The library cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        import ctypes

        # NVRTC opens this one by its name alone, which succeeds where it has been opened before.
        for builtins in path.parent.glob("libnvrtc-builtins.so.*") if path.is_absolute() else ():
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = (ctypes.c_int() for _ in range(3))
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        archs = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(archs))
        self.version = major.value, minor.value
        self.targets = tuple(archs)

    def target_for(self, capability: int) -> str:
        """Name the architecture to compile for, given a device's compute capability.

        Parameters
        ----------
        capability : int
            ``89`` for 8.9.

        Returns
        -------
        str
            ``"sm_89"``, or the highest below it that this NVRTC knows: machine code runs on later
            minor versions of its own major version.

        Raises
        ------
        UnsupportedError
        """
        major = capability // 10
        known = [x for x in self.targets if x // 10 == major and x <= capability]
        if not known:
            raise UnsupportedError(
                "NVRTC",
                "{}.{}".format(*self.version),
                f"a version that compiles for sm_{capability}: {_EXTRA} --upgrade",
            )
        return f"sm_{max(known)}"

    def compile(
        self, source: str, name: str, target: str, include: Path, options: Sequence[str] = ()
    ) -> bytes:
        """Compile to machine code.

        Parameters
        ----------
        source : str
            CUDA C++.
        name : str
            What messages call it.
        target : str
            ``"sm_90a"``.
        include : Path
            The one folder of headers.
        options : sequence of str
            More of NVRTC's.

        Returns
        -------
        bytes
            A cubin.

        Raises
        ------
        FlashbsrError
            The source does not compile; the message is the compiler's, where errors are in a user's
            text only what it says of that.
        """
        image, messages = self.try_compile(source, name, target, include, options)
        if image is None:
            own = own_errors(messages, source)
            if own:
                raise FlashbsrError(
                    "variant",
                    f"C++ that NVRTC does not compile for {target}",
                    "\n".join(["text without these errors:", *own]),
                )
            lines = messages.splitlines()
            if len(lines) > _LINES:
                lines[_LINES:] = [f"... and {len(lines) - _LINES} lines more"]
            raise FlashbsrError(
                name,
                "source that does not compile",
                "\n".join([f"CUDA C++ for {target}", *lines]),
            )
        return image

    def try_compile(
        self, source: str, name: str, target: str, include: Path, options: Sequence[str] = ()
    ) -> tuple[bytes | None, str]:
        """As `compile`; returns the cubin, or None, and the compiler's messages."""
        import ctypes

        program = ctypes.c_void_p()
        library = self._library
        self._check(
            library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
            )
        )
        try:
            arguments = [*FLAGS, f"-I{include}", f"--gpu-architecture={target}", *options]
            array = (ctypes.c_char_p * len(arguments))(*(os.fsencode(a) for a in arguments))
            status = library.nvrtcCompileProgram(program, len(arguments), array)
            if status != _COMPILATION_ERROR:
                self._check(status)
            log = self._get(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            return None if status else self._get(program, "CUBIN"), log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, program: ctypes.c_void_p, what: str) -> bytes:
        import ctypes

        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        content = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, content))
        return content.raw

    def _check(self, status: int) -> None:
        if status:
            text = self._library.nvrtcGetErrorString(status).decode()
            raise UnsupportedError("NVRTC", text, f"a library that works: {_EXTRA}")


@functools.cache
def find_library(cuda_major: int = 0) -> Path:
    """Name the newest NVRTC of this machine, Python packages before toolkits.

    Parameters
    ----------
    cuda_major : int
        The CUDA version that the driver supports: machine code of a later major version does not
        load there. 0: any.

    Returns
    -------
    Path
        A name without a folder is left to the loader, where nothing else was found.

    Raises
    ------
    UnsupportedError
        What there is, is for later drivers.
    """
    found = sorted(dict.fromkeys(_candidates()), key=_major, reverse=True)  # stable
    here = [path for path in found if path.is_absolute()] + [
        path for path in found if not path.is_absolute()
    ]
    for path in here:
        if not cuda_major or _major(path) <= cuda_major:
            return path
    raise _missing(f"{here[0]} with a driver of CUDA {cuda_major}", cuda_major)


def _missing(problem: str, cuda_major: int) -> UnsupportedError:
    wanted = _EXTRA
    if cuda_major and cuda_major < _MAJORS[0]:
        wanted = f"pip install nvidia-cuda-nvrtc-cu{cuda_major}"
    return UnsupportedError("NVRTC", problem, f"the CUDA run-time compiler: {wanted}")


def _major(path: Path) -> int:
    number = re.match(r"libnvrtc\.so\.(\d+)", path.name)
    return int(number[1]) if number else 0


def _candidates() -> Iterator[Path]:
    # Of CUDA 13 in nvidia/cu13/lib, of CUDA 12 in nvidia/cuda_nvrtc/lib.
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or []) if package else []
    for folder in folders:
        yield from sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    for root in (*roots, "/usr/local/cuda"):
        for lib in ("lib64", "lib") if root else ():
            yield from sorted(Path(str(root), lib).glob("libnvrtc.so.*"))
    yield from (Path(f"libnvrtc.so.{major}") for major in _MAJORS)


@functools.cache
def nvrtc(cuda_major: int = 0) -> Nvrtc:
    """Open the NVRTC that `find_library` names.

    Raises
    ------
    UnsupportedError
        There is none; the message names the extra that brings it.
    """
    try:
        return Nvrtc(find_library(cuda_major))
    except OSError as error:
        raise _missing(str(error), cuda_major) from None
