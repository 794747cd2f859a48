# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr bench``: runs the chosen workloads with a progress bar, prints, saves, plots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import TextIO

from flashbsr.errors import FlashbsrError
from flashbsr.viz.style import load_pyplot

from .report import plot_results, render_table, to_json
from .runner import Session, run_workload
from .workloads import KINDS, WORKLOADS, select

__all__ = ["run"]


@dataclass(slots=True)
class _Bar:
    """One line on a terminal that is redrawn; on anything else it stays silent."""

    stream: TextIO
    total: int
    done: int = 0
    name: str = ""
    _drawn: float = 0.0

    def begin(self, index: int, name: str) -> None:
        self.done, self.name = index, name
        self.draw(0.0, force=True)

    def draw(self, fraction: float, *, force: bool = False) -> None:
        now = time.monotonic()
        if not self.stream.isatty() or (now - self._drawn < 0.1 and not force):
            return
        self._drawn = now
        width = 28
        filled = round(width * (self.done + fraction) / self.total)
        bar = "#" * filled + "-" * (width - filled)
        self.stream.write(f"\r\x1b[K[{bar}] {self.done + 1}/{self.total} {self.name}")
        self.stream.flush()

    def clear(self) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def _list() -> int:
    width = max(len(w.name) for w in WORKLOADS)
    for kind, title in KINDS.items():
        print(f"{title} ({kind})")
        for workload in WORKLOADS:
            if workload.kind == kind:
                print(f"  {workload.name:<{width}}  {workload.describe()}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Carry out the command with the options of ``flashbsr.cli``; returns the exit status."""
    if args.list:
        return _list()
    workloads = select(args.only, quick=args.quick)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise FlashbsrError(option, f"{str(path)!r}", "a file in a folder that exists")
    if args.plot is not None:
        load_pyplot("--plot")  # fail before the measurement, not after
    bar = _Bar(sys.stderr, len(workloads))
    session = Session(quick=args.quick, peer=not args.no_peer, tick=bar.draw)
    started = time.monotonic()
    results = []
    try:
        for index, workload in enumerate(workloads):
            bar.begin(index, workload.name)
            results.append(run_workload(workload, session))
    finally:
        bar.clear()
    session.finish(results)
    print(render_table(results, session.limits()))
    print(f"\n{len(results)} workloads in {time.monotonic() - started:.0f} s")
    if args.json is not None or args.plot is not None:
        record = to_json(results, session)
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
            print(f"results: {args.json}")
        if args.plot is not None:
            plot_results(record, args.plot)
            print(f"plot: {args.plot}")
    return 0
