# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Batches of all kinds for the kernel for mixed batches under a capacity, and what is right."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
from harness import framework

torch = framework("torch")

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 128, 16, 1024
REQUESTS, ROWS = 48, 256
CAPACITY = {"max_batch_size": REQUESTS, "max_q_tokens": ROWS, "max_kv_pages": 40 * PAGES}


def batch(shared: int, own: list[int], q_lens: list[int] | None = None) -> flashbsr.Paged:
    """Requests that begin with the same `shared` pages and have `own` tokens more."""
    counts = [shared + -(-n // PAGE) for n in own]
    random = np.random.default_rng(len(own))
    pages = [np.r_[np.arange(shared), random.permutation(PAGES)[: n - shared]] for n in counts]
    return flashbsr.Paged(
        None if q_lens is None else np.cumsum([0, *q_lens]),
        np.cumsum([0, *counts]).astype(np.int32),
        np.concatenate([*pages, np.zeros(0, np.int64)]),
        kv_lens=np.array([shared * PAGE + n for n in own], np.int32),
        page_size=PAGE,
    )


class Arrays:
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.q = torch.randn(ROWS, HEADS, DIM, generator=random).half()
        self.cache = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=random).half()

    @staticmethod
    def attention(**task: Any) -> flashbsr.Attention:
        spec = flashbsr.AttentionSpec(causal=True)
        info = flashbsr.TaskInfo(HEADS, KV_HEADS, DIM, **{"kv_dtype": "float16", **task})
        return flashbsr.Attention(spec, info)

    def check(self, out: torch.Tensor, layout: flashbsr.Paged) -> None:
        rows = len(layout.kv_lens) if layout.qo_indptr is None else int(layout.qo_indptr[-1])
        reference = self.attention(backend="cpu")
        reference.plan(layout)
        want = reference.run(self.q[:rows].numpy(), self.cache.numpy())
        got = out[:rows].numpy().astype("f4")
        np.testing.assert_allclose(got, want.astype("f4"), atol=2e-3)


# Name, pages that all share, tokens that each has of its own, query tokens.
BATCHES = {
    "decodes": (0, [900 + 7 * i for i in range(REQUESTS)], None),
    "shared": (700, [40 + i for i in range(REQUESTS)], None),
    "few that share": (700, [40, 3], None),
    "shared by chunks": (180, [60, 61, 70], [20, 40, 9]),
    "one": (0, [3000], None),
    "short": (0, [1, 5, 9], None),
    "chunks beside decodes": (0, [400, 300, 900, 5, 77], [200, 1, 1, 1, 40]),
    "no keys": (0, [0, 30, 0], None),
    "nothing": (0, [], None),
}
