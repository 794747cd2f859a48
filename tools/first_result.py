# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""How long a new variant takes from its text to its first result.

``python tools/first_result.py`` on a machine with a GPU: processes with an empty cache, with a full
one, and with the built-in kernel; the variants and shapes of ``variant_times.py``, which says how
fast they run then. The clock starts with frameworks imported and a context on the GPU, and stops
when the result is there. Of the time with an empty cache one column says what the compiler took,
and what of that its front end, its optimiser and its assembler did. ``--device cpu`` measures the
CPU.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = {"Frontend": "front end", "Optimizer": "optimiser", "PTX": "assembler"}


def child(what: str, name: str, device: str, phases: str) -> None:
    """One process: print its times and its kernel as JSON."""
    import flashbsr
    import numpy as np
    import torch
    from variant_times import SHAPES, arrays, attention_of

    requests, q_len, kv_len = shape = SHAPES[device][name]
    q, k, v = arrays(torch, shape, device)
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.empty_like(q)
    wait()
    seconds = timed_compiler(phases) if phases else []
    qo, kv = (np.arange(requests + 1) * n for n in (q_len, kv_len))

    begin = time.perf_counter()
    attention, values = attention_of(what, causal=q_len > 1)
    attention.settle(q)
    attention.plan(flashbsr.Ragged(qo if q_len > 1 else None, kv))
    attention.run(q, (k, v), **values)
    wait()
    first = time.perf_counter() - begin
    print(json.dumps([first, sum(seconds), phase_times(phases), attention._engine.kernel_name()]))


def timed_compiler(phases: str) -> list[float]:
    """Let every NVRTC compilation of this process add its seconds here, its phases to a file."""
    from flashbsr.jit.nvrtc import Nvrtc

    seconds: list[float] = []
    plain = Nvrtc.try_compile

    def compile_timed(
        self: Nvrtc,
        source: str,
        name: str,
        target: str,
        include: Path,
        options: Sequence[str] = (),
    ) -> tuple[bytes | None, str]:
        if self.version >= (13, 0):
            options = [*options, f"--time={phases}"]
        begin = time.perf_counter()
        result = plain(self, source, name, target, include, options)
        seconds.append(time.perf_counter() - begin)
        return result

    Nvrtc.try_compile = compile_timed  # type: ignore[method-assign, assignment]
    return seconds


def phase_times(path: str) -> dict[str, float]:
    """Seconds by phase of what NVRTC wrote: file, phase, number, unit."""
    found: dict[str, float] = {}
    lines = Path(path).read_text().splitlines() if path and Path(path).exists() else []
    for line in lines[1:]:
        *_, phase, number, _unit = (part.strip() for part in line.split(","))
        for word, short in PHASES.items():
            if word in phase:
                found[short] = found.get(short, 0.0) + float(number) * 1e-3
    return found


def measure(
    what: str, name: str, device: str, folder: str, phases: str = ""
) -> tuple[float, float, Any, str]:
    """Seconds to the first result, of the compiler, by its phases, and the kernel's name."""
    environment = {
        **os.environ,
        "FLASHBSR_CACHE_DIR": folder,
        "FLASHBSR_QUIET": "1",
        # NVRTC has a cache of its own, which would make every text but the first an old one.
        "CUDA_CACHE_DISABLE": "1",
    }
    arguments = [what, name, device, phases]
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(arguments)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    first, compiler, by_phase, kernel = json.loads(done.stdout)
    return first, compiler, by_phase, kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", nargs="+", help="of variant_times.py; all unless said")
    parser.add_argument("--times", type=int, default=3, help="processes of each; medians")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*json.loads(args.child))
        return 0
    import flashbsr
    from variant_times import SHAPES, VARIANTS

    # As installers do: without it every process compiles our modules anew, 12 ms of them the JIT's.
    compileall.compile_dir(str(Path(flashbsr.__file__).parent), quiet=1)
    print("| shape | variant | new, s | of that NVRTC | cached, ms | built in, ms | kernel |")
    print("|---|---|---|---|---|---|---|")
    for shape in args.shapes or SHAPES[args.device]:
        with tempfile.TemporaryDirectory() as none:
            plain = [measure("plain", shape, args.device, none) for _ in range(args.times)]
        for what in VARIANTS:
            new, cached = [], []
            for _ in range(args.times):
                with tempfile.TemporaryDirectory() as folder:
                    phases = str(Path(folder, "phases.csv"))
                    new.append(measure(what, shape, args.device, folder, phases))
                    cached.append(measure(what, shape, args.device, folder))
            first, again, built_in = (
                statistics.median(seconds for seconds, *_ in x) for x in (new, cached, plain)
            )
            compiler = statistics.median(seconds for _, seconds, *_ in new)
            parts = [f"{name} {seconds:.2f}" for name, seconds in new[-1][2].items()]
            print(
                f"| {shape} | {what} | {first:.2f} | {compiler:.2f} ({', '.join(parts)}) | "
                f"{again * 1e3:.0f} | {built_in * 1e3:.0f} | {cached[-1][3]} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
