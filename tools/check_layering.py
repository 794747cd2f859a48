# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Includes and imports point one way. Prints every violation; exit status 1 if there is one.

Of this tree, or of the one whose root is the argument.

array -> view (core) -> plan -> kernel (cpu or GPU, with variant) -> bind: a layer sees only what
lies before it, so a header of ``core`` compiles under g++, nvcc and NVRTC alike, a device header
brings nothing of the host, and a framework's name appears in one adapter only.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Folder of include/flashbsr -> the folders it may include ("" is flashbsr/config.h and kin).
LAYERS = {
    "": {""},
    "core": {"", "core"},
    "plan": {"", "core", "plan"},
    "variant": {"", "core", "variant"},
    "cpu": {"", "core", "plan", "variant", "cpu"},
    "ptx": {"", "core", "ptx"},
    "tile": {"", "core", "ptx", "tile"},
    "kernel": {"", "core", "variant", "ptx", "tile", "kernel"},
}
# Folder of cpp -> the folders of cpp that its quoted includes may name.
CPP_LAYERS = {
    "cpu": {"cpu"},
    # A backend implements what api/backend.h declares; the API makes backends.
    "cuda": {"cuda", "api"},
    "api": {"api", "cpu", "cuda"},
    "xla": {"xla", "api"},
    "c": {"c", "api", "cpu", "cuda"},
    "bind": {"bind", "api", "cpu", "cuda", "xla"},
}
# Headers that NVRTC compiles too: no standard library at all (config.h brings the integer types),
# except for the host's own, which the others must not include.
FREESTANDING = {"core", "variant", "ptx", "tile", "kernel"}
HOST_ONLY = {"c_api.h", "core/error.h", "variant/rope.h"}
# Headers of these compile for a device only, but for what both sides read: shapes and arguments.
DEVICE = {"ptx", "tile", "kernel"}
SHARED = {"traits.h", "args.h", "prepare.h"}
# Nowhere in include/: a CUDA runtime to link, or static initialisers of streams.
BANNED = re.compile(r"cuda_runtime|cuda\.h|iostream|nanobind|Python\.h|numpy|torch")
BINDING = re.compile(r"nanobind|Python\.h|numpy/|torch/")
# The toolkit is known to one header, and no library of it is linked.
TOOLKIT = re.compile(r"^(cuda\w*|nvrtc)\.h$")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

FRAMEWORKS = {"torch", "jax", "cupy"}
# The benchmark's peers are frameworks, so is whom an integration is for, and process groups are
# PyTorch's; everything else goes through an adapter.
FRAMEWORK_FOLDERS = {"arrays", "integrations", "distributed", "bench"}

