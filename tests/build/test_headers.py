# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every public header compiles alone, twice in a row, without a warning, and quickly."""

from __future__ import annotations

import pytest
from toolchain import INCLUDE, compiler, run

HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
# CPU seconds on a slow machine. The cost of an include is part of the interface: <immintrin.h>
# alone takes about 0.6.
BUDGET = {"flashbsr/cpu": 8.0, "flashbsr/plan": 5.0}
FREESTANDING_BUDGET = 1.5


def test_headers_were_found() -> None:
    assert "flashbsr/config.h" in HEADERS
    assert len(HEADERS) > 5


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(header: str) -> None:
    source = f"#include <{header}>\n#include <{header}>\n"
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    outcome = run([compiler(), *flags, f"-I{INCLUDE}", "-x", "c++", "-"], stdin=source)
    assert outcome.status == 0, outcome.output
    budget = BUDGET.get(header.rsplit("/", 1)[0], FREESTANDING_BUDGET)
    assert outcome.cpu_seconds < budget, f"<{header}> costs {outcome.cpu_seconds:.1f} CPU s"
