# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles the fake driver."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("driver.cpp")


def build(folder: Path, compiler: str, include: Path) -> Path | None:
    """Compile ``libcuda.so.1`` into `folder`; None without the toolkit's ``cuda.h``."""
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parent.parent] if nvcc else []
    roots.append(Path("/usr/local/cuda"))
    toolkit = next((r / "include" for r in roots if (r / "include/cuda.h").exists()), None)
    if toolkit is None:
        return None
    library = folder / "libcuda.so.1"
    command = [
        compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", f"-I{include}",
        f"-isystem{toolkit}", str(SOURCE), "-o", str(library), "-lpthread",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return library
