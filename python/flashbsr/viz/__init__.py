# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of a plan: the workers' lanes, and the block-sparse matrix behind it.

``plot_plan`` and ``plot_bsr`` need matplotlib (``pip install 'flashbsr[viz]'``); ``render_lanes``,
``render_bsr``, ``render_parts`` say it as text and need nothing, ``write_page`` writes a page for
a browser and needs nothing either.
"""

from __future__ import annotations

from .lanes import plot_plan
from .matrix import plot_bsr
from .page import write_page
from .style import request_colors
from .text import render_bsr, render_lanes, render_parts

__all__ = [
    "plot_bsr",
    "plot_plan",
    "render_bsr",
    "render_lanes",
    "render_parts",
    "request_colors",
    "write_page",
]
