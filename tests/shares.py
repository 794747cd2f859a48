# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batches whose keys lie on several ranks, and what they should give."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import flashbsr
import numpy as np
from compare import assert_attention
from flashbsr import ContextParallel
from reference import Variant, attend

PAGE = 16
VARIANTS = {
    "plain": Variant(),
    "causal": Variant(causal=True),
    "window": Variant(causal=True, window_left=37),
    "window alone": Variant(window_left=20),
    "soft cap": Variant(causal=True, logits_soft_cap=3.0),
    "alibi": Variant(causal=True, pos_encoding_mode="ALIBI"),
    "rope": Variant(causal=True, window_left=90, pos_encoding_mode="ROPE_LLAMA"),
}


@dataclass
class Batch:
    """Requests as one rank would have them that has all keys."""

    q: np.ndarray
    kv: list[tuple[np.ndarray, np.ndarray]]
    q_lens: np.ndarray

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        longest: int = 300,
        heads: tuple[int, int] = (4, 2),
        dim: int = 16,
    ) -> Batch:
        """With requests of nothing, of fewer keys than ranks, and of several query tokens."""
        size = int(rng.integers(1, 6))
        kv_lens = rng.choice([0, 1, 2, 5, 16, 33, longest], size) + rng.integers(0, 9, size)
        q_lens = np.minimum(rng.choice([0, 1, 1, 4, 40], size), kv_lens)
        shape = lambda n, heads: rng.standard_normal((n, heads, dim)).astype(np.float32)
        return cls(
            shape(int(q_lens.sum()), heads[0]),
            [(shape(n, heads[1]), shape(n, heads[1])) for n in kv_lens],
            q_lens,
        )

    @property
    def kv_lens(self) -> np.ndarray:
        return np.array([len(k) for k, _ in self.kv])

    @property
    def positions(self) -> np.ndarray:
        """Of first query tokens: the last tokens are the queries."""
        return self.kv_lens - self.q_lens

    def share(self, share: ContextParallel) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values that are on a rank, in their order."""
        mine = [share.has(np.arange(len(k))) for k, _ in self.kv]
        return [(k[m], v[m]) for (k, v), m in zip(self.kv, mine, strict=True)]

    def check(
        self, out: np.ndarray, lse: np.ndarray, variant: Variant, work: str = "float32", **mask: Any
    ) -> None:
        """Float32 results against float64, request by request. `work`: the type of q, k and v."""
        begin = 0
        for i, (n, (k, v)) in enumerate(zip(self.q_lens, self.kv, strict=True)):
            rows, begin = slice(begin, begin + n), begin + n
            given = {name: of[i] for name, of in mask.items()}
            states = [
                attend(self.q[rows], k, v, variant, work=w, out_dtype=w and "float32", **given)
                for w in (None, work)
            ]
            assert_attention(out[rows], lse[rows], *states, work, f"request {i}")


def paged(kv: list[tuple[np.ndarray, np.ndarray]], rng: np.random.Generator) -> tuple[Any, Any]:
    """A cache of pages in any order, NaN where nobody's token is, and the table of requests."""
    pages = [-(-len(k) // PAGE) for k, _ in kv]
    ids = rng.permutation(sum(pages) + 2)
    table = np.full((len(kv), max([*pages, 1]) + 1), -7, np.int32)
    cache = np.full((sum(pages) + 2, 2, PAGE, *kv[0][0].shape[1:]), np.nan, np.float32)
    at = 0
    for row, n, pair in zip(table, pages, kv, strict=True):
        row[:n] = ids[at : at + n]
        at += n
        for half, x in enumerate(pair):
            for j in range(len(x)):
                cache[row[j // PAGE], half, j % PAGE] = x[j]
    return cache, table


def attention_of(variant: Variant, share: ContextParallel, **task: Any) -> flashbsr.Attention:
    spec = flashbsr.AttentionSpec(**dataclasses.asdict(variant))
    heads, dim = task.pop("heads", (4, 2)), task.pop("dim", 16)
    task = {"backend": "cpu", **task}
    info = flashbsr.TaskInfo(*heads, dim, context_parallel=share, **task)
    return flashbsr.Attention(spec, info)


def merged(states: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    outs, lses = (np.stack(x, axis=1) for x in zip(*states, strict=True))
    return flashbsr.merge_states(outs, lses)


def shares(size: int, interleave: int) -> list[ContextParallel]:
    return [ContextParallel(size, rank, interleave) for rank in range(size)]


def latent_twice(
    task: flashbsr.TaskInfo, kv_lens: np.ndarray, tokens: int, page: int, q: Any, cache: Any
) -> list[Any]:
    """Attend for the last `tokens` of each request: by positions, and as requests of a token each.

    Pages are the cache's in an order of their own.
    """
    share, first = task.share, kv_lens - tokens
    positions = (first[:, None] + np.arange(tokens)).ravel()
    pages = np.random.default_rng(tokens).permutation(len(cache)).reshape(len(kv_lens), -1)
    results = []
    for causal in (True, False):
        spec = flashbsr.AttentionSpec(causal=causal, sm_scale=1.2 * task.head_dim_qk**-0.5)
        attention = flashbsr.Attention(spec, task)
        if causal:
            qo, lens = tokens * np.arange(len(kv_lens) + 1), share.local_lens(kv_lens)
            attention.plan(flashbsr.BlockTable(qo, pages, lens, page_size=page), q_positions=first)
        else:
            lens, own = share.local_lens(positions + 1), np.repeat(pages, tokens, axis=0)
            attention.plan(flashbsr.BlockTable(None, own, lens, page_size=page))
        results.append(attention.run(q, cache, return_lse=True))
    return results
