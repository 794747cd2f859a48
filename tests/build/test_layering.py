# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The tools that watch the tree: includes one way, file sizes, weak symbols."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toolchain import INCLUDE, ROOT, compiler, run, run_tool


@pytest.mark.parametrize("tool", ["check_layering.py", "size_report.py"])
def test_the_tree_passes(tool: str) -> None:
    outcome = run_tool(tool)
    assert outcome.status == 0, outcome.output


def test_contributing_names_files_that_exist() -> None:
    """Recipes rot when files move. A name is relative to the tree or to the public headers."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = set(re.findall(r"`([\w.]+/[\w./]*)`", text))
    assert len(names) > 20
    missing = [
        n for n in sorted(names) if not any((r / n).exists() for r in (ROOT, INCLUDE / "flashbsr"))
    ]
    assert not missing


HAZARD = """
namespace flashbsr::cpu::avx2 {{ template <class T> [[gnu::noinline]] T own(T x) {{ return x; }} }}
template <class T> [[gnu::noinline]] T shared(T x) {{ return x; }}
int use(int x) {{ return flashbsr::cpu::avx2::own(x) + {call}; }}
"""


@pytest.mark.parametrize(("call", "status"), [("0", 0), ("shared(x)", 1)])
def test_weak_symbols_outside_of_the_isa_namespace_are_found(
    tmp_path: Path, call: str, status: int
) -> None:
    """ctest runs the tool on the real object files; here it is shown that it can fail."""
    target = tmp_path / "kernels_avx2.cpp.o"
    source = HAZARD.format(call=call)
    built = run([compiler(), "-O1", "-c", "-x", "c++", "-", "-o", target], stdin=source)
    assert built.status == 0, built.output
    outcome = run_tool("check_isa_symbols.py", target)
    assert outcome.status == status, outcome.output
    assert ("int shared<int>(int)" in outcome.output) == (status == 1)
