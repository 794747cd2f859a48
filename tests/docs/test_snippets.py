# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Every block of Python and C++ in the documentation runs as it is printed.

A block is written to a file by itself and run there, so that whoever copies it has all that it
needs. C++ with a ``main`` is linked and run, without one it is compiled. What says ``gpu`` behind
its language needs one: elsewhere its imports and names are checked, and C++ is compiled.
"""

from __future__ import annotations

import ast
import re
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import framework, has_gpu
from nvrtc import nvrtc
from toolchain import INCLUDE, ROOT, compiler, run

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
#: What is no program: commands, what they print, drawings, a build's configuration.
TEXT = {"", "text", "sh", "console", "bash", "cmake"}
#: Of the site, which test_site.py builds.
DIRECTIVES = {"{toctree}", "{include}", "{literalinclude}", "{eval-rst}"}
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]


@dataclass(frozen=True)
class Block:
    """A fenced block: where, its language, whether it needs a GPU, its text."""

    page: str
    line: int
    language: str
    gpu: bool
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All of a page's blocks, in order."""
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        language, *options = match[1].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        name = page.relative_to(ROOT).as_posix()
        known = set(options) <= {"gpu"} or language in DIRECTIVES
        assert known, f"{name}:{line}: {match[1]}"
        found.append(Block(name, line, language, "gpu" in options, match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
CPP = [block for block in BLOCKS if block.language in ("cpp", "c++")]


def names(block: Block) -> str:
    return block.name


def test_languages() -> None:
    """No block is left out by a language that this file does not know."""
    known = {*TEXT, *DIRECTIVES, "python", "cpp", "c++", "c"}
    assert [block.name for block in BLOCKS if block.language not in known] == []
    assert len(PYTHON) >= 10
    assert len(CPP) >= 5


def imported(text: str) -> list[str]:
    """Packages that a program imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return sorted({name.partition(".")[0] for name in found})


def check_names(text: str) -> None:
    """Imports of a program, and attributes of what it imports, exist."""
    tree = ast.parse(text)
    namespace: dict[str, object] = {}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), "imports", "exec"), namespace)
    for node in ast.walk(tree):
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and chain:
            thing = namespace.get(node.id)
            if type(thing) is type(ast):  # a module
                assert hasattr(thing, chain[0]), f"{node.id}.{chain[0]}"


# torch.compile takes parts of PyTorch that PyTorch itself deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("block", PYTHON, ids=names)
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in imported(block.text):
        if name == "transformers":  # not in CI: tools/engines_transformers.py runs it
            pytest.importorskip(name, reason="transformers is not installed")
        framework(name)
    if "viz" in block.text:
        framework("matplotlib").use("agg")
    if block.gpu and not has_gpu():
        check_names(block.text)
        return
    script = tmp_path / "snippet.py"
    script.write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("block", [b for b in CPP if not b.gpu], ids=names)
def test_cpp(block: Block, tmp_path: Path) -> None:
    source = tmp_path / "snippet.cpp"
    source.write_text(block.text, encoding="utf-8")
    whole = re.search(r"\bint main\(", block.text) is not None
    target = tmp_path / ("snippet" if whole else "snippet.o")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", "-pthread"]
    built = run([compiler(), *flags, *([] if whole else ["-c"]), source, "-o", target])
    assert built.status == 0, built.output
    if whole:
        done = run([target])
        assert done.status == 0, done.output
        assert done.output


@pytest.mark.parametrize("block", [b for b in CPP if b.gpu], ids=names)
def test_cuda(block: Block, tmp_path: Path) -> None:
    """With nvcc, or where a toolkit is missing with NVRTC."""
    source = tmp_path / "snippet.cu"
    source.write_text(block.text, encoding="utf-8")
    if shutil.which("nvcc"):
        command = ["nvcc", "-std=c++20", "-arch=sm_80", "-cubin", f"-I{INCLUDE}", source]
        built = run([*command, "-o", tmp_path / "snippet.cubin"])
        assert built.status == 0, built.output
        return
    compiled, messages = nvrtc().compile(block.text, "sm_80")
    assert compiled, messages


def test_blocks_are_found_and_can_fail(tmp_path: Path) -> None:
    """A name that nothing defines is an error, and so is one that a package has not."""
    with pytest.raises(AssertionError, match=r"flashbsr\.no_such_name"):
        check_names("import flashbsr\nflashbsr.no_such_name.x()\n")
    check_names("import numpy as np\nimport flashbsr\nnp.random.randn(3)\nq.anything\n")
    script = tmp_path / "snippet.py"
    script.write_text("plan(q)\n", encoding="utf-8")
    with pytest.raises(NameError):
        runpy.run_path(str(script))
