# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A server of vLLM whose cache is spread over the processes of a gloo group (DCP)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import flashbsr
import numpy as np
import torch
from flashbsr import ContextParallel
from flashbsr.distributed import PeerMerge
from flashbsr.distributed.merge import gather
from flashbsr.integrations.vllm import context
from flashbsr.integrations.vllm.context import Ranks
from flashbsr.integrations.vllm.steps import Batch, Place, Steps
from vllm_world import Serving

HEADS = 12  # of all ranks
SLOPES = [2.0 ** -(n / 2) for n in range(HEADS)]
SINKS = torch.linspace(-2, 2, HEADS)
# A prompt in chunks beside decodes, drafts of four tokens, requests that pause, one of one token.
STEPS = [
    ([70, 1, 5], 0),
    ([0, 1, 4], 3),
    ([40, 1, 0], 1),
    ([1, 1, 1], 0),
    ([4, 4, 4], 0),
    ([1, 0, 17], 5),
]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"options": {"sliding_window": 9}},
    "slopes": {"options": {"alibi_slopes": SLOPES}},
    "sinks": {"options": {"sinks": SINKS}},
    "soft cap in bfloat16": {"options": {"logits_soft_cap": 2.0}, "dtype": "bfloat16"},
    "int8": {"options": {"kv_cache_dtype": "int8_per_token_head"}, "dtype": "bfloat16"},
    "not causal": {"causal": False},
}


# Through peers' memory: the steps of the most tokens do not fit in there, and some of the others
# have their queries sent by a collective.
MOST, QUERIES = 20, 20000

# Sinks are brought together by a collective, which gloo has for the CPU alone.
ON_GPUS = ("plain", "slopes", "soft cap in bfloat16", "not causal")


class Late(Place):
    """As a GPU's, but the CPU computes."""

    def task(self) -> dict[str, Any]:
        return {"backend": "cpu", "context_parallel": self.ranks.share}


class Letters:
    """What `PeerMerge` does, by letters: everything to everybody, merged in the order of ranks."""

    device = torch.device("cpu")

    def __init__(self, max_tokens: int, heads: int, dim: int, group: Any, **options: Any) -> None:
        assert options == {"timeout": 5.0, "memory": "symmetric"}
        self.max_tokens, self.heads, self.dim, self.group = max_tokens, heads, dim, group
        self.size, self.rank = group.size(), group.rank()
        self.merges: Counter[torch.dtype] = Counter()

    def merge(self, out: Any, lse: Any, scatter_heads: bool = False) -> Any:
        assert out.shape == (lse.shape[0], self.heads, self.dim)
        assert lse.shape[0] <= self.max_tokens
        self.merges[out.dtype] += 1
        out = out.masked_fill(lse.isneginf()[..., None], torch.nan)  # weighs nothing
        outs, lses = (gather(x, self.group, self.size, None).movedim(0, 1) for x in (out, lse))
        merged, total = flashbsr.merge_states(outs.contiguous(), lses.contiguous())
        own = self.heads // self.size
        mine = slice(self.rank * own, (self.rank + 1) * own) if scatter_heads else slice(None)
        return merged[:, mine], total[:, mine]


