# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of tools/context_parallel.py: what they attend to, what a model says, how they run."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashbsr import Attention, AttentionSpec, BlockTable, ContextParallel, FlashbsrError, Ragged
from flashbsr import TaskInfo as Task
from flashbsr.distributed import Cost, PeerError, PeerMerge, PrefillOverRanks, merge_over_ranks
from flashbsr.distributed import merge as merging
from flashbsr.distributed import prefill as prefilling

Merge = Callable[..., tuple[Any, Any]]
PAGE = 64
TURNS, SAMPLES = 3, 5
WARM = 0.1  # seconds of the work itself, before it is timed
DECODES, PREFILLS = 20, 2  # in a sample: 2 ms and more, of which events are 0.1 %
TRAVEL = ("float32", "bfloat16")
# Rounding of the two results to bfloat16, of the largest output, and bfloat16 on the way.
TOLERANCE = 2.0**-6
CAUSAL = AttentionSpec(causal=True)
LATENT = AttentionSpec(causal=True, sm_scale=192**-0.5)


@dataclass(frozen=True)
class Row:
    """A workload of one layer, bfloat16.

    Parameters
    ----------
    batch, kv_len : int
        Requests, and tokens of each on all ranks.
    goal : float
        How many times faster two GPUs are to be than one.
    q_len : int
        Query tokens of each request; `kv_len`: prefill.
    num_qo_heads, num_kv_heads, head_dim : int
    latent : int
        Dims of the latent, for latent attention.
    """

    batch: int
    kv_len: int
    goal: float
    q_len: int = 1
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    latent: int = 0

    @property
    def prefill(self) -> bool:
        """All tokens are queries."""
        return self.q_len == self.kv_len

    def methods(self, device: str = "cuda") -> tuple[str, ...]:
        """How ranks may work together there: "peers" is `PeerMerge`."""
        if self.prefill:
            return prefilling.METHODS
        return merging.METHODS + ("peers",) * (device == "cuda")

    def predicted(self, ranks: int) -> dict[str, float]:
        """Give microseconds by the model, for every method; of one GPU under "one"."""
        cost = Cost(
            self.num_qo_heads,
            self.num_kv_heads,
            self.latent or self.head_dim,
            head_dim_kv=self.head_dim if self.latent else None,
        )
        found = {}
        for method in self.methods():
            if self.prefill:
                found[method] = cost.prefill_us(self.kv_len, ranks, method=method)
            else:
                found[method] = cost.decode_us(
                    self.batch, self.kv_len, ranks, q_len=self.q_len, method=method
                )
        one = cost.prefill_us(self.kv_len) if self.prefill else None
        found["one"] = one or cost.decode_us(self.batch, self.kv_len, q_len=self.q_len)
        return found

    def spec(self) -> AttentionSpec:
        """Causal; latent attention has the scale of what it was before absorption."""
        return LATENT if self.latent else CAUSAL

    def task(self, here: Here, **more: Any) -> Task:
        """Say what a rank computes."""
        place = {"backend": "cpu"} if here.device == "cpu" else {"backend": "cuda"}
        return Task(
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            head_dim_vo=self.latent or None,
            latent=bool(self.latent),
            q_dtype="bfloat16",
            kv_dtype="bfloat16",
            **place,
            **more,
        )


ROWS = {
    "decode 1 x 1048576": Row(1, 1 << 20, 1.96),
    "decode 16 x 65536": Row(16, 65536, 1.95),
    "decode 64 x 8192": Row(64, 8192, 1.9),
    "decode 16 x 8192": Row(16, 8192, 1.55),
    "MLA decode 16 x 65536": Row(16, 65536, 1.9, 1, 128, 1, 576, 512),
    "prefill 1 x 131072": Row(1, 131072, 1.92, 131072),
    "verify 4 tokens 16 x 65536": Row(16, 65536, 1.9, 4),
}


@dataclass(frozen=True)
class Run:
    """Work, and `count` of it in a row: a graph does not keep what it reads."""

    work: Callable[[], object]
    several: Callable[[], object]
    count: int