# Rooms and modules of python/flashbsr, floor by floor: each imports from its own and those before.
# "" is the front, `flashbsr` itself, which shows what lies below it.
FLOORS = (
    ("_core",),
    ("errors",),
    ("_check", "_installed"),
    ("arrays",),
    ("variant", "ops"),
    ("layout",),
    ("jit",),
    ("engine",),
    ("", "terminal"),
    ("viz", "distributed"),
    ("flashinfer", "integrations"),
    ("info", "warm"),
    ("bench",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Nobody imports what is behind a door, but the door itself.
DOORS = {"flashinfer", "integrations"}
MOST_MODULES = 10  # directly under flashbsr/

SPDX = "SPDX-License-Identifier: Apache-2.0"


def includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def layer_of(relative: Path) -> str:
    """Name the folder of a header, which is given relative to include/flashbsr."""
    return relative.parts[0] if len(relative.parts) > 1 else ""


def is_freestanding(relative: Path) -> bool:
    """Tell whether NVRTC compiles the header."""
    return layer_of(relative) in {"", *FREESTANDING} and relative.as_posix() not in HOST_ONLY


def is_device_only(relative: Path) -> bool:
    """Tell whether the host has no use for the header."""
    return layer_of(relative) in DEVICE and relative.name not in SHARED


def check_public_header(path: Path, root: Path) -> list[str]:
    relative = path.relative_to(root / "include/flashbsr")
    layer = layer_of(relative)
    freestanding = layer in FREESTANDING and is_freestanding(relative)
    problems = []
    if layer not in LAYERS:
        return [f"folder '{layer}' is not in tools/check_layering.py"]
    if "#pragma once" not in path.read_text():
        problems.append("no #pragma once")
    for bracket, name in includes(path):
        ours = name.startswith("flashbsr/")
        if bracket == '"':
            problems.append(f'#include "{name}": public headers are included as <flashbsr/...>')
        if ours:
            target = name.split("/")[1] if name.count("/") > 1 else ""
            if target not in LAYERS[layer]:
                problems.append(f"{layer or 'top'} must not include {target} (<{name}>)")
            included = Path(name.removeprefix("flashbsr/"))
            if freestanding and not is_freestanding(included):
                problems.append(f"{layer} is freestanding, <{name}> is the host's")
            if is_device_only(included) and not is_device_only(relative):
                problems.append(f"the host reads this header, <{name}> is the device's")
        elif BANNED.search(name):
            problems.append(f"<{name}> is not allowed under include/")
        elif freestanding:
            problems.append(f"{layer} is freestanding: no <{name}>")
    return problems


def check_core_source(path: Path, root: Path) -> list[str]:
    layer = path.relative_to(root / "cpp").parts[0]
    problems = []
    if layer not in CPP_LAYERS:
        return [f"folder 'cpp/{layer}' is not in tools/check_layering.py"]
    for bracket, name in includes(path):
        if layer != "bind" and BINDING.search(name):
            problems.append(f"only cpp/bind may include <{name}>")
        if (layer, path.name) != ("cuda", "api.h") and TOOLKIT.search(name):
            problems.append(f"only cpp/cuda/api.h may include <{name}>")
        if name.startswith("flashbsr/") and is_device_only(Path(name.removeprefix("flashbsr/"))):
            problems.append(f"<{name}> is the device's")
        if bracket == '"' and "/" in name:
            target = next(part for part in name.split("/") if part != "..")
            if target not in CPP_LAYERS[layer]:
                problems.append(f'cpp/{layer} must not include cpp/{target} ("{name}")')
    return problems


def module_name(path: Path, root: Path) -> str:
    """``engine.plan`` of python/flashbsr/engine/plan.py; "" for the front."""
    parts = path.relative_to(root / "python/flashbsr").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_imports(path: Path, name: str, modules: set[str]) -> list[tuple[int, str]]:
    """Lines and modules of the package that a module imports, wherever in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            names = [".".join(p[1:]) for p in parts if p[0] == "flashbsr"]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [p for p in package if p][: len(package) - node.level + 1]
                module = [*base, *module]
            elif module[0] == "flashbsr":
                module = module[1:]
            else:
                continue
            # ``from . import x`` is x where that is a module, otherwise what the package defines.
            whole = [".".join([*module, alias.name]) for alias in node.names]
            names = [w if w in modules else ".".join(module) for w in whole]
        found += [(node.lineno, n) for n in names]
    return found


def place(room: str) -> str:
    """Name a room in a message."""
    return room or "the front"


def check_rooms(paths: list[Path], root: Path) -> list[str]:
    """No import upwards, nothing behind a door, no circle, few modules at the front."""
    problems = []
    modules = {module_name(path, root) for path in paths} | {"_core"}
    arrows: dict[str, set[str]] = {}
    for path in paths:
        name = module_name(path, root)
        where = path.relative_to(root)
        room = name.split(".")[0]
        if room not in FLOOR:
            problems.append(f"{where}: '{room}' is not in FLOORS of tools/check_layering.py")
            continue
        for line, target in python_imports(path, name, modules):
            other = target.split(".")[0]
            if FLOOR.get(other, len(FLOORS)) > FLOOR[room]:
                problems.append(f"{where}: line {line}: {place(room)} is below {place(other)}")
            elif other in DOORS and other != room:
                problems.append(f"{where}: line {line}: {other} is a door, imported by {room}")
            elif FLOOR[other] == FLOOR[room] and other != room:
                problems.append(f"{where}: line {line}: {room} and {other} are on one floor")
            arrows.setdefault(name, set()).add(target)
    problems += [f"circle: {' -> '.join(circle)}" for circle in circles(arrows)]
    front = sorted(p.name for p in paths if p.parent == root / "python/flashbsr")
    if len(front) > MOST_MODULES:
        problems.append(f"python/flashbsr: {len(front)} modules, at most {MOST_MODULES}")
    return problems


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Circles of imports, one for each arrow that closes one."""
    found, done = [], set()

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for target in sorted(arrows.get(name, ())):
                visit(target, [*way, name])
            done.add(name)

    for name in sorted(arrows):
        visit(name, [])
    return found


def check_python(path: Path, root: Path) -> list[str]:
    parts = path.relative_to(root / "python/flashbsr").parts
    if parts[0] in FRAMEWORK_FOLDERS:
        return []
    problems = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        problems += [
            f"line {node.lineno}: only arrays/ and integrations/ may import {name}"
            for name in names
            if name.split(".")[0] in FRAMEWORKS
        ]
    return problems


def main(root: Path = ROOT) -> int:
    checks = [
        (sorted((root / "include/flashbsr").rglob("*.h")), check_public_header),
        (sorted((root / "cpp").rglob("*.cpp")), check_core_source),
        (sorted((root / "cpp").rglob("*.h")), check_core_source),
        (sorted((root / "python/flashbsr").rglob("*.py")), check_python),
    ]
    problems, count = [], 0
    for paths, check in checks:
        for path in paths:
            count += 1
            found = check(path, root)
            if SPDX not in "\n".join(path.read_text().splitlines()[:2]):
                found.append("the first two lines are not the SPDX header")
            problems += [f"{path.relative_to(root)}: {text}" for text in found]
    problems += check_rooms(sorted((root / "python/flashbsr").rglob("*.py")), root)
    for problem in problems:
        print(problem)
    print(f"layering: {count} files, {len(problems)} problem{'s' * (len(problems) != 1)}")
    return 1 if problems or not count else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
