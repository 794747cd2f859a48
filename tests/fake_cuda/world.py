# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays and batches for the tests on the fake driver.

Results are compared with the CPU engine's on the same arrays: the fake kernels are that engine, so
that what differs is what the host path got wrong.
"""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import torch

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 64, 4, 256
CAPACITY = {"max_batch_size": 8, "max_q_tokens": 64, "max_kv_pages": 200}


class World:
    """A paged cache, queries, and batches over them."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(64, HEADS, DIM, generator=random).to(dtype)
        self.cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=random).to(dtype)

    def attention(self, backend: str = "cuda", workspace: Any = None, **task: Any) -> Any:
        spec = {k: task.pop(k) for k in tuple(task) if k in flashbsr.AttentionSpec.__slots__}
        return flashbsr.Attention(
            flashbsr.AttentionSpec(**{"causal": True, **spec}),
            flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend=backend, **task),
            workspace,
        )

    @staticmethod
    def batch(kv_lens: list[int], q_lens: list[int] | None = None, seed: int = 0) -> flashbsr.Paged:
        counts = [-(-n // PAGE) for n in kv_lens]
        ids = np.random.default_rng(seed).permutation(PAGES)[: sum(counts)]
        return flashbsr.Paged(
            None if q_lens is None else np.cumsum([0, *q_lens]).astype(np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            ids.astype(np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            page_size=PAGE,
        )

    def expected(self, batch: flashbsr.Paged, rows: int, **options: Any) -> np.ndarray:
        reference = self.attention("cpu", **options)
        reference.plan(batch)
        return reference.run(self.q[:rows].numpy(), self.cache.numpy())


def check(
    world: World, out: torch.Tensor, batch: flashbsr.Paged, rows: int, **options: Any
) -> None:
    got, want = out[:rows].numpy(), world.expected(batch, rows, **options)
    np.testing.assert_allclose(
        got.astype(np.float32), want.astype(np.float32), atol=2e-3, rtol=2e-3
    )


DECODE = ([40, 7, 100, 1], None, 4)
PREFILL = ([40, 7, 100], [20, 3, 30], 53)


def planned(world: World, shape: Any = DECODE, **options: Any) -> tuple[Any, flashbsr.Paged, int]:
    lens, q_lens, rows = shape
    attention, batch = world.attention(**options), world.batch(lens, q_lens)
    attention.plan(batch)
    return attention, batch, rows
