# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Walks at random over captures and replays on a GPU (tests/captures.py has the model).

For compute-sanitizer (tools/gpu_record.py runs it): replays that read memory which is gone, or that
share it with other work, are errors there even where they compute the right thing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from captures import Walk
from gpu_rig import GpuRig


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    walk = Walk(GpuRig(), args.seed)
    for _ in range(args.steps):
        walk.step()
    walk.finish()
    for name, count in sorted(walk.counts.items()):
        print(f"ran {name} x{count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
