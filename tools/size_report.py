# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Files stay readable in one sitting: a warning above 400 lines, exit status 1 above 500."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ["include", "cpp", "cmake", "python", "tests", "tools", "examples", "benchmarks"]
SUFFIXES = {".h", ".cpp", ".cu", ".py", ".cmake"}
SOFT, HARD = 400, 500


def main() -> int:
    files = [ROOT / "CMakeLists.txt"]
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    sizes = sorted(((len(p.read_text().splitlines()), p) for p in files), reverse=True)
    for lines, path in sizes:
        if lines > SOFT:
            verdict = f"over the limit of {HARD}" if lines > HARD else f"over {SOFT}, split it soon"
            print(f"{lines:5d}  {path.relative_to(ROOT)}: {verdict}")
    total = sum(lines for lines, _ in sizes)
    print(f"size: {len(sizes)} files, {total} lines, longest {sizes[0][0]}")
    return 1 if sizes[0][0] > HARD else 0


if __name__ == "__main__":
    sys.exit(main())
