# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the flashbsr that is installed is whole: its SIMD level, its kernels, a first result.

    python tools/check_installed.py --kernels

Fails where the CPU has a SIMD level that the build does not use, which is four times slower and
says nothing, and with ``--kernels`` where the build has no CUDA kernels. ``--json FILE`` writes
what was found, with the seconds of imports and of the first attention.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

LEVELS = {
    "avx2": {"avx", "avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512_amx": {"amx_tile", "amx_int8"},
}
KERNELS = 150  # of cpp/instances.txt, at least


def best_level() -> str:
    """Name the highest SIMD level of this CPU, by what Linux says of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    best = "baseline"
    for level, needed in LEVELS.items():
        if not needed <= flags:
            break
        best = level
    return best


def first_attention() -> None:
    """Two requests of 40 tokens."""
    import flashbsr
    import numpy as np

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 8, 64), dtype=np.float32)
    out = flashbsr.attention(q, k, v, causal=True)
    if out.shape != q.shape or not np.isfinite(out).all():
        raise SystemExit("the first attention is wrong")


def seconds(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return round(time.perf_counter() - begin, 3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernels", action="store_true", help="CUDA kernels must be there")
    parser.add_argument("--json", type=Path, help="write what was found")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "import_numpy_s": seconds(lambda: __import__("numpy")),
        "import_flashbsr_s": seconds(lambda: __import__("flashbsr")),
        "first_attention_s": seconds(first_attention),
    }
    from flashbsr.info import engine_info

    info = engine_info()
    found |= {"isa": info["isa"], "cuda_kernels": len(info["cuda"]["kernels"])}
    problems = []
    if platform.machine() == "x86_64" and info["isas"][-1] != best_level():
        problems.append(
            f"SIMD level {info['isas'][-1]}; expected {best_level()}, which the CPU has"
        )
    if args.kernels and found["cuda_kernels"] < KERNELS:
        problems.append(f"{found['cuda_kernels']} CUDA kernels; expected {KERNELS} or more")
    print(" ".join(f"{name}={value}" for name, value in found.items()))
    for problem in problems:
        print(problem)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
