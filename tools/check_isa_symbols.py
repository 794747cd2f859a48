# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""No code compiled for AVX-512 may be picked by the linker for a CPU that lacks it.

A weak symbol (an inline function or template that was not inlined) of a file compiled with
``-mavx2`` may replace the same symbol of every other file: the linker keeps one copy, and the
program dies with an illegal instruction on an older CPU. So every weak symbol of
``kernels_<level>.cpp`` must carry the level's own namespace ``flashbsr::cpu::<level>`` in its name.

Usage: check_isa_symbols.py OBJECT...    (ctest runs it on the object files of the build)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OBJECT = re.compile(r"kernels_(?P<level>\w+)\.(cpp\.)?o$")
# One line of nm: value, type letter, demangled name. W, V and u: weak function, object, unique.
WEAK = re.compile(r"^[0-9a-f]+ [WVu] (?P<name>.*)$")
# Names of types are the same text whatever the flags.
HARMLESS = ("typeinfo name for ", "typeinfo for ")


def stray_symbols(path: Path, level: str) -> list[str]:
    """Weak symbols defined in the object file `path` outside of the namespace of `level`."""
    listing = subprocess.run(
        ["nm", "--demangle", "--defined-only", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = [match["name"] for line in listing.splitlines() if (match := WEAK.match(line))]
    own = f"flashbsr::cpu::{level}::"
    return [name for name in names if own not in name and not name.startswith(HARMLESS)]


def main(arguments: list[str]) -> int:
    checked, failed = 0, False
    for path in map(Path, arguments):
        match = OBJECT.search(path.name)
        if match is None or match["level"] == "baseline":  # baseline code runs everywhere
            continue
        checked += 1
        for name in stray_symbols(path, match["level"]):
            failed = True
            print(f"{path.name}: weak symbol outside of flashbsr::cpu::{match['level']}: {name}")
    print(f"symbols: {checked} object files")
    return 1 if failed or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
