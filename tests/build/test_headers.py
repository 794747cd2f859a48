# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every public header of the host compiles alone, twice in a row, without a warning, and quickly.

test_nvrtc.py does the same for the device's.
"""

from __future__ import annotations

import pytest
from toolchain import INCLUDE, compiler, load_tool, run

LAYERING = load_tool("check_layering")
HEADERS = sorted(
    path.relative_to(INCLUDE).as_posix()
    for path in INCLUDE.rglob("*.h")
    if not LAYERING.is_device_only(path.relative_to(INCLUDE / "flashbsr"))
)
# CPU seconds on a slow machine. The cost of an include is part of the interface: <immintrin.h>
# alone takes about 0.6.
BUDGET = {"flashbsr/cpu": 8.0, "flashbsr/plan": 5.0}
FREESTANDING_BUDGET = 1.5


def test_headers_were_found() -> None:
    assert "flashbsr/config.h" in HEADERS
    assert "flashbsr/kernel/decode/traits.h" in HEADERS
    assert "flashbsr/ptx/math.h" not in HEADERS


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(header: str) -> None:
    source = f"#include <{header}>\n#include <{header}>\n"
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    outcome = run([compiler(), *flags, f"-I{INCLUDE}", "-x", "c++", "-"], stdin=source)
    assert outcome.status == 0, outcome.output
    budget = BUDGET.get(header.rsplit("/", 1)[0], FREESTANDING_BUDGET)
    assert outcome.cpu_seconds < budget, f"<{header}> costs {outcome.cpu_seconds:.1f} CPU s"
