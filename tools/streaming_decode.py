# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Streaming-LLM decode: RoPE fused into attention against rotating the cache and attending after.

    python tools/streaming_decode.py                    # a GPU, bfloat16, in CUDA graphs
    python tools/streaming_decode.py --device cpu       # float32
    python tools/streaming_decode.py --backend fa3      # other kernels for the fused side

Positions count inside the cache (examples/variants/streaming.py), so a step turns every key anew.
Both sides have the same ring of pages. The side in two steps rotates the queries and all pages of K
into an array as large, by `apply_rope_pos_ids`, and attends over that and V without a copy of V: as
few bytes as it can be. Before anything is timed the sides are compared.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashbsr
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from variants.streaming import streaming, streaming_table

PAGE_SIZE, DIM, SINK_PAGES = 16, 128, 1
CACHE_BYTES = 1 << 29  # of K and V of all sets: none is in a cache when its turn comes
# Requests, recent tokens, query and KV heads. 32 heads of each are those of the paper's models.
PROBLEMS = {
    "cuda": [
        (requests, recent, heads)
        for heads in ((32, 32), (32, 8))
        for requests, recent in ((1, 1008), (1, 4080), (16, 1008), (16, 4080))
    ],
    "cpu": [(1, 1008, (32, 32)), (1, 1008, (32, 8)), (8, 1008, (32, 8))],
}


@dataclass
class Arrays:
    """One set: queries, pages of K and V."""

    q: Any
    k: Any
    v: Any


def positions_of(indptr: np.ndarray, indices: np.ndarray, pages: int) -> np.ndarray:
    """Position inside the cache of every slot of every page."""
    positions = np.zeros((pages, PAGE_SIZE), np.int32)
    for begin, end in itertools.pairwise(indptr):
        first = PAGE_SIZE * np.arange(end - begin)[:, None]
        positions[indices[begin:end]] = first + np.arange(PAGE_SIZE)
    return positions.reshape(-1)


class Problem:
    """Both sides of one problem."""

    def __init__(self, requests: int, recent: int, heads: tuple[int, int], args: Any) -> None:
        how = {"sink_pages": SINK_PAGES, "recent_pages": recent // PAGE_SIZE}
        self.pages = requests * sum(how.values())
        self.heads, self.requests = heads, requests
        # Somewhere in the ring, the newest page half full.
        lengths = [3 * recent + 40 * b + PAGE_SIZE // 2 for b in range(requests)]
        indptr, indices, last = streaming_table(lengths, PAGE_SIZE, **how)
        self.tokens = PAGE_SIZE * (np.diff(indptr) - 1) + last
        positions = positions_of(indptr, indices, self.pages)
        where = {"device": 0 if args.device == "cuda" else None}
        self.fused, self.plain = (
            flashbsr.Attention(spec, flashbsr.TaskInfo(*heads, DIM, backend=backend, **where))
            for spec, backend in (
                (streaming(), args.backend),
                (flashbsr.AttentionSpec(causal=True), args.device),
            )
        )
        for attention in (self.fused, self.plain):
            attention.plan(
                flashbsr.Paged(None, indptr, indices, last_page_len=last, page_size=PAGE_SIZE)
            )
        put = array_maker(args.device)
        self.positions, self.newest = put(positions), put((self.tokens - 1).astype(np.int32))
        count = max(1, CACHE_BYTES // self.kv_bytes(self.pages * PAGE_SIZE, args.device))
        self.sets = [self.make(put, seed) for seed in range(count)]

    def kv_bytes(self, tokens: int, device: str) -> int:
        """Of K and V of so many tokens."""
        return 2 * (4 if device == "cpu" else 2) * tokens * self.heads[1] * DIM

    def make(self, put: Callable[[np.ndarray], Any], seed: int) -> Arrays:
        """Make a set."""
        rng = np.random.default_rng(seed)
        shape = (self.pages, PAGE_SIZE, self.heads[1], DIM)
        q = rng.standard_normal((self.requests, self.heads[0], DIM), np.float32)
        return Arrays(put(q), *(put(rng.standard_normal(shape, np.float32)) for _ in range(2)))

    def run_fused(self, index: int) -> Any:
        """Attend over the cache as it is."""
        x = self.sets[index % len(self.sets)]
        return self.fused.run(x.q, (x.k, x.v))

    def run_apart(self, index: int) -> Any:
        """Rotate all of it, then attend."""
        x = self.sets[index % len(self.sets)]
        q, _ = flashbsr.apply_rope_pos_ids(x.q, x.q[:, :0], self.newest)
        rows = x.k.reshape(-1, *x.k.shape[2:])
        k, _ = flashbsr.apply_rope_pos_ids(rows, rows[:, :0], self.positions)
        return self.plain.run(q, (k.reshape(x.k.shape), x.v))


def array_maker(device: str) -> Callable[[np.ndarray], Any]:
    if device == "cpu":
        return np.asarray
    import torch

    def put(x: np.ndarray) -> Any:
        on_gpu = torch.from_numpy(x).cuda()
        return on_gpu.to(torch.bfloat16) if x.dtype == np.float32 else on_gpu

    return put


def compare(problem: Problem, device: str) -> None:
    """Raise unless both sides say the same: rotated keys are rounded once more apart."""
    host = (lambda x: x) if device == "cpu" else (lambda x: x.float().cpu().numpy())
    a, b = host(problem.run_fused(0)), host(problem.run_apart(0))
    off = np.abs(a - b).max() / np.abs(b).max()
    if not off < (1e-4 if device == "cpu" else 0.03):
        raise SystemExit(f"streaming_decode: the sides differ by {off:.3g} of the largest output")


def time_sides(problem: Problem, device: str) -> list[float]:
    """Seconds of a step: fused, apart."""
    calls = problem.run_fused, problem.run_apart
    if device == "cpu":
        from flashbsr.bench.timing import Budget, Side, interleave

        sides = {call.__name__: Side(call) for call in calls}
        timed = interleave(sides, Budget(1.0, 5, 15))
        return [timed[name].median for name in sides]
    import torch
    from flashbsr.bench.cuda_timing import Clock, measure

    clock = Clock(torch)
    return [measure(clock, call, len(problem.sets)).median for call in calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--backend", help="of the fused side; default: the device's choice")
    args = parser.parse_args()
    args.backend = args.backend or args.device
    print("| requests | tokens | heads | fused, us | apart, us | ratio | GB/s, fused | kernel |")
    print("|---|---|---|---|---|---|---|---|")
    for requests, recent, heads in PROBLEMS[args.device]:
        problem = Problem(requests, recent, heads, args)
        compare(problem, args.device)
        fused, apart = time_sides(problem, args.device)
        read = problem.kv_bytes(int(problem.tokens.sum()), args.device)
        kernel = problem.fused._engine.kernel_name() or "cpu"
        print(
            f"| {requests} | {problem.tokens[0]} | {heads[0]}/{heads[1]} | {fused * 1e6:.1f} | "
            f"{apart * 1e6:.1f} | {apart / fused:.2f} | {read / fused * 1e-9:.0f} | {kernel} |",
            flush=True,
        )
        del problem
    return 0


if __name__ == "__main__":
    sys.exit(main())
