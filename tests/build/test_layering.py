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


SPDX = (
    "# SPDX-FileCopyrightText: 2026 The flashbsr authors\n# SPDX-License-Identifier: Apache-2.0\n"
)


def layering(root: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    """Status and problems of a package of these modules, and a door in each."""
    package = root / "python/flashbsr"
    for name, text in {"__init__.py": "", "flashinfer/__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SPDX + text)
    outcome = run_tool("check_layering.py", root)
    *problems, summary = outcome.output.splitlines()
    assert summary.startswith("layering: ")
    return outcome.status, [line.removeprefix("python/flashbsr/") for line in problems]


GOOD = {
    "errors.py": "class FlashbsrError(ValueError): ...\n",
    "arrays/__init__.py": "import torch\nfrom ..errors import FlashbsrError\n",
    "layout/layouts.py": "import numpy as np\nfrom .. import arrays\n",
    "engine/task.py": "from ..layout import layouts\nfrom ..layout.layouts import Paged\n",
    "engine/attention.py": "import flashbsr._core as _core\nfrom .task import TaskInfo\n",
    "__init__.py": "from .engine.attention import Attention\n",
    "flashinfer/__init__.py": "from .prefill import Wrapper\n",
    "flashinfer/prefill.py": "from ..engine.attention import Attention\n",
    "cli.py": "import flashbsr\n",
}


def test_a_package_in_order_passes(tmp_path: Path) -> None:
    assert layering(tmp_path, GOOD) == (0, [])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "layout/layouts.py",
            "from ..engine.task import TaskInfo\n",
            "layout/layouts.py: line 3: layout is below engine",
        ),
        (
            "layout/layouts.py",
            "def plan():\n    from flashbsr.engine import task\n",
            "layout/layouts.py: line 4: layout is below engine",
        ),
        ("arrays/jax.py", "import flashbsr\n", "arrays/jax.py: line 3: arrays is below the front"),
        (
            "cli.py",
            "from .flashinfer.prefill import Wrapper\n",
            "cli.py: line 3: flashinfer is a door, imported by cli",
        ),
        (
            "bench/runner.py",
            "import flashbsr.flashinfer\n",
            "bench/runner.py: line 3: flashinfer is a door, imported by bench",
        ),
        (
            "variant/spec.py",
            "from ..ops import page\n",
            "variant/spec.py: line 3: variant and ops are on one floor",
        ),
        (
            "kernels/__init__.py",
            "",
            "kernels/__init__.py: 'kernels' is not in FLOORS of tools/check_layering.py",
        ),
        (
            "engine/task.py",
            "import cupy\n",
            "engine/task.py: line 3: only arrays/ and integrations/ may import cupy",
        ),
    ],
)
def test_imports_that_are_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    """Upwards, wherever in a module; behind a door; a floor, a room and a framework aside."""
    ops = {"ops/page.py": ""}
    status, problems = layering(tmp_path, {**GOOD, **ops, name: text})
    assert status == 1
    assert problem in problems


def test_a_circle_is_found(tmp_path: Path) -> None:
    """Within a room, where no floor forbids it; over one module or several."""
    files = {
        "engine/plan.py": "from .task import TaskInfo\n",
        "engine/task.py": "def later():\n    from .explain import explain\n",
        "engine/explain.py": "from . import plan\n",
    }
    status, problems = layering(tmp_path, {**GOOD, **files})
    assert status == 1
    assert problems == ["circle: engine.task -> engine.explain -> engine.plan -> engine.task"]


def test_an_eleventh_module_is_one_too_many(tmp_path: Path) -> None:
    names = ("errors", "_check", "_installed", "info", "warm", "cli", "__main__", "jit", "viz")
    files = {f"{name}.py": "" for name in names}
    assert layering(tmp_path, files) == (0, [])
    status, problems = layering(tmp_path, {**files, "bench.py": ""})
    assert status == 1
    assert problems == ["python/flashbsr: 11 modules, at most 10"]


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
