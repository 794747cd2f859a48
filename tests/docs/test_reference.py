# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The reference leaves nothing out: names, variables of the environment, commands, rooms."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from harness import framework
from site_pages import Page
from toolchain import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import draw_rooms

MODULES = (
    "flashbsr",
    "flashbsr.distributed",
    "flashbsr.flashinfer",
    "flashbsr.flashinfer.mla",
    "flashbsr.integrations.flash_attn",
    "flashbsr.integrations.flash_mla",
    "flashbsr.integrations.flex_attention",
    "flashbsr.integrations.jax",
    "flashbsr.viz",
)
NEEDS = {
    "flashbsr.distributed": "torch",
    "flashbsr.integrations.flex_attention": "torch",
    "flashbsr.integrations.jax": "jax",
}
# How sources ask for one.
ASKED = re.compile(r'(?:environ\.get\(|getenv\(|environ\[|^[A-Z]+ = )"(FLASHBSR_[A-Z_]+)"', re.M)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_its_place(pages: dict[Path, Page], module: str) -> None:
    if module in NEEDS:
        framework(NEEDS[module])
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    found = importlib.import_module(module)
    missing = []
    for name in sorted(set(found.__all__) - {"__version__"}):
        thing = getattr(found, name)
        own = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"
        if not anchors & {f"{module}.{name}", f"module-{module}.{name}", own}:
            missing.append(name)
    assert not missing


def test_every_variable_of_the_environment_is_said() -> None:
    paths = [*(ROOT / "python").rglob("*.py"), *(ROOT / "cpp").rglob("*.[ch]*")]
    asked = {name for path in paths for name in ASKED.findall(path.read_text())}
    assert len(asked) >= 7
    page = (ROOT / "docs/reference/environment.md").read_text()
    assert sorted(name for name in asked if f"| `{name}` |" not in page) == []


def test_every_command_is_there(pages: dict[Path, Page]) -> None:
    text = (ROOT / "python/flashbsr/cli.py").read_text()
    commands = set(re.findall(r'add_parser\(\s*"(\w+)"', text))
    assert {"info", "plan", "bench", "warm", "cache"} <= commands
    page = next(page for path, page in pages.items() if path.name == "command.html")
    assert commands <= page.anchors


def test_the_rooms_are_those_of_the_sources() -> None:
    """After a change of imports: python tools/draw_rooms.py."""
    assert draw_rooms.PICTURE.read_text() == draw_rooms.draw()


def test_what_is_drawn_is_what_is_imported() -> None:
    arrows = draw_rooms.imports()
    assert "arrays" in arrows["ops"]
    lines = draw_rooms.essential(arrows)
    assert all(
        draw_rooms.reached(lines, room) == draw_rooms.reached(arrows, room) for room in arrows
    )
