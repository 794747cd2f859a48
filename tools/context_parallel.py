# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures attention over several GPUs of a host and keeps tests/records/ranks-<device>-x<N>.json.

    python tools/context_parallel.py --ranks 2                 every row; as many GPUs are needed
    python tools/context_parallel.py --ranks 4 --only "decode 16 x 8192"     some, nothing is kept
    python tools/context_parallel.py --ranks 8 --dry-run       no GPU: rows, and what the model says
    python tools/context_parallel.py --check                   no GPU: are the records good?

Each rank is a process with a GPU; they are a group of NCCL. A row is timed on one GPU and on all,
by every method of `flashbsr.distributed`, decode in CUDA graphs; the slowest rank counts. Results
must be those of one GPU within rounding. Goals are for two GPUs; a missed one is told of, and no
failure.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import gpu_hash
from context_parallel_rows import ROWS, Here, Row, measure

SCHEMA = 2
RECORDS = gpu_hash.ROOT / "tests" / "records"
SOURCES = ("python/flashbsr/distributed/*.py", "tools/context_parallel*.py")
SECONDS = 300  # that ranks wait for each other


def source_hash() -> str:
    """Give 16 hex digits over what decides: kernels and their host code, and what is over ranks."""
    both = gpu_hash.source_hash() + engines.source_hash(SOURCES)
    return hashlib.sha256(both.encode()).hexdigest()[:16]


def serve(rank: int, size: int, device: str, store: str, rows: dict[str, Row], found: Any) -> None:
    """Measure rows as one rank; the first one tells."""
    import torch
    import torch.distributed as dist

    # Not every machine of several GPUs has NVLink multicast where it says so.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=dt.timedelta(seconds=SECONDS),
    )
    for name, row in rows.items():
        outcome = measure(row, Here(size, rank, device))
        if rank == 0:
            found.put((name, outcome))
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, device: str, rows: dict[str, Row]) -> dict[str, Any]:
    """Start the ranks and give the outcomes of rows. Ends them all if one ends early."""
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    outcomes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = size, device, f"{folder}/store", rows, found
        ranks = [context.Process(target=serve, args=(rank, *given)) for rank in range(size)]
        for process in ranks:
            process.start()
        try:
            while len(outcomes) < len(rows):
                try:
                    name, outcome = found.get(timeout=0.5)
                except queue.Empty:
                    if any(process.exitcode for process in ranks):
                        raise SystemExit("context_parallel: a rank has failed") from None
                    continue
                outcomes[name] = outcome
                print(line(name, outcome), flush=True)
            for process in ranks:
                process.join(SECONDS)
        finally:
            for process in ranks:
                process.kill()
    return outcomes


def line(name: str, outcome: dict[str, Any]) -> str:
    """Say how a row went."""
    if "problem" in outcome:
        return f"{name:<27} FAILED: {outcome['problem']}"
    said = "" if outcome["ok"] else "  WRONG"
    best = outcome["best"]
    return (
        f"{name:<27} one {outcome['one_us']:8.0f} us  all {outcome['us'][best]:8.0f} us  "
        f"{outcome['times']:5.2f} times ({best}; goal of two {outcome['goal']}){said}"
    )


def dry_run(rows: dict[str, Row], size: int) -> None:
    """Print rows, and what the model of cost says of them."""
    print(f"{'by flashbsr.distributed.Cost':<27} {'one GPU':>9}  {size} GPUs")
    for name, row in rows.items():
        us = row.predicted(size)
        one = us.pop("one")
        best = min(us, key=us.__getitem__)
        each = ", ".join(f"{method} {x:.0f}" for method, x in us.items())
        print(
            f"{name:<27} {one:6.0f} us  {each} us: {one / us[best]:.2f} times "
            f"(goal of two {row.goal})"
        )


def record(rows: dict[str, Row], size: int, keep: bool, out: Path | None) -> int:
    """Measure on GPUs; unless some rows were chosen keep the outcome."""
    import torch

    have = torch.cuda.device_count()
    if have < size:
        raise SystemExit(
            f"context_parallel: --ranks {size} needs {size} GPUs, here are {have}: run it on a "
            "machine that has them, take fewer --ranks, or --dry-run"
        )
    device = torch.cuda.get_device_name(0)
    outcomes = run(size, "cuda", rows)
    content = {
        "schema": SCHEMA,
        "device": device,
        "ranks": size,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
        "rows": outcomes,
    }
    if keep:
        from gpu_steps import slug

        path = out or RECORDS / f"ranks-{slug(device)}-x{size}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"record: {path}")
    return 0 if all(outcome["ok"] for outcome in outcomes.values()) else 1


def verdict(content: dict[str, Any], current: str) -> tuple[bool, list[str]]:
    """Judge a record: complete, good, of the `current` sources? And what to say of it."""
    stale = content["source_hash"] != current
    lines = [f"{content['ranks']} x {content['device']} ({content['date'][:10]})"]
    lines[0] += ", STALE" * stale
    good = not stale
    for name, row in ROWS.items():
        outcome = content["rows"].get(name)
        if outcome is None:
            good = False
            lines.append(f"  {name:<27} MISSING")
            continue
        good &= outcome["ok"]
        lines.append(f"  {line(name, outcome)}")
        if content["ranks"] == 2 and outcome.get("times", row.goal) < row.goal:
            lines.append(f"    goal missed: {outcome['times']:.2f} of {row.goal}")
    return good, lines


def check(folder: Path) -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    paths = sorted(folder.glob("ranks-*.json"))
    if not paths:
        print(f"context_parallel: no record in {folder}")
        return 1
    status = 0
    for path in paths:
        good, lines = verdict(json.loads(path.read_text()), source_hash())
        print("\n".join(lines))
        status |= not good
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (default 2)")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="ROW,...")
    parser.add_argument("--dry-run", action="store_true", help="print rows and predictions")
    parser.add_argument("--check", action="store_true", help="judge the records")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of tests/records/...")
    args = parser.parse_args(argv)
    if args.check:
        return check(RECORDS)
    if args.ranks < 2:
        parser.error("--ranks is 2 or more")
    if unknown := set(args.only or ()) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    rows = {name: row for name, row in ROWS.items() if args.only is None or name in args.only}
    if args.dry_run:
        dry_run(rows, args.ranks)
        return 0
    return record(rows, args.ranks, args.only is None, args.out)


if __name__ == "__main__":
    sys.exit(main())
