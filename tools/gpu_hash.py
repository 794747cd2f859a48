# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The hash of what decides a GPU's results, so that a record can be told to be stale.

It covers kernels, host code and the Python in between: `PATTERNS` less `EXCLUDED`, which is what
only the CPU, the benchmark, the drawings and the command line use. Comments, docstrings and blank
lines do not count, so a better sentence does not cost a run on a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "include/flashbsr/**/*.h",
    "cpp/**/*",
    "cmake/compile_kernel.py",
    "cmake/nvcc/*.h",
    "cmake/nvrtc_packages.py",
    "python/flashbsr/**/*.py",
)
EXCLUDED = (
    "include/flashbsr/cpu/",
    "cpp/cpu/",
    "cpp/api/cpu_backend.",
    "python/flashbsr/bench/",
    "python/flashbsr/viz/",
    "python/flashbsr/cli.py",
    "python/flashbsr/__main__.py",
    "python/flashbsr/info.py",
    "python/flashbsr/engine/explain.py",
    # tools/engines.py has a record of its own.
    "python/flashbsr/integrations/vllm/",
    "python/flashbsr/integrations/sglang/",
    "python/flashbsr/distributed/",
    "cpp/c/",  # its tests build it on their own, for the CPU
    "include/flashbsr/c_api.h",
)
# A string, or a comment; strings are matched first, so that a comment inside one is none.
_CXX = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def strip_cxx(text: str) -> str:
    """Drop the comments of C++."""
    return _CXX.sub(lambda match: match[0] if match[0][0] == '"' else " ", text)


def strip_python(text: str) -> str:
    """Drop docstrings, and comments that have a line of their own."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            for at in range(value.lineno - 1, value.end_lineno or value.lineno):
                lines[at] = ""
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def strip_lines(text: str) -> str:
    """Drop what follows a '#', in tables and CMake."""
    return re.sub(r"#[^\n]*", "", text)


def significant(path: Path) -> str:
    """Reduce a file to what decides: no comments, blank lines, spaces at the ends of lines."""
    text = path.read_text()
    if path.suffix == ".py":
        text = strip_python(text)
    elif path.suffix in (".txt", ".cmake"):
        text = strip_lines(text)
    else:
        text = strip_cxx(text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def hashed_files(root: Path = ROOT) -> list[Path]:
    """List every file that counts."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file()}
    names = {path: path.relative_to(root).as_posix() for path in found}
    return sorted(
        path
        for path in found
        if not names[path].startswith(EXCLUDED) and "__pycache__" not in names[path]
    )


def source_hash(root: Path = ROOT) -> str:
    """Give 16 hex digits of SHA-256 over names and significant contents."""
    digest = hashlib.sha256()
    for path in hashed_files(root):
        digest.update(f"{path.relative_to(root).as_posix()}\0{significant(path)}\0".encode())
    return digest.hexdigest()[:16]