@dataclass
class SpreadServing(Serving):
    """One rank of it: its query heads, and its share of the one KV head's tokens.

    All ranks draw the same numbers, and have the same blocks of as many times more tokens.
    """

    share: ContextParallel = ContextParallel(1, 0)
    method: str = "reduce_scatter"
    late: bool = False  # lengths come behind the plan, as on a GPU
    most: int = MOST

    def __post_init__(self) -> None:
        own = HEADS // self.share.size
        self.mine = slice(self.share.rank * own, (self.share.rank + 1) * own)
        self.heads = own, 1
        self.options = {
            name: x[self.mine] if name in ("sinks", "alibi_slopes") else x
            for name, x in self.options.items()
        }
        super().__post_init__()
        peers, method = self.method == "peers", self.method
        ranks = Ranks(self.share, torch.distributed.group.WORLD, "all_to_all" if peers else method)
        ranks.check(self.steps.kinds)
        if peers:
            ranks = ranks.through_peers(self.steps.kinds, self.most, 5.0)
        place = replace(self.steps.place, ranks=ranks)
        if self.late:
            place = Late(self.dtype, self.block, device=0, ranks=ranks)
        self.steps = Steps([self.layer.kind], place)

    def batch(self, q_lens: list[int], width: int = 70) -> Batch:
        """With bounds above the lengths, which vary from step to step."""
        batch = super().batch(q_lens, width)
        return replace(batch, bounds=batch.bounds + 10 * sum(q_lens)) if self.late else batch

    def grow(self, q_lens: list[int], pad: int = 0) -> tuple[Any, ...]:
        begins = [len(request.k) for request in self.requests]
        block, self.block = self.block, self.block * self.share.size
        k, v, slots = super().grow(q_lens, pad)
        self.block = block
        at = [np.arange(b, b + n) for b, n in zip(begins, q_lens, strict=True)]
        where = []
        for request, positions in zip(self.requests, at, strict=True):
            local = self.share.local_lens(positions)  # a token that is here is that key
            page = np.array(request.blocks, np.int64)[local // block % len(request.blocks)]
            where.append(np.where(self.share.has(positions), page * block + local % block, -1))
        slots[: sum(q_lens)] = torch.from_numpy(np.concatenate(where))
        return k, v, slots

    def rows(self, n: int, heads: int) -> np.ndarray[Any, Any]:
        if heads == 1:
            return super().rows(n, 1)
        return super().rows(n, HEADS)[:, self.mine]


def serve(rank: int, size: int, interleave: int, method: str, late: bool) -> int:
    """Serve some steps of every case; each output is compared with float64 over all keys."""
    context.PeerMerge, context.QUERIES = Letters, QUERIES  # type: ignore[misc]
    for seed, options in enumerate(CASES.values()):
        share = ContextParallel(size, rank, interleave)
        server = SpreadServing(share=share, method=method, seed=seed, late=late, **options)
        for _ in range(3):
            server.add()
        for q_lens, pad in STEPS:
            server.step(q_lens, pad)
        for peers in server.steps.place.ranks.peers.values():
            few = [q_lens for q_lens, _ in STEPS if sum(q_lens) <= MOST]
            assert len(few) < peers.merge.merges.total() < 2 * len(few)  # outputs, and some queries
    return len(CASES)


class OnGpu(SpreadServing):
    """With a GPU, or a part of one that other ranks have, too; without a collective."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cache = self.cache.cuda()
        place = replace(self.steps.place, device=torch.cuda.current_device())
        self.steps = Steps([self.layer.kind], place, fixed=True)

    def tensor(self, x: np.ndarray[Any, Any]) -> torch.Tensor:
        return super().tensor(x).cuda()

    def batch(self, q_lens: list[int], width: int = 70) -> Batch:
        batch = super().batch(q_lens, width)
        arrays = {name: getattr(batch, name).cuda() for name in ("tables", "lens", "query_starts")}
        return replace(batch, **arrays)

    def grow(self, q_lens: list[int], pad: int = 0) -> tuple[Any, ...]:
        k, v, slots = super().grow(q_lens, pad)
        return k, v, slots.cuda()

    def prepared(self, q_lens: list[int], pad: int = 0) -> tuple[Any, Any]:
        """Plan a step and write its keys; give it, and q."""
        k, v, slots = self.grow(q_lens, pad)
        step = self.steps.plan(self.batch(q_lens), slots, sum(q_lens), 0)
        self.layer.do_kv_cache_update(self.scales, k, v, self.cache, slots)
        return step, self.rows(sum(q_lens) + pad, self.heads[0])

    def served(self, q_lens: list[int], pad: int) -> None:
        """Serve a step."""
        step, q = self.prepared(q_lens, pad)
        rows = self.tensor(q)
        out = torch.full_like(rows, float("nan"))
        self.layer.forward(self.scales, rows, None, None, self.cache, step, out)
        self.check(out.cpu(), q, q_lens)

    def replayed(self, times: int) -> None:
        """Capture a decode step of all requests, and replay it for later ones."""
        ones = [1] * len(self.requests)
        n = len(ones)
        self.steps.captures(1, self.causal, n, requests=n, tokens=n, pages=70 * n)
        step, q = self.prepared(ones)
        assert step.captured
        rows = self.tensor(q)
        out = torch.full_like(rows, float("nan"))
        given = self.scales, rows, None, None, self.cache, step, out
        self.layer.forward(*given)
        self.check(out.cpu(), q, ones)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.layer.forward(*given)
        for _ in range(times):
            _, q = self.prepared(ones)
            rows.copy_(self.tensor(q))
            out.fill_(float("nan"))
            graph.replay()
            self.check(out.cpu(), q, ones)


def serve_on_gpus(rank: int, size: int) -> int:
    """Serve through peers' memory, in eager steps and in graphs."""
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    if count < size:  # which symmetric memory does not take
        context.PeerMerge = lambda *given, **_: PeerMerge(*given, timeout=60.0)  # type: ignore
    for seed, name in enumerate(ON_GPUS):
        share = ContextParallel(size, rank, 4)
        options = {**CASES[name], "dtype": "bfloat16"}
        server = OnGpu(share=share, method="peers", seed=seed, most=100, **options)
        for _ in range(3):
            server.add()
        for q_lens, pad in STEPS:
            server.served(q_lens, pad)
        server.replayed(5)
        server.steps.place.ranks.raise_if_missed()
    return len(ON_GPUS)
