# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The training text: English prose that every Python installation carries.

Sources, in this order: the language reference (`pydoc_data.topics`), the licence and the Zen of
Python, and the docstrings and comment blocks of the standard library. Paragraphs that are code,
tables or signatures are dropped, the others are unwrapped to one line each, and a paragraph that
was seen before is not taken twice. The order is fixed, so one Python version gives one text.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import inspect
import io
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

# Folders of the standard library that hold tests, generated tables or other people's packages.
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
_SKIP |= {"ensurepip", "pydoc_data", "lib2to3", "turtledemo", "_sysconfigdata"}
_WORD = re.compile(r"[A-Za-z]{2,}")
_ITEM = re.compile(r"^([*+-]|\d+[.)])\s")
_MIN_WORDS = 9
_DOCUMENT_CHARS = 700  # a module's pieces are joined up to this length, so that documents end often


def _unwrap(paragraph: str) -> str:
    return re.sub(r"\s+", " ", paragraph).strip()


def is_prose(text: str) -> bool:
    """True for a paragraph that reads like English rather than like code or a table."""
    words = text.split()
    if len(words) < _MIN_WORDS or not text.isascii() or ">>>" in text or "::=" in text:
        return False
    plain = sum(bool(re.fullmatch(r"[\"'(]*[A-Za-z][a-z'-]*[\"'),.:;!?]*", word)) for word in words)
    odd = sum(c in "=_{}[]<>|\\/@#$%^~+*`" for c in text)
    return plain >= 0.72 * len(words) and odd <= 0.02 * len(text) and text[-1] in '.!?:)"'


def paragraphs(text: str, seen: set[str]) -> list[str]:
    """The prose paragraphs of `text`, one line each, that are not in `seen` yet."""
    found = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text)):
        line = _ITEM.sub("", _unwrap(block))
        if is_prose(line) and line not in seen:
            seen.add(line)
            found.append(line)
    return found


def _docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            yield inspect.cleandoc(doc)


def _comments(source: str) -> Iterator[str]:
    """Runs of whole-line comments, without their number signs."""
    run: list[str] = []
    for line in [*source.splitlines(), ""]:
        match = re.match(r"\s*#+ ?(.*)$", line)
        if match:
            run.append(match.group(1))
        elif run:
            yield "\n".join(run)
            run = []


def _zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


def gather() -> list[str]:
    """The documents of the corpus, paragraphs separated by one newline.

    Returns
    -------
    list of str
        About 1.6 million characters in all on CPython 3.11.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = [paragraphs(topics[name], seen) for name in sorted(topics)]
    root = Path(sysconfig.get_paths()["stdlib"])
    licence = root / "LICENSE.txt"
    documents.append(paragraphs(licence.read_text("utf-8"), seen) if licence.is_file() else [])
    documents.append([_unwrap(line) for line in _zen().splitlines() if line.strip()])
    for path in sorted(root.rglob("*.py")):
        if _SKIP & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text("utf-8")
            pieces = [*_docstrings(source), *_comments(source)]
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file in another encoding is a codec's test data, not prose
        document: list[str] = []
        for piece in pieces:
            document += paragraphs(piece, seen)
            if sum(map(len, document)) >= _DOCUMENT_CHARS:
                documents.append(document)
                document = []
        documents.append(document)
    return ["\n".join(document) for document in documents if document]
