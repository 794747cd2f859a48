# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Measures random batches on a GPU beside what plans predict, and fits the model's costs.

    python tools/plan_model.py                     200 batches: how far off is the price, and is
                                                   another cut or another tile faster?
    python tools/plan_model.py --batches 40 --seed 7
    python tools/plan_model.py --write FOLDER      keeps plan-model-<device>.json and all runs there
    python tools/plan_model.py --runs FILE ...     what this build's prices and plans would have
                                                   been beside runs that were kept

The last one times nothing, so a driver that only says it is the same GPU will do: the one of
tests/fake_cuda, built into a folder of LD_LIBRARY_PATH, with FAKE_CUDA_SMS=132. A plan that is
none of those that were timed counts for nothing there.

Costs are in include/flashbsr/plan/gpu.h. A line per kernel says which would have predicted these
times best: of an item, of 1000 KV tokens, of a part of a split tile, and of a launch. They are
found by giving the plan's items, in their order, to whichever worker is free, as claims do.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import flashbsr
import gpu_hash
import numpy as np
from flashbsr.bench.cuda_timing import Gpu, measure

PAGE = 16
POOL_BYTES = 12 << 30
L2_BYTES = 200 << 20
HEADS = ((32, 8), (32, 8), (28, 4), (64, 8), (16, 16), (40, 8), (8, 1), (64, 1))
LONGEST_US = 3000.0
NEAR = 0.12  # of the measured time that a price may be off
SLOWER = 0.08  # than the best of the alternatives
SHOWN = 25
FITTED, MOST_ITEMS = 40, 4000  # plans of a kernel, items of a plan: a fit takes seconds

#: What a caller could ask for instead. Tiles of 64 rows were the best of none of 276 batches.
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "whole": {"disable_split_kv": True},
    "fixed 2048": {"fixed_split_size": 2048},
    "fixed 8192": {"fixed_split_size": 8192},
    "128 rows": {"tile_rows": 128},
    "192 rows": {"tile_rows": 192},
}


