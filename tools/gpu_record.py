# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs what needs a GPU and keeps the outcome as a record, tests/records/<device>.json.

    python tools/gpu_record.py                              every step
    python tools/gpu_record.py --only tests --limit 300     one step, at most so many seconds
    python tools/gpu_record.py --only bench,sanitize --merge   more steps into the same record
    python tools/gpu_record.py --check                      no GPU: is the record good and current?

Steps: ``tests`` (pytest, every test of the device), ``bench`` (`flashbsr bench --device cuda`, also
into benchmarks/results, or beside ``--out``), ``first`` (the first decode of a process),
``consumer`` (an own kernel, compiled by nvcc and run), ``captures`` (memcheck and racecheck over a
random walk of captures and replays), and compute-sanitizer over a small case of every kernel:
``memcheck``, ``racecheck``, ``initcheck``, ``synccheck``, together ``sanitize``. A step that ran
out of time, or could not run, is a failure.
The record keeps the hash of the sources (gpu_hash.py says of what) with every step: --merge drops
steps of other sources, --check names them. Missed performance goals are reported, not failed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_steps
from gpu_hash import ROOT, source_hash

SCHEMA = 1
RECORDS = ROOT / "tests" / "records"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
STEPS = ("tests", "bench", "first", "consumer", "captures", *SANITIZERS)

Step = Callable[[float, int], dict[str, Any]]


def parse_steps(text: str) -> list[str]:
    """Split names at commas; ``sanitize`` is four of them."""
    names: list[str] = []
    for name in text.split(","):
        group = SANITIZERS if name == "sanitize" else STEPS if name == "all" else (name,)
        if not set(group) <= set(STEPS):
            raise argparse.ArgumentTypeError(f"got {name!r}; expected {', '.join(STEPS)}, sanitize")
        names += [step for step in group if step not in names]
    return names


def runner(name: str, bench_files: tuple[Path, Path]) -> Step:
    """Give what carries out a step."""
    if name in SANITIZERS:
        return lambda limit, _: gpu_steps.sanitize(name, limit)
    if name == "bench":
        return lambda limit, _: gpu_steps.bench(limit, *bench_files)
    return {
        "tests": gpu_steps.tests,
        "first": lambda limit, _: gpu_steps.first(limit),
        "consumer": lambda limit, _: gpu_steps.consumer(limit),
        "captures": lambda limit, _: gpu_steps.captures(limit),
    }[name]


def run_step(name: str, step: Step, limit: float, jobs: int) -> dict[str, Any]:
    """Run a step; its outcome with when, how long, which sources. Being unable is one, too."""
    started = time.monotonic()
    try:
        outcome = step(limit, jobs)
    except (gpu_steps.StepError, OSError) as error:
        outcome = {"ok": False, "problem": str(error)}
    print(f"{name}: {'ok' if outcome['ok'] else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return {
        **outcome,
        "seconds": round(time.monotonic() - started, 1),
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "source_hash": source_hash(),
    }


def record(args: argparse.Namespace) -> int:
    """Run the chosen steps and write the record."""
    device = gpu_steps.describe_device()
    path = args.out or RECORDS / f"{gpu_steps.slug(device['name'])}.json"
    content: dict[str, Any] = {"schema": SCHEMA, "steps": {}}
    if args.merge and path.exists():
        content = json.loads(path.read_text())
        kept = {k: v for k, v in content["steps"].items() if v["source_hash"] == source_hash()}
        content["steps"] = kept
    content |= {"device": device}
    results = path.with_name(f"{path.stem}-bench")
    if not args.out:
        results = ROOT / "benchmarks" / "results" / path.stem
    files = results.with_suffix(".json"), results.with_suffix(".png")
    steps = {name: runner(name, files) for name in args.only}
    # Sanitizers run side by side: they wait for the host, not for the GPU. Nothing else may: bench
    # measures, and a test asks how much memory is free.
    together = [name for name in steps if name in ("captures", *SANITIZERS)]
    for name in steps:
        if name not in together:
            content["steps"][name] = run_step(name, steps[name], args.limit, args.jobs)
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        found = {
            name: pool.submit(run_step, name, steps[name], args.limit, args.jobs)
            for name in together
        }
        content["steps"] |= {name: outcome.result() for name, outcome in found.items()}
    content["steps"] = {name: content["steps"][name] for name in STEPS if name in content["steps"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"record: {path}")
    print("\n".join(verdict(content)[1]))
    return 0 if all(content["steps"][name]["ok"] for name in args.only) else 1


def verdict(content: dict[str, Any], current: str | None = None) -> tuple[bool, list[str]]:
    """Judge a record: complete, good, of the `current` sources? And what to say of it."""
    current = source_hash() if current is None else current
    device, steps = content["device"], content["steps"]
    lines = [f"{device['name']}, driver {device['driver']}"]
    good = True
    for name in STEPS:
        step = steps.get(name)
        if step is None:
            good, said = False, "MISSING"
        else:
            stale = step["source_hash"] != current
            good &= step["ok"] and not stale
            said = ("ok" if step["ok"] else "FAILED") + (", STALE" if stale else "")
            said += f", {gpu_steps.summary(step)} ({step['date'][:10]})"
        lines.append(f"  {name:<10} {said}")
        lines += [f"    {text}" for text in (step or {}).get("failures", [])]
        if step and "problem" in step:
            lines.append(f"    {step['problem']}")
    missed = steps.get("bench", {}).get("missed", [])
    lines += [f"    goal missed: {text}" for text in missed]
    return good, lines


def check() -> int:
    """Print the verdict on every record; 0 only if there is one and all are good and current."""
    others = ("engines-", "ranks-", "sglang-", "transformers-", "vllm-", "wheel")
    paths = sorted(p for p in RECORDS.glob("*.json") if not p.name.startswith(others))
    if not paths:
        print("gpu_record: no record in tests/records")
        return 1
    status = 0
    for path in paths:
        good, lines = verdict(json.loads(path.read_text()))
        print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}: ", end="")
        print("\n".join(lines))
        status |= not good
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="judge the records; needs no GPU")
    parser.add_argument(
        "--only", type=parse_steps, default=list(STEPS), metavar="STEP,...", help="default: all"
    )
    parser.add_argument("--merge", action="store_true", help="keep the record's other steps")
    parser.add_argument(
        "--limit", type=float, default=1800, metavar="SECONDS", help="of each step (default 1800)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="test processes (default: the cores)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of tests/records/...")
    args = parser.parse_args(argv)
    return check() if args.check else record(args)


if __name__ == "__main__":
    sys.exit(main())
