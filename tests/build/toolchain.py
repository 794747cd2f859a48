# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The compiler and the tree, for tests that compile something."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"


def compiler() -> str:
    """Path of the C++ compiler that a build of the package takes: $CXX, else c++ or g++."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("no C++ compiler found: set CXX, or install g++ 10 or later")


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit status, its messages, CPU seconds of user and system together."""

    status: int
    output: str
    cpu_seconds: float


def run(command: list[str | Path], *, stdin: str | None = None, cwd: Path | None = None) -> Outcome:
    """Run `command` to its end and account its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Outcome(done.returncode, done.stdout, seconds)


def run_tool(name: str, *arguments: str | Path) -> Outcome:
    """Run a script of tools/ with this interpreter."""
    return run([sys.executable, ROOT / "tools" / name, *arguments])


def load_tool(name: str) -> ModuleType:
    """Import a script of tools/ for what it knows of the tree."""
    if str(ROOT / "tools") not in sys.path:  # for what it imports from beside it
        sys.path.append(str(ROOT / "tools"))
    spec = spec_from_file_location(name, ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module
