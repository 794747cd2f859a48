# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PTH118, PTH123
"""Machine code of CUDA kernels that the build does not have, from the cache or from NVRTC."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from . import cache
from .kernel_source import Wish, kernel_source
from .notice import compiling
from .nvrtc import FLAGS, find_library, nvrtc

__all__ = ["cuda_kernel", "machine_code"]


def cuda_kernel(wish: Wish, text: str = "", struct: str = "") -> bytes:
    """Machine code for a GPU of this machine.

    Parameters
    ----------
    wish : Wish
        The kernel; ``target`` names the GPU's own architecture.
    text, struct : str
        As for `kernel_source`.

    Returns
    -------
    bytes
        A cubin.

    Raises
    ------
    UnsupportedError
        There is no NVRTC, or none that knows the GPU.
    FlashbsrError
        The variant does not compile; the message shows the user's lines.
    """
    import flashbsr._core as _core

    return machine_code(wish, text, struct, _core.cuda_driver_version() // 1000)


def machine_code(wish: Wish, text: str, struct: str, cuda_major: int) -> bytes:
    """As `cuda_kernel`, for a driver of another CUDA version; 0: any. No driver is needed."""
    from .._installed import get_include

    include = Path(get_include())
    templates = include.parent / "kernels"
    source = kernel_source(wish, templates, text, struct)
    # The library is not opened for its version where the cache has the kernel: that takes 10 ms.
    library = find_library(cuda_major)
    about = library.stat() if library.is_absolute() else None
    identity = f"{about.st_size} {about.st_mtime_ns}" if about else str(nvrtc(cuda_major).version)
    key = cache.key_of(source, headers_digest(include), *FLAGS, str(library), identity, wish.target)

    def build(path: Path) -> None:
        # Hopper's logits are expressions, which not every text takes for the floats that they are
        # elsewhere (`c ? x : 0.0f`). That costs 0.1 s to find out. Errors are those of floats.
        plain = kernel_source(wish, templates, text, struct, floats=True)
        compiler, target = nvrtc(cuda_major), wish.target
        if not target.endswith("a"):
            target = compiler.target_for(int(re.sub(r"\D", "", target)))
        with compiling(f"{wish.name} for {target}"):
            image = None
            if plain != source:
                image, _ = compiler.try_compile(source, wish.name, target, include)
            path.write_bytes(image or compiler.compile(plain, wish.name, target, include))

    return cache.content_or_build(key, ".cubin", build, label=f"{wish.name} {wish.target}")


@functools.cache
def headers_digest(include: Path) -> str:
    """SHA-256 of all headers under a folder, by name and content: 1 ms, once per process."""
    # Plain strings: with a Path for every file it is 3 ms.
    names = [
        os.path.join(folder, name)
        for folder, _, files in os.walk(include)
        for name in files
        if name.endswith(".h")
    ]
    digest = hashlib.sha256()
    for name in sorted(names):
        with open(name, "rb") as file:
            content = file.read()
        relative = name.removeprefix(f"{include}{os.sep}")
        digest.update(f"{relative}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
