# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m examples.variants [name ...]`: lists the gallery, and runs each file's example."""

from __future__ import annotations

import argparse
import doctest
import importlib
import sys
import textwrap
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))
WIDTH = 79


def first_sentence(text: str) -> str:
    """Give the first line of a docstring."""
    return text.strip().splitlines()[0]


def run(name: str) -> bool:
    """Run the example of a file; what it should have printed and did not is printed."""
    started = time.perf_counter()
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as missing:
        print(f"{name:15} skipped: no module {missing.name}")
        return True
    failed = doctest.testmod(module).failed
    seconds = time.perf_counter() - started
    print(f"{name:15} {'FAILED' if failed else 'ok':7}{seconds:6.2f} s")
    indent = " " * 4
    text = first_sentence(module.__doc__ or "")
    print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent))
    return not failed


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 1 if an example fails."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.variants",
        description="Run the examples of the gallery. C++ is compiled the first time, for seconds.",
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--list", action="store_true", help="names alone")
    given = parser.parse_args(argv)
    names = given.names or NAMES
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"got {unknown[0]}; expected one of {', '.join(NAMES)}")
    if given.list:
        print("\n".join(names))
        return 0
    results = [run(name) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
