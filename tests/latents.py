# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of multi-head latent attention, their engines and their answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import flashbsr
import numpy as np
import pytest
import reference
from harness import Device
from reference import DTYPES, State, Variant

LATENT, TAIL = 512, 64
SCALE = 192**-0.5


class Batch(NamedTuple):
    """Queries, the pages of a latent cache with NaN wherever no token lies, and the table."""

    q: np.ndarray
    cache: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    kv_lens: np.ndarray
    qo_indptr: np.ndarray
    rows: list[np.ndarray]

    def layout(self, page_size: int) -> flashbsr.Paged:
        return flashbsr.Paged(
            self.qo_indptr, self.indptr, self.indices, kv_lens=self.kv_lens, page_size=page_size
        )

    def table(self) -> np.ndarray:
        counts = np.diff(self.indptr)
        table = np.full((len(counts), max(int(counts.max(initial=0)), 1)), -1, np.int32)
        for row, begin, count in zip(table, self.indptr, counts, strict=False):
            row[:count] = self.indices[begin : begin + count]
        return table


def make(
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    heads: int,
    dtype: str,
    page_size: int = 64,
    *,
    dims: tuple[int, int] = (LATENT, TAIL),
    seed: int = 0,
) -> Batch:
    rng = np.random.default_rng(seed)
    counts = [-(-n // page_size) for n in kv_lens]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    pages = int(indptr[-1]) + 3
    indices = rng.permutation(pages)[: indptr[-1]].astype(np.int32)
    cache = np.full((pages, page_size, sum(dims)), np.nan, np.float32).astype(DTYPES[dtype])
    rows = []
    for begin, n in zip(indptr, kv_lens, strict=False):
        row = rng.standard_normal((n, sum(dims))).astype(DTYPES[dtype])
        at = np.arange(n)
        cache[indices[begin + at // page_size], at % page_size] = row
        rows.append(row)
    q = rng.standard_normal((sum(q_lens), heads, sum(dims))).astype(DTYPES[dtype])
    qo_indptr = np.cumsum([0, *q_lens]).astype(np.int32)
    return Batch(q, cache, indptr, indices, np.array(kv_lens, np.int32), qo_indptr, rows)


def engine(device: Device, heads: int, spec: dict[str, Any], **task: Any) -> flashbsr.Attention:
    fields: dict[str, Any] = {"head_dim_vo": LATENT, "latent": True, "backend": device.backend}
    return flashbsr.Attention(
        flashbsr.AttentionSpec(**{"sm_scale": SCALE, **spec}),
        flashbsr.TaskInfo(heads, 1, **{"head_dim_qk": LATENT + TAIL, **fields, **task}),
    )


def answer(b: Batch, variant: Variant, work: str | None, latent: int, **options: Any) -> State:
    states = [
        reference.attend(
            b.q[begin:end],
            row[:, None],
            row[:, None, :latent],
            variant,
            work=work,
            out_dtype=None if work is None else reference_name(b.q),
            **options,
        )
        for begin, end, row in zip(b.qo_indptr, b.qo_indptr[1:], b.rows, strict=False)
    ]
    return State.concatenate(states, b.q.shape[1], latent)


def reference_name(x: np.ndarray) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == x.dtype)


def parts(device: Device, cache: np.ndarray, latent: int = LATENT) -> tuple[Any, Any]:
    """The latent and the tail in memory of their own."""
    return tuple(
        device.put(np.ascontiguousarray(x)) for x in (cache[..., :latent], cache[..., latent:])
    )


BATCHES = {
    "decode": ((1, 1, 1, 1), (700, 1, 64, 65)),
    "long": ((1, 1), (5000, 3)),
    "one tile": ((1,), (7,)),
    "two tiles": ((1,), (128,)),
    "nothing": ((1, 1, 1), (0, 200, 0)),
    "verification": ((4, 1, 16, 3), (700, 64, 90, 129)),
    "prefill": ((140, 1, 40), (140, 900, 131)),
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 70},
    "soft cap": {"causal": True, "logits_soft_cap": 20.0},
}


def dtype_of(device: Device) -> str:
    return "bfloat16" if device.is_cuda else "float32"


def refused(
    device: Device, attention: flashbsr.Attention, b: Batch, cache: Any, argument: str
) -> None:
    """Hold that a run over `cache`, in pages of 64, raises and names `argument`."""
    attention.plan(b.layout(64))
    there = tuple(map(device.put, cache)) if isinstance(cache, tuple) else device.put(cache)
    with pytest.raises(flashbsr.FlashbsrError) as caught:
        attention.run(device.put(b.q), there)
    assert caught.value.argument.startswith(argument), caught.value
