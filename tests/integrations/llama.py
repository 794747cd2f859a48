# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A block of a Llama model over a paged cache, as an engine writes it."""

from __future__ import annotations

from typing import Any, Literal

import flashbsr
import numpy as np
from harness import framework

torch = framework("torch")

Step = Literal["fused", "apart"]
PAGE = 4


class Block(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm, QKV, RoPE and cache write (one call or two), attention, projection, SwiGLU."""

    def __init__(self, step: Step, hidden: int, heads: int, kv_heads: int, head_dim: int,
                 inner: int) -> None:  # fmt: skip
        super().__init__()
        self.step, self.heads, self.kv_heads, self.head_dim = step, heads, kv_heads, head_dim

        def matrix(rows: int, columns: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(rows, columns) / rows**0.5)

        self.norms = torch.nn.ParameterList([torch.rand(hidden) + 0.5 for _ in range(2)])
        self.qkv = matrix(hidden, (heads + 2 * kv_heads) * head_dim)
        self.o = matrix(heads * head_dim, hidden)
        self.gate_up, self.down = matrix(hidden, 2 * inner), matrix(inner, hidden)
        self.attention = flashbsr.Attention(
            flashbsr.AttentionSpec(causal=True), flashbsr.TaskInfo(heads, kv_heads, head_dim)
        )

    def plan(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Plan a batch on pages in any order; what forward takes beside x and the cache."""
        ends = np.concatenate([[0], np.cumsum(q_lens)])
        pages = -(-kv_lens // PAGE)
        indptr = np.concatenate([[0], np.cumsum(pages)])
        indices = np.random.default_rng(int(indptr[-1])).permutation(64)[: indptr[-1]]
        last = (kv_lens - 1) % PAGE + 1
        self.attention.plan(flashbsr.Paged(ends, indptr, indices, kv_lens=kv_lens, page_size=PAGE))
        rows = flashbsr.get_batch_indices_positions(ends, kv_lens, int(ends[-1]))
        return tuple(map(torch.from_numpy, (*rows, indices, indptr, last)))

    def poison(self, cache: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> None:
        """NaN wherever the step has to write, and on pages of nobody."""
        rows, positions, indices, indptr, _ = (x.long() for x in batch)
        pages = indices[indptr[rows] + positions // PAGE]
        cache[pages, :, positions % PAGE] = torch.nan
        unused = torch.ones(len(cache), dtype=torch.bool)
        unused[indices] = False
        cache[unused] = torch.nan

    def norm(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norms[i]

    def forward(self, x: torch.Tensor, cache: torch.Tensor, *batch: Any) -> torch.Tensor:
        qkv = (self.norm(x, 0) @ self.qkv).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        rows, positions, *table = batch
        if self.step == "fused":
            q = flashbsr.rope_append_paged_kv_cache(q, k, v, rows, positions, cache, *table)
        else:
            q, k = flashbsr.apply_rope_pos_ids(q, k, positions)
            flashbsr.append_paged_kv_cache(k, v, rows, positions, cache, *table)
        o = self.attention.run(q, cache)
        x = x + o.reshape(x.shape[0], -1) @ self.o
        gate, up = (self.norm(x, 1) @ self.gate_up).chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(gate) * up) @ self.down
