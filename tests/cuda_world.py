# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A cache and queries for the tests that need a GPU."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
from harness import framework

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 512


class World:
    """A paged cache and queries as NumPy arrays, and batches over them."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.q = random.standard_normal((256, HEADS, DIM)).astype(np.float16)
        self.cache = random.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM)).astype(np.float16)

    def attention(self, backend: str = "cuda", workspace: Any = None, **task: Any) -> Any:
        return flashbsr.Attention(
            flashbsr.AttentionSpec(causal=True),
            flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, backend=backend, **task),
            workspace,
        )

    @staticmethod
    def batch(kv_lens: list[int], q_lens: list[int] | None = None) -> flashbsr.Paged:
        counts = [-(-n // PAGE) for n in kv_lens]
        ids = np.random.default_rng(len(kv_lens)).permutation(PAGES)[: sum(counts)]
        return flashbsr.Paged(
            None if q_lens is None else np.cumsum([0, *q_lens]).astype(np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            ids.astype(np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            page_size=PAGE,
        )

    def check(self, out: Any, batch: flashbsr.Paged, rows: int) -> None:
        """`out` is an array of any kind, on the host or not; finished."""
        reference = self.attention("cpu")
        reference.plan(batch)
        want = reference.run(self.q[:rows], self.cache).astype(np.float32)
        got = np.asarray(out.get() if hasattr(out, "get") else out, np.float32)[:rows]
        np.testing.assert_allclose(got, want, atol=4e-3, rtol=4e-3)


WORLD = World()


def on_gpu(x: np.ndarray) -> Any:
    return framework("torch").from_numpy(x).cuda()


def to_host(x: Any) -> np.ndarray:
    return x.float().cpu().numpy()
