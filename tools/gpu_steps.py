# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The steps of tools/gpu_record.py: each runs a program and reads its outcome."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_hash import ROOT

# Side by side: they wait for the host.
SANITIZER_PARTS = {"racecheck": 5}
OTHER_PARTS = 3
# Of every process where several run: each would take all cores for what torch and NumPy compute.
# With threads racecheck took 296 s and the others 209 (12 processes on 16 cores), so 104 and 50.
FEW_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
FIRST_DECODE = 0.5  # seconds behind the import
KEPT_FAILURES = 40
KEPT_LINES = 30


class StepError(RuntimeError):
    """A step that could not run to its end."""


def run(
    command: list[str], limit: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` in the tree for at most `limit` seconds; output and errors together."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its own processes end with it
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        failed = [line for line in said.splitlines() if re.search(r"\] (FAILED|ERROR) ", line)]
        raise StepError(
            "\n".join([f"ran out of {limit:.0f} s: {' '.join(command[:6])} ...",
                       *failed[:KEPT_FAILURES], tail(said, 5)])
        ) from None  # fmt: skip
    return subprocess.CompletedProcess(command, process.returncode, said)


def tail(text: str, lines: int = KEPT_LINES) -> str:
    """Keep the last lines."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def slug(name: str) -> str:
    """``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def describe_device() -> dict[str, Any]:
    """Ask the driver's own tool for name, capability and driver of the first GPU."""
    if shutil.which("nvidia-smi") is None:
        raise SystemExit("gpu_record: no nvidia-smi: recording needs a GPU (--check does not)")
    query = "name,compute_cap,driver_version,memory.total"
    done = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], 60)
    if done.returncode:
        raise SystemExit(f"gpu_record: nvidia-smi failed: {tail(done.stdout, 3)}")
    name, capability, driver, memory = (
        cell.strip() for cell in done.stdout.splitlines()[0].split(",")
    )
    return {"name": name, "compute_capability": capability, "driver": driver, "memory": memory}


def summary(step: dict[str, Any]) -> str:
    """Say in a few words what a step found."""
    if "counts" in step:
        return ", ".join(f"{n} {what}" for what, n in step["counts"].items() if n) or "nothing ran"
    if "kernels" in step:
        return f"{step['errors']} errors over {len(step['kernels'])} kernels"
    if "figures" in step:
        return f"{len(step['figures'])} workloads, {len(step['missed'])} goals missed"
    return step.get("output", "did not run")


def tests(limit: float, jobs: int) -> dict[str, Any]:
    """Run every test whose name says that it is of the CUDA device."""
    # A line for each test: what failed is known if time runs out.
    command = [sys.executable, "-m", "pytest", "tests", "-v", "-k", "cuda and not fake_cuda"]
    # What the machine's frameworks warn of is no matter of ours; a signal does not reach a process
    # that waits for a kernel.
    command += ["-W", "default", "--timeout", "120", "--timeout-method", "thread"]
    command += ["-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        # Whoever is done takes over: the last of a file of slow tests stood in one queue.
        command += ["-n", str(jobs or os.cpu_count() or 1), "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = run(
            [*command, f"--junitxml={report}"], limit, {"FLASHBSR_TEST_CUDA": "1", **FEW_THREADS}
        )
        if not report.exists():
            raise StepError(f"pytest wrote no report:\n{tail(done.stdout)}")
        return read_junit(report.read_text())


def read_junit(text: str) -> dict[str, Any]:
    """Count a JUnit report and name what failed."""
    counts = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}
    failures = []
    for case in ET.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        found = next(
            (name for tag, name in (("error", "errors"), ("failure", "failed"), ("skipped",) * 2)
             if tag in kinds),
            "passed",
        )  # fmt: skip
        counts[found] += 1
        if found in ("failed", "errors"):
            failures.append(f"{case.get('classname')}.{case.get('name')}")
    ok = not counts["failed"] and not counts["errors"] and counts["passed"] > 0
    return {"ok": ok, "counts": counts, "failures": failures[:KEPT_FAILURES]}


def bench(limit: float, results: Path, plot: Path) -> dict[str, Any]:
    """Run the named workloads; full result and plot go to benchmarks/results."""
    results.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "flashbsr", "bench", "--device", "cuda"]
    done = run([*command, "--json", str(results), "--plot", str(plot)], limit)
    if done.returncode:
        raise StepError(f"flashbsr bench failed:\n{tail(done.stdout)}")
    print(done.stdout)
    return read_bench(json.loads(results.read_text()))


def read_bench(content: dict[str, Any]) -> dict[str, Any]:
    """Take the figures, the goals that were missed, and what was not run."""
    missed = [
        f"{r['name']}: {goal['metric']} {r['metrics'][goal['metric']]:.4g}, "
        f"goal {'>=' if 'at_least' in goal else '<='} {goal.get('at_least', goal.get('at_most'))}"
        for r in content["results"]
        for goal in r["goals"]
        if not goal["met"]
    ]
    missed += [f"{r['name']}: {r['note']}" for r in content["results"] if not r["metrics"]]
    limits = {k: v for k, v in content["limits"].items() if not isinstance(v, list)}
    figures = {r["name"]: r["metrics"] for r in content["results"]}
    return {"ok": True, "limits": limits, "figures": figures, "missed": missed}


def sanitize(tool: str, limit: float) -> dict[str, Any]:
    """Run one tool of compute-sanitizer over a small case of every kernel, parts side by side."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise StepError("compute-sanitizer is not installed")
    script = ROOT / "tools" / "sanitizer_cases.py"
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    # One allocation per tensor: inside a pool nothing is out of bounds.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1", **FEW_THREADS}
    parts = SANITIZER_PARTS.get(tool, OTHER_PARTS)

    def run_part(i: int) -> dict[str, Any]:
        part = ["--part", f"{i}/{parts}"]
        done = run([*command, sys.executable, str(script), *part], limit, environment)
        return read_sanitizer(done.stdout, done.returncode)

    with ThreadPoolExecutor(parts) as pool:
        return join_parts(list(pool.map(run_part, range(parts))))


def captures(limit: float) -> dict[str, Any]:
    """Run memcheck and racecheck over a random walk of captures and replays."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise StepError("compute-sanitizer is not installed")
    script = str(ROOT / "tools" / "capture_walk.py")

    def run_tool(tool: str) -> dict[str, Any]:
        command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        done = run([*command, sys.executable, script], limit, FEW_THREADS)
        return read_sanitizer(done.stdout, done.returncode)

    with ThreadPoolExecutor(2) as pool:
        return join_parts(list(pool.map(run_tool, ("memcheck", "racecheck"))))


def join_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Make one outcome of the sanitizer's parts."""
    outcome: dict[str, Any] = {
        "ok": all(part["ok"] for part in parts),
        "errors": sum(part["errors"] for part in parts),
        "kernels": sorted(name for part in parts for name in part["kernels"]),
    }
    if failures := [text for part in parts for text in part.get("failures", [])]:
        outcome["failures"] = failures[:KEPT_FAILURES]
    if problems := [part["problem"] for part in parts if "problem" in part]:
        outcome["problem"] = problems[0]
    return outcome


def read_sanitizer(text: str, status: int) -> dict[str, Any]:
    """Take the errors that the tool counted and the kernels that ran under it."""
    kernels = re.findall(r"^ran (\S+)", text, re.MULTILINE)
    counted = re.search(r"ERROR SUMMARY: (\d+) error", text)
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazard", text)
    found = counted or hazards
    if found is None:
        raise StepError(f"compute-sanitizer gave no summary (status {status}):\n{tail(text)}")
    missing = re.findall(r"^not run: (.+)", text, re.MULTILINE)
    errors = int(found[1])
    outcome: dict[str, Any] = {
        "ok": errors == 0 and status == 0 and not missing and bool(kernels),
        "errors": errors,
        "kernels": kernels,
    }
    if not outcome["ok"]:
        said = [line for line in text.splitlines() if line.startswith("=========")]
        outcome["failures"] = [f"not run: {name}" for name in missing]
        outcome["failures"] += [line.removeprefix("========= ") for line in said[:KEPT_LINES]]
        if status and not errors:
            outcome["problem"] = tail(text, 8)
    return outcome


def consumer(limit: float) -> dict[str, Any]:
    """Compile the C++ example's kernels for this GPU and run them; it checks its results itself."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise StepError("nvcc is not installed")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "consumer")
        source = str(ROOT / "examples" / "cpp" / "gpu.cu")
        command = [nvcc, "-std=c++20", "-O3", "-arch=native", f"-I{ROOT / 'include'}", source]
        done = run([*command, "-o", program], limit)
        if done.returncode:
            raise StepError(f"nvcc failed:\n{tail(done.stdout)}")
        done = run([program], limit)
    return {
        "ok": done.returncode == 0 and "ok" in done.stdout and "WRONG" not in done.stdout,
        "output": tail(done.stdout, 3),
    }


def first(limit: float) -> dict[str, Any]:
    """Import and decode once, in three processes; the middle one counts."""
    command = [sys.executable, str(ROOT / "tools" / "first_decode.py")]
    found = []
    for _ in range(3):
        done = run(command, limit)
        if done.returncode:
            raise StepError(f"first_decode failed:\n{tail(done.stdout)}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    middle = sorted(found, key=lambda x: float(x["first_decode_s"]))[1]
    said = f"import {middle['import_s']:.3f} s, then {middle['first_decode_s']:.3f} s"
    return {"ok": middle["first_decode_s"] <= FIRST_DECODE, "runs": found, "output": said}
