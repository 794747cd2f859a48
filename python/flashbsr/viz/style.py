# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the pictures share: colours, saving, matplotlib on demand."""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbsr.errors import FlashbsrError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flashbsr.engine.plan import Plan

Color = tuple[float, float, float]

INK = "#22303c"
MUTED = "#8895a0"
GRID = "#e4e8eb"
AMBER = "#d9a441"
SHARED = "#fbf0d9"
LANE = "#f4f6f7"


def load_pyplot(caller: str) -> Any:
    """``matplotlib.pyplot``, or an `UnsupportedError` that names the extra."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            caller, "a Python without matplotlib", "matplotlib: pip install 'flashbsr[viz]'"
        )
    return importlib.import_module("matplotlib.pyplot")


def request_colors(count: int) -> list[Color]:
    """Give `count` colours whose neighbours differ: hues a golden angle apart, three depths."""
    colors: list[Color] = []
    for i in range(count):
        hue = (0.55 + i * 0.61803398875) % 1.0
        # Yellow to green looks lighter than blue of the same HLS lightness; even that out.
        lift = 0.10 * math.cos(2 * math.pi * (hue - 1 / 6))
        lightness = (0.57, 0.68, 0.50)[i % 3] - lift
        colors.append(colorsys.hls_to_rgb(hue, lightness, (0.52, 0.60, 0.46)[i % 3]))
    return colors


def owner_colors(plan: Plan) -> list[Color]:
    """Those of the requests, and behind them ambers for the shared parts, as `items` count them."""
    parts = []
    for i in range(len(plan.shared)):
        hue, lightness = 0.108 + 0.012 * (i % 3 - 1), (0.55, 0.42, 0.66, 0.34)[i % 4]
        parts.append(colorsys.hls_to_rgb(hue, lightness, 0.67))
    return request_colors(len(plan.requests)) + parts


def owner_name(plan: Plan, number: int) -> str:
    """``r3``, request 3, or ``s0``, shared part 0."""
    requests = len(plan.requests)
    return f"r{number}" if number < requests else f"s{number - requests}"


def kilo(tokens: int) -> str:
    """65536 -> 64k; short numbers stay."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def darker(color: Color, factor: float = 0.5) -> Color:
    """Scale towards black."""
    return (color[0] * factor, color[1] * factor, color[2] * factor)


def count_of(number: int, noun: str) -> str:
    """Format ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def save(ax: Axes, path: str | Path) -> None:
    """Save the axes' figure, and close it so that a loop over plans does not pile figures up."""
    figure: Any = ax.figure
    try:
        figure.savefig(path, dpi=160, facecolor="white")
    except (ValueError, OSError) as error:
        raise FlashbsrError("path", f"{str(path)!r} ({error})", "a .png, .svg or .pdf") from error
    load_pyplot("savefig").close(figure)
