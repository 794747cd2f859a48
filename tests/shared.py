# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests begin alike, as page tables and as levels, and their dense answers.

Hostile as those of `cases.py`: slots that no request owns are NaN, pages are permuted, arrays are
strided, outputs are poisoned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import flashbsr
import numpy as np
import reference
from cases import indptr, poisoned, strided
from compare import assert_attention
from flashbsr.engine.plan import Plan
from harness import Device, assert_poison_survived
from reference import DTYPES, State, Variant

PLAIN = Variant()


@dataclass
class Batch:
    """Requests over pages: which, how many tokens of them, and how many query tokens."""

    page_size: int
    pages: list[list[int]]
    kv_lens: list[int]
    q_lens: list[int]
    heads: tuple[int, int] = (8, 2)
    dim: int = 64

    def table(self) -> flashbsr.Paged:
        """Who meets whom."""
        return flashbsr.Paged(
            indptr(self.q_lens),
            indptr([len(p) for p in self.pages]),
            np.concatenate([np.zeros(0, np.int32), *self.pages]).astype(np.int32),
            kv_lens=np.array(self.kv_lens, np.int32),
            page_size=self.page_size,
        )

    def slots(self) -> list[np.ndarray]:
        """Slots of the cache, page by page, that the tokens of each request are in."""
        size = self.page_size
        each = [
            (np.repeat(np.array(p, np.int64) * size, size) + np.tile(np.arange(size), len(p)))[:n]
            for p, n in zip(self.pages, self.kv_lens, strict=True)
        ]
        return [x.astype(np.int64) for x in each]


