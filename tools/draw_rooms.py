# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/img/rooms.svg: the rooms of python/flashbsr, and who imports whom.

    python tools/draw_rooms.py
    python tools/draw_rooms.py --check

Rooms stand on the floors of tools/check_layering.py. Lines are imports, as the sources have them,
less those that others imply: whoever imports `engine` may import what `engine` imports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from check_layering import FLOORS, ROOT, module_name, python_imports

PICTURE = ROOT / "docs/img/rooms.svg"
# All import the first three. The others are programs, and import what they like.
LEFT_OUT = {"_check", "_installed", "errors", "__main__", "bench", "cli", "info", "warm"}
NAMES = {"": "flashbsr", "_core": "_core (C++)"}
COLUMN, ROW, BOX = 150, 66, 132
DOORS = {"flashinfer", "integrations"}
# Where no line crosses a room; the floor says how high.
COLUMNS = {
    "_core": 2.0, "arrays": 2.0, "variant": 1.4, "ops": 3.85, "layout": 0.7, "jit": 2.0,
    "engine": 2.0, "": 0.6, "terminal": 4.0, "viz": 3.0, "distributed": 1.45, "flashinfer": 2.0,
    "integrations": 0.6,
}  # fmt: skip


def imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Name the rooms that each room imports."""
    paths = sorted((root / "python/flashbsr").rglob("*.py"))
    modules = {module_name(path, root) for path in paths} | {"_core"}
    found: dict[str, set[str]] = {}
    for path in paths:
        name = module_name(path, root)
        targets = {target.split(".")[0] for _, target in python_imports(path, name, modules)}
        found.setdefault(name.split(".")[0], set()).update(targets)
    shown = {room for floor in FLOORS for room in floor} - LEFT_OUT
    return {
        room: {t for t in found.get(room, set()) & shown if t != room} for room in sorted(shown)
    }


def reached(arrows: dict[str, set[str]], room: str) -> set[str]:
    """Name what a room imports, directly or not."""
    found: set[str] = set()
    todo = list(arrows[room])
    while todo:
        target = todo.pop()
        if target not in found:
            found.add(target)
            todo += arrows[target]
    return found


def essential(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Drop imports that those of another imported room imply."""
    return {
        room: {t for t in targets if not any(t in reached(arrows, o) for o in targets - {t})}
        for room, targets in arrows.items()
    }


def places() -> dict[str, tuple[float, float]]:
    """Give the middle of each room, the lowest floor at the bottom."""
    floors = [[r for r in floor if r not in LEFT_OUT] for floor in FLOORS]
    floors = [floor for floor in floors if floor]
    top = 26 + ROW * (len(floors) - 1)
    return {
        room: (COLUMN * COLUMNS[room], float(top - ROW * level))
        for level, floor in enumerate(floors)
        for room in floor
    }


def draw(root: Path = ROOT) -> str:
    """Give the picture as SVG."""
    at, arrows = places(), essential(imports(root))
    width = int(max(x for x, _ in at.values())) + BOX // 2 + 20
    height = int(max(y for _, y in at.values())) + 36
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="14" role="img" '
        'aria-label="Rooms of the Python package and their imports">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    out = ["<!-- Written by tools/draw_rooms.py -->", head, ground]
    for room in sorted(arrows):
        for target in sorted(arrows[room]):
            (x0, y0), (x1, y1) = at[room], at[target]
            out.append(
                f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="#7a8794" stroke-width="1.5"/>'
            )
    for room, (x, y) in at.items():
        fill = "#fde8c8" if room in DOORS else "#dfeedd" if room == "_core" else "#d7e8f7"
        name = escape(NAMES.get(room, room))
        out.append(
            f'<rect x="{x - BOX / 2:g}" y="{y - 17:g}" width="{BOX}" height="34" rx="5" '
            f'fill="{fill}" stroke="#42505c"/>'
            f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" fill="#1d2730">{name}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args(argv)
    text = draw()
    if args.check:
        current = PICTURE.exists() and PICTURE.read_text() == text
        print(f"draw_rooms: {PICTURE.name} is {'current' if current else 'STALE'}")
        return 0 if current else 1
    PICTURE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
