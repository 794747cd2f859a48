# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The documentation site: ``sphinx-build -W docs build/site``. It needs the installed package."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import flashbsr
from flashbsr import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "https://github.com/flashbsr/flashbsr/blob/main"

project = "flashbsr"
author = "The flashbsr authors"
copyright = "2026, The flashbsr authors"  # noqa: A001
release = flashbsr.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["img/*"]
html_favicon = "img/favicon.svg"
html_static_path = ["static"]
html_css_files = ["front.css"]
html_theme = "furo"
html_title = f"flashbsr {release}"
html_theme_options = {"source_repository": "https://github.com/flashbsr/flashbsr/",
                      "source_branch": "main", "source_directory": "docs/"}  # fmt: skip
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]
# Short forms of interactive sessions and tables of bytes are no language of Pygments'.
suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
# A page is the same without them.
autodoc_mock_imports = ["jax", "sglang", "torch", "transformers", "vllm"]
autodoc_typehints = "none"  # docstrings say types, shapes and units
autodoc_default_options = {"members": True, "inherited-members": False}
# Docstrings are plain text with numpydoc's sections: `name` is an argument more often than a link.
default_role = "code"
napoleon_use_rtype = False
napoleon_use_ivar = True


def link_sources(app: Any, name: str, content: list[str]) -> None:  # noqa: ARG001
    """Links to files outside of the documentation lead to the repository."""
    here = (ROOT / "docs" / name).parent

    def follow(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        path, _, anchor = target.partition("#")
        found = (here / path).resolve()
        inside = found.is_relative_to(ROOT / "docs") and found.suffix == ".md"
        if not path or "://" in path or inside or not found.exists():
            return match[0]
        # Pictures are copied; the changelog is a page of its own.
        if found.suffix in (".png", ".svg"):
            return match[0]
        if found == ROOT / "CHANGELOG.md":
            up = "../" * name.count("/")
            return f"[{text}]({up}changelog.md)"
        return f"[{text}]({SOURCE}/{found.relative_to(ROOT)}{'#' + anchor if anchor else ''})"

    content[0] = re.sub(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)", follow, content[0])


def write_command_line(app: Any) -> None:  # noqa: ARG001
    """Every option of ``flashbsr``, as it prints them."""
    out = ["# The command line", "", "`flashbsr`, or `python -m flashbsr`.", ""]
    for command in ("", "info", "plan", "bench", "warm", "cache"):
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*command.split(), "--help"])
        out += [f"## {command or 'flashbsr'}", "", "```text", text.getvalue().rstrip(), "```", ""]
    (ROOT / "docs/reference/command.md").write_text("\n".join(out))


def setup(app: Any) -> None:
    """Register what is generated."""
    app.connect("source-read", link_sources)
    app.connect("builder-inited", write_command_line)