@dataclass(frozen=True)
class Batch:
    """Requests over pages, causal; lengths in tokens."""

    kind: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int]

    @property
    def layout(self) -> flashbsr.Paged:
        """Pages one after the other."""
        pages = -(-np.array(self.kv_lens) // PAGE)
        indptr = np.concatenate([[0], np.cumsum(pages)])
        return flashbsr.Paged(
            np.concatenate([[0], np.cumsum(self.q_lens)]),
            indptr,
            np.arange(indptr[-1]),
            kv_lens=np.array(self.kv_lens),
            page_size=PAGE,
        )

    def __str__(self) -> str:
        q, kv = (sorted(x)[len(x) // 2] for x in (self.q_lens, self.kv_lens))
        return f"{self.kind} {len(self.q_lens)} x q{q} kv{kv} {self.heads[0]}/{self.heads[1]}"


@dataclass
class Run:
    """A plan, and the microseconds that it took."""

    name: str
    kernel: str
    us: float
    spread: float
    predicted: float
    workers: int  #: of wide items
    narrow: int  #: of narrow ones
    merges: int
    most_parts: int  #: of a merge
    policy: str
    items: list[tuple[int, int, bool]]  #: rows, KV tokens, split; in the order of claims


@dataclass
class Result:
    """A batch by its plan, and by what a caller could have asked for."""

    batch: Batch
    runs: list[Run]

    @property
    def plan(self) -> Run:
        """The plan of its own."""
        return self.runs[0]

    @property
    def best(self) -> Run:
        """The fastest."""
        return min(self.runs, key=lambda run: run.us)

    @property
    def off(self) -> float:
        """The price beside the time."""
        return self.plan.predicted / self.plan.us - 1

    @property
    def slower(self) -> float:
        """The plan beside the best that was tried."""
        return self.plan.us / self.best.us - 1


def random_batch(rng: np.random.Generator) -> Batch:
    """Decode, chunks of prompts, or both, as servers have them."""
    kind = str(rng.choice(["decode", "chunk", "mixed"], p=[0.4, 0.4, 0.2]))
    heads = HEADS[rng.integers(len(HEADS))]
    longest = int(np.exp(rng.uniform(np.log(512), np.log(65536))))
    q_lens: list[int] = []
    kv_lens: list[int] = []
    if kind != "decode":
        count = int(np.exp(rng.uniform(0, np.log(16))))
        equal = rng.random() < 0.5
        most = int(np.exp(rng.uniform(np.log(16), np.log(1024))))
        for _ in range(count):
            q = most if equal else int(rng.integers(1, most + 1))
            kv = longest if equal else int(rng.integers(1, longest + 1))
            q_lens.append(q)
            kv_lens.append(max(q, kv))
    if kind != "chunk":
        count = int(np.exp(rng.uniform(0, np.log(256))))
        equal = rng.random() < 0.3
        q_lens += [1] * count
        kv_lens += [longest if equal else int(rng.integers(1, longest + 1)) for _ in range(count)]
    return Batch(kind, tuple(q_lens), tuple(kv_lens), heads)


def batches(count: int, seed: int) -> Iterator[Batch]:
    """As many as fit the memory and take no longer than an engine's step."""
    rng = np.random.default_rng(seed)
    while count > 0:
        batch = random_batch(rng)
        kv_bytes = sum(batch.kv_lens) * batch.heads[1] * 512
        products = sum(
            4 * 128 * batch.heads[0] * q * kv
            for q, kv in zip(batch.q_lens, batch.kv_lens, strict=True)
        )
        if (
            kv_bytes * 2 > POOL_BYTES
            or products / 600e6 > LONGEST_US
            or kv_bytes / 4e6 > LONGEST_US
        ):
            continue
        count -= 1
        yield batch


class Bench:
    """Times plans over one pool of pages."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.gpu = Gpu(torch)
        self.pool = torch.randn(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda")

    def run(self, batch: Batch, name: str, **task: Any) -> Run:
        """Plan and time."""
        torch = self.torch
        q_heads, kv_heads = batch.heads
        attention = attention_for(batch, **task)
        pages = int(batch.layout.kv_indptr[-1])
        size = pages * 2 * PAGE * kv_heads * 128
        sets = max(1, min(len(self.pool) // size, math.ceil(L2_BYTES / (2 * size)) + 1))
        caches = [
            self.pool[i * size : (i + 1) * size].view(pages, 2, PAGE, kv_heads, 128)
            for i in range(sets)
        ]
        q = torch.randn(sum(batch.q_lens), q_heads, 128, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(q)
        samples = measure(self.gpu.clock, lambda i: attention.run(q, caches[i], out=out), sets)
        spread = max(samples.seconds) / min(samples.seconds) - 1
        return run_of(attention, name, samples.median * 1e6, spread)

    def try_run(self, batch: Batch, name: str, **task: Any) -> Run | None:
        """Do the same where there is a kernel."""
        try:
            return self.run(batch, name, **task)
        except flashbsr.UnsupportedError:
            return None

    def result(self, batch: Batch) -> Result:
        """Time a batch by its plan and by what a caller could have asked for."""
        runs = [self.run(batch, "the plan")]
        for name, task in ALTERNATIVES.items():
            if (run := self.try_run(batch, name, **task)) is not None:
                runs.append(run)
        again = self.run(batch, "the plan")  # on a chip that the others have heated
        runs[0].us = min(runs[0].us, again.us)
        return Result(batch, runs)


def attention_for(batch: Batch, **task: Any) -> flashbsr.Attention:
    """Plan a batch."""
    q_heads, kv_heads = batch.heads
    attention = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True),
        flashbsr.TaskInfo(
            q_heads,
            kv_heads,
            128,
            q_dtype="bfloat16",
            kv_dtype="bfloat16",
            backend="cuda",
            **task,
        ),
    )
    attention.plan(batch.layout)
    return attention


def run_of(attention: flashbsr.Attention, name: str, us: float, spread: float) -> Run:
    """Describe a plan, beside what it took."""
    plan = attention.plan_info
    h, items = plan.header, plan.items
    tokens = items["kv_end"] - items["kv_begin"]
    return Run(
        name=name,
        kernel=attention.explain().kernel,
        us=us,
        spread=spread,
        predicted=h.price / h.units_per_us,
        workers=h.num_workers - h.num_narrow_workers,
        narrow=h.num_narrow_workers,
        merges=h.num_merges,
        most_parts=int(plan.merges["state_count"].max(initial=0)),
        policy=plan.policy,
        items=list(
            zip(
                items["row_count"].tolist(),
                tokens.tolist(),
                (items["slot"] >= 0).tolist(),
                strict=True,
            )
        ),
    )


def replayed(files: list[Path]) -> Iterator[Result]:
    """Give kept batches whose plan, as it is now, is one that was timed; it comes first."""
    for file in files:
        for kept in json.loads(file.read_text()):
            b = kept["batch"]
            batch = Batch(b["kind"], tuple(b["q_lens"]), tuple(b["kv_lens"]), tuple(b["heads"]))
            runs = [
                Run(**{**run, "items": [tuple(item) for item in run["items"]]})
                for run in kept["runs"]
            ]
            now = run_of(attention_for(batch), "the plan", 0.0, 0.0)
            same = [run for run in runs if (run.kernel, run.items) == (now.kernel, now.items)]
            if not same:
                print(f"  not timed: {batch}  {now.kernel} {now.policy}, price {now.predicted:.1f}")
                continue
            now.us, now.spread = min((run.us, run.spread) for run in same)
            yield Result(batch, [now, *runs])


def simulate(run: Run, item: float, token: float, split: float) -> float:
    """Give when the last of the workers is done, each taking the next item when it is free."""
    ends = [0.0] * run.workers
    for _, tokens, is_split in run.items:
        heapq.heapreplace(ends, ends[0] + item + token * tokens + split * is_split)
    return max(ends)


def fit(runs: list[Run]) -> tuple[float, ...]:
    """Give the costs, in us, that predict the times with the least absolute error in logarithms."""
    best: tuple[float, ...] = ()
    least = math.inf
    center = (2.0, 10.0, 4.0, 4.0)
    for width in (1.0, 0.5, 0.2, 0.08):
        steps = [[c * (1 + width * f) for f in (-0.6, -0.3, 0, 0.3, 0.6)] for c in center]
        for item, thousand, split in product(*steps[:3]):
            ends = [simulate(run, item, thousand * 1e-3, split) for run in runs]
            for launch in steps[3]:
                error = sum(
                    abs(math.log((end + launch) / run.us))
                    for end, run in zip(ends, runs, strict=True)
                )
                if error < least:
                    least, best = error, (item, thousand, split, launch)
        center = best
    return (*best, least / len(runs))


def report(results: list[Result]) -> dict[str, Any]:
    """Print what was found, and give it for the record."""
    count = len(results)
    near = sum(abs(r.off) <= NEAR for r in results) / count
    slower = [r for r in results if r.slower > SLOWER]
    print(f"{count} batches: price within {NEAR:.0%} of the time in {near:.0%}")
    print(f"slower than the best alternative by more than {SLOWER:.0%}: {len(slower)}")
    for r in sorted(slower, key=lambda r: -r.slower)[:SHOWN]:
        best = f"{r.best.name} {r.best.us:.1f}"
        print(f"  {r.slower:+5.0%}  {r.plan.us:7.1f} us  {best:17}  {r.batch}  {r.plan.kernel}")
    print("furthest from their price:")
    for r in sorted(results, key=lambda r: -abs(r.off))[:SHOWN]:
        print(f"  {r.off:+5.0%}  {r.plan.us:7.1f} us  {r.batch}  {r.plan.kernel}")
    fits = {}
    alike = [run for r in results for run in r.runs if run.narrow == 0]
    for kernel in sorted({run.kernel for run in alike}):
        own = [run for run in alike if run.kernel == kernel and len(run.items) < MOST_ITEMS]
        if len(own) < 6:
            continue
        fits[kernel] = fit(own[:FITTED])
        item, thousand, split, launch, error = fits[kernel]
        off = np.median([run.predicted / run.us - 1 for run in own])
        print(
            f"{kernel}: {len(own)} plans, prices off by {off:+.0%}; best: item {item:.2f}, 1000 "
            f"tokens {thousand:.2f}, split {split:.2f}, launch {launch:.2f} us ({error:.1%} off)"
        )
    return {
        "batches": count,
        "near": round(near, 3),
        "slower": len(slower),
        "worst": round(max(r.slower for r in results), 3),
        "spread": round(float(np.median([r.plan.spread for r in results])), 3),
        "kernels": {k: [round(x, 3) for x in v] for k, v in fits.items()},
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--runs", type=Path, metavar="FILE", nargs="+")
    given = parser.parse_args()
    if given.runs:
        report(list(replayed(given.runs)))
        return 0
    bench = Bench()
    results = [bench.result(batch) for batch in batches(given.batches, given.seed)]
    found = report(results)
    name = bench.torch.cuda.get_device_name()
    if given.write:
        raw = [{"batch": asdict(r.batch), "runs": [asdict(run) for run in r.runs]} for r in results]
        (given.write / "plan-model-runs.json").write_text(json.dumps(raw))
        record = {"device": name, "sources": gpu_hash.source_hash(), "seed": given.seed, **found}
        path = given.write / f"plan-model-{name.lower().replace(' ', '-')}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
