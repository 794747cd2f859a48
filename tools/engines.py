# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs serving engines over flashbsr and keeps the outcome, tests/records/engines-*.json.

    python tools/engines.py --engine vllm              with this Python's vLLM; others' stay
    python tools/engines.py --engine vllm --only fp8   some cases, nothing is written
    python tools/engines.py --engine vllm_gpu --jobs 16  on GPUs, with so many cases at once
    python tools/engines.py --check                    no engine needed: are the records good?

CI has no engines, so this is run when an integration changes. Of each engine a module beside this
file, ``engines_<name>.py``, has the cases: small models of random weights, which generate with the
engine's own attention and with flashbsr's, and must choose the same tokens. It gives

- ``VERSIONS``: those that the record must have,
- ``SOURCES``: patterns of the files that decide (kernels have tests of their own),
- ``version()`` and ``packages()``: of this Python,
- ``CASES``: names, and functions that give a dict with ``ok``,
- ``PLACE``: of its record's name; "cpu" where it says nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpu_hash import ROOT, significant

SCHEMA = 1
RECORDS = ROOT / "tests" / "records"
TOOLS = Path(__file__).resolve().parent


def engines() -> list[str]:
    """Names of the engines that have a module here."""
    return sorted(p.stem.removeprefix("engines_") for p in TOOLS.glob("engines_*.py"))


def record_of(module: Any) -> Path:
    """Name the file that keeps what an engine's cases found."""
    return RECORDS / f"engines-{getattr(module, 'PLACE', 'cpu')}.json"


def source_hash(patterns: Sequence[str], root: Path = ROOT) -> str:
    """Give 16 hex digits over names and significant contents; comments do not count."""
    files = sorted({p for pattern in patterns for p in root.glob(pattern) if p.is_file()})
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\0{significant(path)}\0".encode())
    return digest.hexdigest()[:16]


def run_case(name: str, case: Any) -> dict[str, Any]:
    """Run a case; being unable to is an outcome, too."""
    started = time.monotonic()
    try:
        outcome = dict(case())
    except Exception as error:  # an engine raises what it likes, and the other cases can run
        outcome = {"ok": False, "problem": f"{type(error).__name__}: {error}"[-2000:]}
    said = "ok" if outcome["ok"] else "FAILED"
    print(f"{name}: {said} in {time.monotonic() - started:.0f} s", flush=True)
    if not outcome["ok"]:
        print(json.dumps(outcome, indent=1))
    return outcome


def record(engine: str, only: list[str] | None, out: Path | None, jobs: int) -> int:
    """Run an engine's cases, and unless some were chosen keep the outcome."""
    module = importlib.import_module(f"engines_{engine}")
    path = out or record_of(module)
    names = only or list(module.CASES)
    if unknown := set(names) - set(module.CASES):
        raise SystemExit(f"no case {', '.join(unknown)}; there are {', '.join(module.CASES)}")
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(jobs) as pool:  # cases wait for processes
        running = {pool.submit(run_case, name, module.CASES[name]): name for name in names}
        for done in as_completed(running):
            found[running[done]] = done.result()
            if only is None:  # at once: what comes later may never end
                keep(engine, module, found, path)
    if only is None:
        print(f"record: {path}")
    return 0 if all(outcome["ok"] for outcome in found.values()) else 1


def keep(engine: str, module: Any, found: dict[str, Any], path: Path) -> None:
    """Write what this Python's engine has found so far; other engines and versions stay."""
    content = {"schema": SCHEMA, "engines": {}}
    if path.exists():
        content = json.loads(path.read_text())
    content["engines"].setdefault(engine, {})[module.version()] = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "source_hash": source_hash(module.SOURCES),
        "packages": module.packages(),
        "cases": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def verdict(engine: str, kept: dict[str, Any], module: Any) -> tuple[bool, list[str]]:
    """Judge what is kept of an engine: every version and case, good, and of these sources."""
    good, lines = True, []
    for version in module.VERSIONS:
        entry = kept.get(version)
        if entry is None:
            good = False
            lines.append(f"{engine} {version}: MISSING")
            continue
        stale = entry["source_hash"] != source_hash(module.SOURCES)
        missing = sorted(set(module.CASES) - set(entry["cases"]))
        failed = [name for name, outcome in entry["cases"].items() if not outcome["ok"]]
        good &= not (stale or missing or failed)
        said = [f"{len(entry['cases']) - len(failed)} of {len(module.CASES)} cases ok"]
        said += ["STALE"] * stale + [f"FAILED {', '.join(failed)}"] * bool(failed)
        said += [f"MISSING {', '.join(missing)}"] * bool(missing)
        lines.append(f"{engine} {version}: {', '.join(said)} ({entry['date'][:10]})")
    return good, lines


def check(out: Path | None, names: list[str]) -> int:
    """Print the verdict on every engine; 0 only if all are good and current."""
    status = 0
    for engine in names:
        module = importlib.import_module(f"engines_{engine}")
        path = out or record_of(module)
        content = json.loads(path.read_text()) if path.exists() else {"engines": {}}
        good, lines = verdict(engine, content["engines"].get(engine, {}), module)
        print("\n".join(lines))
        status |= not good
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=engines(), help="which; --check: default all")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="CASE,...")
    parser.add_argument("--check", action="store_true", help="judge the record")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at once")
    parser.add_argument("--out", type=Path, metavar="FILE", help="another record")
    args = parser.parse_args(argv)
    if args.check:
        return check(args.out, [args.engine] if args.engine else engines())
    if not args.engine:
        parser.error(f"--engine is one of {', '.join(engines())}")
    return record(args.engine, args.only, args.out, args.jobs)


if __name__ == "__main__":
    sys.exit(main())
