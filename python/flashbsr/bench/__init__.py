# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark behind ``flashbsr bench``.

``workloads`` names what is measured, ``timing`` how, ``data`` makes the arrays, ``peers`` is
PyTorch, ``runner`` puts them together, ``report`` prints, saves and plots, ``command`` is the
command line. Only the public API is measured. Method and results: ``benchmarks/README.md``.
"""

from __future__ import annotations

from .report import plot_results, render_table, to_json
from .runner import run_workload
from .session import Session
from .workloads import WORKLOADS, Workload, select

__all__ = [
    "WORKLOADS",
    "Session",
    "Workload",
    "plot_results",
    "render_table",
    "run_workload",
    "select",
    "to_json",
]