@dataclass(frozen=True)
class Here:
    """A rank: its process group is PyTorch's default one, its device the current one."""

    size: int
    rank: int
    device: str  # "cuda", or "cpu" for tests: by the host's clock, without graphs

    def draw(self, *shape: int, seed: int) -> Any:
        """Numbers that all ranks have alike."""
        import torch

        source = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=source, device=self.device, dtype=torch.bfloat16)

    def prepared(self, work: Callable[[], object], *, graph: bool) -> Run:
        """Give some of `work` in a row, warm; `graph`: in a CUDA graph, for they are short."""
        import torch

        count = 1 if self.device == "cpu" else DECODES if graph else PREFILLS
        for _ in range(2):  # loads kernels, makes connections: not under capture
            work()
        run: Callable[[], object] = lambda: [work() for _ in range(count)]  # noqa: E731
        if graph and self.device == "cuda":
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            # Threads of NCCL ask for events meanwhile.
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                run()
            run = captured.replay
            run()
        return Run(work, run, count)

    def seconds(self, *runs: Run) -> list[float]:
        """Median over samples of the slowest rank's time of one work, of each of `runs`.

        A GPU's clock falls while it multiplies: an H100 took 492 us for a latent decode between
        exchanges with others, 523 to 544 when it was timed first, and 552 after 0.3 seconds of it.
        So that what is compared has the same clocks, runs take turns, each goes on for a while
        before it is timed, and the first turn does not count.
        """
        # Times on a CPU say nothing, and take a test half a minute.
        warm, count = (WARM, SAMPLES) if self.device == "cuda" else (0.0, 1)
        kept: list[list[float]] = [[] for _ in runs]
        for turn in range(TURNS):
            for run, samples in zip(runs, kept, strict=True):
                once = self._slowest(run, 1)[0]
                for _ in range(math.ceil(warm / once)):  # as often on all ranks
                    run.several()
                found = self._slowest(run, count)
                samples += found if turn > 0 else []
        return [statistics.median(x) / run.count for x, run in zip(kept, runs, strict=True)]

    def _slowest(self, run: Run, samples: int) -> list[float]:
        """Give the slowest rank's times."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        found = self._samples(run.several, samples)
        times = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return list(times.tolist())

    def _samples(self, run: Callable[[], object], count: int) -> list[float]:
        """Give this rank's times of `count` runs in a row, behind one that is not timed.

        Hosts begin some 83 us apart, by clocks in the kernels of two H200s, which the rank that is
        first would wait for: 4 us of each of 20 steps. The run before brings them into step.
        """
        import torch

        if self.device == "cpu":
            clock = [time.perf_counter()]
            for _ in range(count):
                run()
                clock.append(time.perf_counter())
            return [end - begin for begin, end in itertools.pairwise(clock)]
        run()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in itertools.pairwise(events)]


def measure(row: Row, here: Here) -> dict[str, Any]:
    """Give times on one GPU and on all by every method, and how far results are apart.

    What the engine refuses is an outcome; all ranks refuse it before they send anything.
    """
    try:
        found = (_prefill if row.prefill else _decode)(row, here)
    except PeerError:
        raise
    except FlashbsrError as error:
        return {"ok": False, "problem": str(error)}
    best = min(found["us"], key=found["us"].__getitem__)
    return {
        "ok": max(found["errors"].values()) <= TOLERANCE,
        **found,
        "best": best,
        "times": found["one_us"] / found["us"][best],
        "goal": row.goal,
        "predicted_us": row.predicted(here.size),
    }


def _apart(got: Any, expected: Any) -> float:
    """Largest difference, of the largest output."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def _worst(here: Here, error: float) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor([error], dtype=torch.float64, device=here.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _merge(row: Row, method: str, travel: Any) -> Merge:
    if method == "peers":
        dim = row.latent or row.head_dim
        return PeerMerge(row.batch * row.q_len, row.num_qo_heads, dim, dtype=travel).merge
    return functools.partial(merge_over_ranks, method=method, dtype=travel)


