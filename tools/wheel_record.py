# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps what tools/wheel_proof.sh found of wheels, tests/records/wheel.json, and judges it.

    python tools/wheel_record.py --check

The hash covers what decides how wheels are built and found whole; engine and kernels have tests of
their own, which run everywhere.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import source_hash
from gpu_hash import ROOT

RECORD = ROOT / "tests" / "records" / "wheel.json"
NAMES = ("abi3", "arm64", "cp311")
SOURCES = (
    "CMakeLists.txt",
    "cmake/*",
    "cpp/bind/module.cpp",
    "cpp/cpu/dispatch.cpp",
    "tools/check_installed.py",
    "tools/check_wheel.py",
)
# Of pyproject.toml, which changes for other reasons too.
TABLES = re.compile(
    r"^\[+(?:build-system|tool\.scikit-build|tool\.cibuildwheel)\b[^\n]*\n(?:(?!\[).*\n)*",
    re.MULTILINE,
)
# Seconds of the import beyond NumPy, and of the first result, on a processor that is none of
# software's. pip's depend on the index's network.
LIMITS = {"import_flashbsr_s": 0.5, "first_attention_s": 1.0}
TESTS = re.compile(r"(\d+) passed")


def decisive_hash(root: Path) -> str:
    """Give 16 hex digits of what decides, less comments."""
    tables = "".join(TABLES.findall((root / "pyproject.toml").read_text()))
    text = source_hash(SOURCES, root) + re.sub(r"#[^\n]*", "", tables)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problems(entry: dict[str, Any]) -> list[str]:
    """Say what is wrong with what is kept of a wheel."""
    found = [
        f"{name} {entry[name]}; expected {limit} at most"
        for name, limit in LIMITS.items()
        if entry[name] > limit and not entry["emulated"]
    ]
    if re.search("failed|error", entry["tests"]) or not TESTS.search(entry["tests"]):
        found.append(f"tests: {entry['tests']}")
    if entry["source_hash"] != decisive_hash(ROOT):
        found.append("STALE")
    return found


def check(path: Path) -> int:
    """Print a line for each wheel; 0 only if all are there, good and current."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    status = 0
    for name in NAMES:
        wrong = problems(kept[name]) if name in kept else ["MISSING"]
        said = ", ".join(wrong) if wrong else kept[name]["tests"]
        print(f"{name}: {said}" + (f" ({kept[name]['date']})" if name in kept else ""))
        status |= bool(wrong)
    return status


def keep(args: argparse.Namespace) -> int:
    """Note a wheel; those of other Pythons stay."""
    content = args.wheel.read_bytes()
    lines = args.tests.read_text().strip().splitlines()
    entry = {
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "source_hash": decisive_hash(args.root),
        "wheel": args.wheel.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "install_s": round(args.install_seconds, 1),
        "emulated": args.emulated,
        **json.loads(args.found.read_text()),
        "tests": lines[-1].strip("= "),
    }
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    kept[args.name] = entry
    args.out.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    wrong = problems(entry)
    print(f"record: {args.out}", *wrong, sep="\n")
    return 1 if wrong else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="judge the record")
    parser.add_argument("--out", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--name", choices=NAMES)
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that it was built from")
    parser.add_argument("--wheel", type=Path, help="the file that was installed")
    parser.add_argument("--install-seconds", type=float, help="what pip took for it")
    parser.add_argument("--found", type=Path, help="what tools/check_installed.py wrote")
    parser.add_argument("--tests", type=Path, help="what pytest printed")
    parser.add_argument("--emulated", action="store_true", help="by a processor of software")
    args = parser.parse_args(argv)
    if args.check:
        return check(args.out)
    if not all((args.name, args.wheel, args.install_seconds, args.found, args.tests)):
        parser.error("--check, or all of --name, --wheel, --install-seconds, --found, --tests")
    return keep(args)


if __name__ == "__main__":
    sys.exit(main())
