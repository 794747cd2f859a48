# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""``flashbsr bench``: runs the chosen workloads with a progress bar, prints, saves, plots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing

from flashbsr.errors import FlashbsrError
from flashbsr.terminal import Progress, print_table
from flashbsr.viz.style import load_pyplot

from .cuda_runner import CudaSession, find_gpu, run_cuda_workload
from .cuda_workloads import CUDA_KINDS, CUDA_WORKLOADS
from .page import write_report
from .report import limits_text, plot_results, result_tables, to_json
from .results import Result
from .runner import run_workload
from .session import Session
from .workloads import KINDS, WORKLOADS, Workload, select

__all__ = ["run"]


def _list(kinds: dict[str, str], workloads: tuple[Workload, ...]) -> int:
    width = max(len(w.name) for w in workloads)
    for kind, title in kinds.items():
        print(f"{title} ({kind})")
        for workload in workloads:
            if workload.kind == kind:
                print(f"  {workload.name:<{width}}  {workload.describe()}")
    return 0


def _session(
    args: argparse.Namespace, tick: Callable[[float], None]
) -> tuple[Session | CudaSession, Callable[[Workload], Result]]:
    """Give the device's session and what runs a workload in it."""
    if args.device == "cuda":
        cuda = CudaSession(find_gpu(), quick=args.quick, peer=not args.no_peer, tick=tick)
        return cuda, lambda workload: run_cuda_workload(workload, cuda)
    cpu = Session(quick=args.quick, peer=not args.no_peer, tick=tick)
    return cpu, lambda workload: run_workload(workload, cpu)


def run(args: argparse.Namespace) -> int:
    """Carry out the command with the options of ``flashbsr.cli``; returns the exit status."""
    on_cuda = args.device == "cuda"
    table = CUDA_WORKLOADS if on_cuda else WORKLOADS
    if args.list:
        return _list(CUDA_KINDS if on_cuda else KINDS, table)
    workloads = select(args.only, quick=args.quick, workloads=table)
    for option, path in (
        ("--json", args.json), ("--plot", args.plot), ("--report", args.report),
    ):  # fmt: skip
        if path is not None and not path.absolute().parent.is_dir():
            raise FlashbsrError(option, f"{str(path)!r}", "a file in a folder that exists")
    if args.plot is not None:
        load_pyplot("--plot")  # fail before the measurement, not after
    progress = Progress(sys.stderr, len(workloads))
    session, run_one = _session(args, progress.tick)
    started = time.monotonic()
    results = []
    with closing(progress):
        for index, workload in enumerate(workloads):
            progress.begin(index, workload.name)
            results.append(run_one(workload))
    session.finish(results)
    print(f"This machine: {limits_text(session.limits())}\n")
    for title, heading, rows, right in result_tables(results):
        print(title)
        print_table(heading, rows, right)
        print()
    print(f"{len(results)} workloads in {time.monotonic() - started:.0f} s")
    if any(path is not None for path in (args.json, args.plot, args.report)):
        record = to_json(results, session)
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
            print(f"results: {args.json}")
        if args.plot is not None:
            plot_results(record, args.plot)
            print(f"plot: {args.plot}")
        if args.report is not None:
            write_report(record, args.report, goals=args.goals)
            print(f"report: {args.report}")
    return 0