def _decode(row: Row, here: Here) -> dict[str, Any]:
    import numpy as np
    import torch

    pages = row.kv_len // PAGE
    slot = (PAGE, row.head_dim) if row.latent else (2, PAGE, row.num_kv_heads, row.head_dim)
    cache = here.draw(row.batch * pages, *slot, seed=1)
    q = here.draw(row.batch * row.q_len, row.num_qo_heads, row.head_dim, seed=2)
    starts = np.arange(row.batch + 1) * row.q_len

    def planned(share: ContextParallel | None, pages: int, o_dtype: str = "bfloat16") -> Attention:
        lens = np.full(row.batch, row.kv_len)
        more: dict[str, Any] = {}
        if share is not None:
            more = {"context_parallel": share, "o_dtype": o_dtype}
        attention = Attention(row.spec(), row.task(here, **more))
        table = np.arange(row.batch * pages, dtype=np.int32).reshape(row.batch, pages)
        local = lens if share is None else share.local_lens(lens)
        layout = BlockTable(starts, table, local, page_size=PAGE)
        attention.plan(layout, q_positions=None if share is None else lens - row.q_len)
        return attention

    alone = functools.partial(planned(None, pages).run, q, cache)
    expected = alone().clone()
    runs = {("one_us", ""): here.prepared(alone, graph=True)}
    # A page is what a rank has in a row, so that its share is every so many pages.
    mine = cache.unflatten(0, (row.batch, pages))[:, here.rank :: here.size].contiguous()
    share = ContextParallel(here.size, here.rank, PAGE)
    width, mine = mine.shape[1], mine.flatten(0, 1)
    heads = row.num_qo_heads // here.size
    own = slice(here.rank * heads, (here.rank + 1) * heads)
    errors: dict[str, float] = {}
    # Partial results are of the type that travels, and so is the merged one.
    for travel in TRAVEL:
        attention = planned(share, width, travel)
        attend = functools.partial(attention.run, q, mine, return_lse=True)
        runs["attend_us", travel] = here.prepared(attend, graph=True)
        for method in row.methods(here.device):
            merge = _merge(row, method, getattr(torch, travel))
            for kind, wanted, options in (
                ("us", expected, {}),
                ("own_heads_us", expected[:, own], {"scatter_heads": True}),
            ):

                def step(
                    merge: Merge = merge, attend: Merge = attend, options: Any = options
                ) -> Any:
                    return merge(*attend(), **options)[0]

                name = f"{method} {travel}"
                error = _worst(here, _apart(step(), wanted))
                errors[name] = max(error, errors.get(name, 0.0))
                runs[kind, name] = here.prepared(step, graph=True)
    return {**_times(here, runs), "errors": errors}


def _prefill(row: Row, here: Here) -> dict[str, Any]:
    q = here.draw(row.kv_len, row.num_qo_heads, row.head_dim, seed=1)
    k, v = (here.draw(row.kv_len, row.num_kv_heads, row.head_dim, seed=s) for s in (2, 3))
    alone = Attention(CAUSAL, row.task(here))
    alone.plan(Ragged([0, row.kv_len], [0, row.kv_len]))
    whole = functools.partial(alone.run, q, (k, v))
    expected = whole().clone()
    runs, errors = {("one_us", ""): here.prepared(whole, graph=False)}, {}
    for method in row.methods(here.device):
        spread = PrefillOverRanks(row.task(here), CAUSAL, method=method)
        rows = spread.plan([row.kv_len]).rows
        own = [x[rows] for x in (q, k, v)]

        def step(spread: PrefillOverRanks = spread, own: list[Any] = own) -> Any:
            return spread.run(*own)[0]

        errors[method] = _worst(here, _apart(step(), expected[rows]))
        runs["us", method] = here.prepared(step, graph=False)
    return {**_times(here, runs), "errors": errors}


def _times(here: Here, runs: dict[tuple[str, str], Run]) -> dict[str, Any]:
    """Time all of a row; microseconds by kind and name, of one GPU without a name."""
    found: dict[str, Any] = {}
    for (kind, name), seconds in zip(runs, here.seconds(*runs.values()), strict=True):
        if name:
            found.setdefault(kind, {})[name] = seconds * 1e6
        else:
            found[kind] = seconds * 1e6
    return found
