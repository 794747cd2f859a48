# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of multi-head latent attention (DeepSeek-V2, 2024), its cache, and an indexer.

A token's hidden state x becomes a latent c of 512 numbers and a rotated key of 64; the cache keeps
these. Head h has keys and values of its own, expanded from the latent::

    k_h = [c U_h, rope]            v_h = c V_h          U_h: 512 x 128, V_h: 512 x 128
    q_h = [a_h, b_h]               a_h of 128 dims, b_h of 64, rotated

*Absorbed*, nothing is expanded, because of ``<a_h, c U_h> = <a_h U_h^T, c>`` and
``sum_j p_j (c_j V_h) = (sum_j p_j c_j) V_h``::

    absorb:    q'_h = [a_h U_h^T, b_h]    of 512 + 64 dims, over keys [c, rope] that all heads share
    unabsorb:  o_h = o'_h V_h             of the attention's output over values c
"""

from __future__ import annotations

from dataclasses import dataclass

import flashbsr
import numpy as np

HIDDEN, HEADS = 256, 16
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
PAGE_SIZE, PAGES = 64, 40
SM_SCALE = (NOPE + ROPE) ** -0.5
INDEX_DIM = 32


@dataclass
class Projected:
    """What the layer makes of tokens: queries, and the two parts of a row of the cache."""

    q_nope: np.ndarray  # (tokens, HEADS, NOPE)
    q_rope: np.ndarray  # (tokens, HEADS, ROPE)
    latent: np.ndarray  # (tokens, LATENT)
    k_rope: np.ndarray  # (tokens, ROPE)
    index: np.ndarray  # (tokens, INDEX_DIM), the indexer's query and key in one


class Layer:
    """Random weights, float32."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

        self.q = weights(HIDDEN, HEADS * (NOPE + ROPE))
        self.latent, self.k_rope = weights(HIDDEN, LATENT), weights(HIDDEN, ROPE)
        self.expand_k, self.expand_v = weights(HEADS, LATENT, NOPE), weights(HEADS, LATENT, VALUE)
        self.index = weights(HIDDEN, INDEX_DIM)

    def project(self, x: np.ndarray, positions: np.ndarray) -> Projected:
        """Of hidden states (tokens, HIDDEN) at positions (tokens,)."""
        q = (x @ self.q).reshape(-1, HEADS, NOPE + ROPE)
        latent = x @ self.latent
        latent /= np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)
        q_rope, k_rope = flashbsr.apply_rope_pos_ids(
            np.ascontiguousarray(q[..., NOPE:]), (x @ self.k_rope)[:, None], positions
        )
        return Projected(q[..., :NOPE], q_rope, latent, k_rope[:, 0], x @ self.index)

    def absorb(self, p: Projected) -> np.ndarray:
        """Queries over the cache: (tokens, HEADS, LATENT + ROPE)."""
        absorbed = np.einsum("thn,hcn->thc", p.q_nope, self.expand_k)
        return np.concatenate([absorbed, p.q_rope], -1)

    def unabsorb(self, out: np.ndarray) -> np.ndarray:
        """(tokens, HEADS, LATENT) -> (tokens, HEADS, VALUE)."""
        return np.einsum("thc,hcv->thv", out, self.expand_v)

    def expand(self, p: Projected) -> tuple[np.ndarray, np.ndarray]:
        """Keys (tokens, HEADS, NOPE + ROPE) and values (tokens, HEADS, VALUE) of every head."""
        k = np.einsum("tc,hcn->thn", p.latent, self.expand_k)
        rope = np.broadcast_to(p.k_rope[:, None], (len(k), HEADS, ROPE))
        return np.concatenate([k, rope], -1), np.einsum("tc,hcv->thv", p.latent, self.expand_v)


class Cache:
    """Pages of latents with the rotated keys behind them, and the indexer's keys."""

    def __init__(self) -> None:
        self.rows = np.full((PAGES, PAGE_SIZE, LATENT + ROPE), np.nan, np.float32)
        self.index = np.full((PAGES * PAGE_SIZE, INDEX_DIM), np.nan, np.float32)
        self.free = list(np.random.default_rng(1).permutation(PAGES))
        self.pages: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    def append(self, request: int, p: Projected) -> None:
        """Write a request's new tokens behind those it has."""
        pages, start = self.pages.setdefault(request, []), self.lens.get(request, 0)
        positions = start + np.arange(len(p.latent))
        while len(pages) * PAGE_SIZE <= positions[-1]:
            pages.append(int(self.free.pop()))
        slots = np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        parts = self.rows[:, :, None, :LATENT], self.rows[:, :, None, LATENT:]
        flashbsr.append_paged_kv_cache(
            p.latent[:, None], p.k_rope[:, None], paged_kv_cache=parts, slot_mapping=slots
        )
        self.index[slots] = p.index
        self.lens[request] = start + len(positions)

    def layout(self, requests: list[int], q_lens: list[int]) -> flashbsr.Paged:
        """Of a batch whose queries are each request's last tokens."""
        pages = [self.pages[r] for r in requests]
        return flashbsr.Paged(
            np.cumsum([0, *q_lens]), np.cumsum([0, *map(len, pages)]), np.concatenate(pages),
            kv_lens=np.array([self.lens[r] for r in requests]), page_size=PAGE_SIZE,
        )  # fmt: skip

    def best(self, request: int, index: np.ndarray, topk: int) -> tuple[np.ndarray, int]:
        """Tokens of the cache that the indexer gives most, for one query; and how many."""
        at = np.arange(self.lens[request])
        slots = np.array(self.pages[request])[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        scores = self.index[slots] @ index
        chosen = slots[np.argsort(-scores)[:topk]]
        return np.pad(chosen, (0, topk - len(chosen)), constant_values=-1), len(chosen)


def attention(**task: object) -> flashbsr.Attention:
    """Absorbed attention over the cache."""
    return flashbsr.Attention(
        flashbsr.AttentionSpec(causal=True, sm_scale=SM_SCALE),
        flashbsr.TaskInfo(HEADS, 1, LATENT + ROPE, head_dim_vo=LATENT, latent=True, **task),
    )
