# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What ptxas says of every CUDA kernel: registers, shared memory, stack, spills.

A build of the CUDA kernels keeps ptxas' report of each beside it (<build>/kernels/*.log). This
writes them as docs/kernels/registers.md, or with --check compares; a spill is an error either way,
because a kernel that spills belongs in no release.

    python tools/kernel_registers.py build/cuda
    python tools/kernel_registers.py build/cuda --check
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/kernels/registers.md"
HEADING = """<!-- SPDX-FileCopyrightText: 2026 The flashbsr authors -->
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written by tools/kernel_registers.py; CI compares it with a build. -->
# Registers of every kernel

As ptxas of CUDA {release} reports them. Shared memory is the static part; the dynamic part comes
from the kernel's traits, `flashbsr info --json` shows it. A spill fails CI.

| kernel | target | registers | shared memory | stack | spill stores | spill loads |
|---|---|---|---|---|---|---|
"""
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
RELEASE = re.compile(r"As ptxas of CUDA (.+?) reports")


@dataclass(frozen=True)
class Use:
    """One kernel on one target."""

    kernel: str
    target: str
    registers: int
    shared: int
    stack: int
    stores: int
    loads: int

    def row(self) -> str:
        """Print as a line of the table."""
        cells = (self.registers, self.shared, self.stack, self.stores, self.loads)
        return f"| `{self.kernel}` | {self.target} | " + " | ".join(map(str, cells)) + " |"


def parse(log: str) -> list[Use]:
    """Read a report: a kernel for one or more targets."""
    uses = []
    entries = list(ENTRY.finditer(log))
    ends = [entry.start() for entry in entries[1:]] + [len(log)]
    for entry, end in zip(entries, ends, strict=True):
        text = log[entry.end() : end]
        frame, used, shared = FRAME.search(text), USED.search(text), SHARED.search(text)
        if frame is None or used is None:
            raise ValueError(
                f"{entry[1]} for {entry[2]}: ptxas says nothing of registers or spills"
            )
        registers, bytes_shared = int(used[1]), int(shared[1]) if shared else 0
        uses.append(Use(entry[1], entry[2], registers, bytes_shared, *map(int, frame.groups())))
    return uses


def natural(text: str) -> list[str]:
    """Sort d64 before d128."""
    return [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def read_build(build: Path) -> tuple[str, list[Use]]:
    """Read the compiler's release and every kernel of a build; one without a report is an error."""
    manifest = build / "kernels/manifest.txt"
    if not manifest.exists():
        raise ValueError(f"{manifest} is missing; expected a build with FLASHBSR_CUDA=ON")
    compiler, *names = manifest.read_text().split("\n")
    uses: list[Use] = []
    for name in sorted(filter(None, names), key=natural):
        log = build / f"kernels/{name}.log"
        found = parse(log.read_text()) if log.exists() else []
        if not found:
            raise ValueError(f"{log}: no report of ptxas; build the CUDA kernels first")
        uses += found
    kind, version = compiler.split()
    release = ".".join(version.split(".")[:2])
    return release if kind == "nvcc" else f"{release} ({kind.upper()})", uses


def is_common(build: Path) -> bool:
    """Tell whether a build leaves rare kernels to NVRTC."""
    cache = build / "CMakeCache.txt"
    return cache.exists() and "\nFLASHBSR_KERNELS:STRING=common\n" in cache.read_text()


def check(table: str, uses: list[Use], release: str, common: bool = False) -> list[str]:
    """Compare a build with the checked-in table, which has rare kernels, too."""
    noted = RELEASE.search(table)
    if noted is None or noted[1] != release:
        # Another compiler allocates differently: its spills count, its numbers are not compared.
        print(f"registers: the table is CUDA {noted[1] if noted else '?'}'s, this is {release}'s")
        return []
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    if common:
        built = {use.kernel for use in uses}
        lines = [line for line in lines if line.split("`")[1] in built]
    rows = [use.row() for use in uses]
    problems = [f"not in the table: {row}" for row in rows if row not in lines]
    problems += [f"not in the build: {line}" for line in lines if line not in rows]
    if not problems and lines != rows:
        problems.append("the order of the table is another one")
    if problems:
        problems.append(f"stale: python tools/kernel_registers.py BUILD writes {TABLE.name} anew")
    return problems


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path, help="a build directory with FLASHBSR_CUDA=ON")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        release, uses = read_build(args.build)
        table = args.table.read_text() if args.check else ""
    except (OSError, ValueError) as error:
        print(f"registers: {error}")
        return 2
    if args.check:
        problems = check(table, uses, release, is_common(args.build))
    else:
        problems = []
        args.table.parent.mkdir(parents=True, exist_ok=True)
        rows = "".join(use.row() + "\n" for use in uses)
        args.table.write_text(HEADING.format(release=release) + rows)
    problems += [
        f"spills: {use.kernel} for {use.target}: {use.stores} + {use.loads} bytes"
        for use in uses
        if use.stores or use.loads
    ]
    for problem in problems:
        print(problem)
    kernels = len({use.kernel for use in uses})
    top = max(use.registers for use in uses)
    print(
        f"registers: {kernels} kernels, {len(uses)} images, at most {top}, {len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