def random_tree(rng: np.random.Generator) -> Batch:
    """Some requests: the beginnings of most are those of others, some end within them."""
    size = int(rng.choice([1, 3, 16]))
    unused = iter(rng.permutation(20000).tolist())

    def new(count: int) -> list[int]:
        return [next(unused) for _ in range(count)]

    stems = [new(int(rng.integers(1, 2000 // size))) for _ in range(3)]
    stems += [
        stems[int(rng.integers(3))] + new(int(rng.integers(0, 600 // size))) for _ in range(3)
    ]
    pages, kv_lens, q_lens = [], [], []
    for _ in range(int(rng.integers(1, 14))):
        stem = stems[int(rng.integers(6))] if rng.random() < 0.85 else []
        pages.append(stem + new(int(rng.integers(0, 300 // size + 2))))
        kv_lens.append(max(len(pages[-1]) * size - int(rng.integers(0, size)), 0))
        q_lens.append(int(rng.choice([0, 1, 1, 1, 2, 5, 40])))
    heads = [(4, 2), (8, 2), (3, 3), (4, 1)][int(rng.integers(4))]
    used = np.unique(np.concatenate([np.zeros(0, np.int64), *map(np.array, pages)]))
    place = dict(zip(used.tolist(), rng.permutation(len(used) + 3).tolist(), strict=False))
    return Batch(size, [[place[p] for p in own] for own in pages], kv_lens, q_lens, heads)


def family(q_len: int = 1, *, shared: int = 128, own: int = 12, count: int = 8) -> Batch:
    """Requests that share `shared` pages of 16 tokens and own a few: any cost model shares them."""
    pages = [
        [*range(shared), *range(shared + own * b, shared + own * (b + 1))] for b in range(count)
    ]
    lens = [16 * (shared + own) - b % 16 for b in range(count)]
    return Batch(16, pages, lens, [q_len] * count)


@dataclass
class Arrays:
    """q, KV and outputs of a batch on the host, and what each request sees."""

    batch: Batch
    dtype: str
    q: np.ndarray
    kv: np.ndarray
    slots: list[np.ndarray]

    @staticmethod
    def of(
        batch: Batch, dtype: str, seed: int = 0, slots: list[np.ndarray] | None = None
    ) -> Arrays:
        """Random numbers in the slots that requests own, NaN in all others."""
        rng = np.random.default_rng(seed)
        slots = batch.slots() if slots is None else slots
        size, (num_qo_heads, num_kv_heads), dim = batch.page_size, batch.heads, batch.dim
        owned = np.unique(np.concatenate([np.zeros(0, np.int64), *slots]))
        num_pages = int(owned.max(initial=0)) // size + 3
        kv = np.full((num_pages * size, 2, num_kv_heads, dim), np.nan, np.float32)
        kv[owned] = rng.standard_normal((len(owned), 2, num_kv_heads, dim))
        kv[owned, 1] += 0.25
        kv = kv.reshape(num_pages, size, 2, num_kv_heads, dim).swapaxes(1, 2)
        q = rng.standard_normal((sum(batch.q_lens), num_qo_heads, dim)).astype(np.float32)
        return Arrays(
            batch,
            dtype,
            strided(q.astype(DTYPES[dtype]), dtype),
            strided(kv.astype(DTYPES[dtype]), dtype),
            slots,
        )

    def task(self, device: Device, **task: Any) -> flashbsr.TaskInfo:
        """What the batch needs, and more; few workers, so that sharing pays."""
        return flashbsr.TaskInfo(
            *self.batch.heads,
            self.batch.dim,
            **{"backend": device.backend, "num_workers": 4, **task},
        )

    def answer(self, variant: Variant, work: str | None, masks: Any, **options: Any) -> State:
        """Attention of every request on its own, dense."""
        tokens = self.kv.swapaxes(1, 2).reshape(-1, 2, *self.kv.shape[3:])
        rows = np.split(self.q, np.cumsum(self.batch.q_lens)[:-1])
        states = [
            reference.attend(
                q,
                tokens[own, 0],
                tokens[own, 1],
                variant,
                mask=None if masks is None else masks[b],
                work=work,
                out_dtype=None if work is None else self.dtype,
                **options,
            )
            for b, (q, own) in enumerate(zip(rows, self.slots, strict=True))
        ]
        return State.concatenate(states, self.batch.heads[0], self.batch.dim)

    def run(
        self, attention: flashbsr.Attention, device: Device, **options: Any
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Out, in poison that survived, and the LSE where there is one."""
        out, lse = poisoned(self.q.shape, self.dtype), poisoned(self.q.shape[:2], "float32")
        out, lse = device.put(strided(out, self.dtype)), device.put(lse)
        moved = {name: device.put(value) for name, value in options.items()}
        if attention.spec.activation == "softmax":
            moved["lse"] = lse
        attention.run(device.put(self.q), device.put(self.kv), out=out, **moved)
        result = device.get(out)
        assert_poison_survived(result, "sharing")
        return result, device.get(lse) if "lse" in moved else None

    def check(
        self,
        attention: flashbsr.Attention,
        device: Device,
        label: str,
        variant: Variant = PLAIN,
        masks: Any = None,
        **options: Any,
    ) -> None:
        """Run what is planned; the answer is computed afterwards."""
        out, lse = self.run(attention, device, **options)
        slopes = options.pop("alibi_slopes", None)
        options |= {} if slopes is None else {"slopes": slopes}
        exact = self.answer(variant, None, masks, **options)
        working = self.answer(variant, self.dtype, masks, **options)
        assert_attention(out, lse, exact, working, self.dtype, label)


def dtype_of(device: Device) -> str:
    """float32 where it can be computed: it shows every error."""
    return "bfloat16" if device.is_cuda else "float32"


def planned(
    arrays: Arrays, device: Device, variant: Variant = PLAIN, **task: Any
) -> tuple[flashbsr.Attention, Plan]:
    """An `Attention` with the batch's page table, and the plan."""
    spec = flashbsr.AttentionSpec(**dataclasses.asdict(variant))
    attention = flashbsr.Attention(spec, arrays.task(device, **task))
    attention.plan(arrays.batch.table())
    return attention, attention.plan_info
