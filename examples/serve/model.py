# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The model's forward for a batch of sequences: NumPy for the matrices, flashbsr for attention.

A step holds any mix of decode rows (one token) and prefill chunks (many tokens). It is planned
once, and every layer runs that one plan on its own paged KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import flashbsr
import numpy as np
from numpy.typing import NDArray

from .weights import Config

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, ragged by request, and where their keys and values live."""

    tokens: Ints  # (n,) token ids
    qo_indptr: Ints  # (B + 1,) rows of each request
    kv_indptr: Ints  # (B + 1,) pages of each request
    kv_indices: Ints  # (kv_indptr[-1],) page ids
    kv_lens: Ints  # (B,) tokens in the cache once this step's are appended


@dataclass(slots=True)
class Timers:
    """Seconds spent, by part."""

    plan: float = 0.0
    attention: float = 0.0
    cache: float = 0.0  # RoPE and append
    forward: float = 0.0  # all of it, the plan included


def _rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    scale = np.einsum("nd,nd->n", x, x)[:, None] / np.float32(x.shape[1])
    return x / np.sqrt(scale + np.float32(eps)) * weight


def _silu(x: Floats) -> Floats:
    # exp overflows to inf below -88, where silu is 0 to float32: x / inf.
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


@dataclass(slots=True)
class _Layer:
    attn_norm: Floats  # (hidden,)
    wqkv: Floats  # (hidden, (q_heads + 2 kv_heads) head_dim)
    wo: Floats  # (q_heads head_dim, hidden)
    ffn_norm: Floats  # (hidden,)
    w_gate_up: Floats  # (hidden, 2 ffn)
    w_down: Floats  # (ffn, hidden)
    cache: Floats = field(repr=False)  # (num_pages, 2, page_size, kv_heads, head_dim)


class Model:
    """Weights and paged KV caches.

    Parameters
    ----------
    config : Config
    tensors : mapping of str to array
        As `weights.load` gives them; computed with in float32.
    num_pages, page_size : int
        Size of each layer's KV cache. It starts as NaN: slots that nobody wrote must not matter.
    share_prefixes : {"auto", "off"}
        Whether attention loads pages that requests share once.
    """

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, NDArray[np.floating]],
        num_pages: int,
        page_size: int,
        share_prefixes: str = "auto",
    ) -> None:
        self.config, self.page_size, self.share_prefixes = config, page_size, share_prefixes
        self.timers = Timers()
        shape = (num_pages, 2, page_size, config.kv_heads, config.head_dim)

        def columns(*names: str) -> Floats:
            stacked = np.concatenate([tensors[name] for name in names]).astype(np.float32)
            return np.ascontiguousarray(stacked.T)

        self._layers = [
            _Layer(
                attn_norm=tensors[f"layers.{i}.attn_norm"].astype(np.float32),
                wqkv=columns(*(f"layers.{i}.w{c}" for c in "qkv")),
                wo=columns(f"layers.{i}.wo"),
                ffn_norm=tensors[f"layers.{i}.ffn_norm"].astype(np.float32),
                w_gate_up=columns(f"layers.{i}.w_gate", f"layers.{i}.w_up"),
                w_down=columns(f"layers.{i}.w_down"),
                cache=np.full(shape, np.nan, np.float32),
            )
            for i in range(config.layers)
        ]
        self._embed = tensors["embed"].astype(np.float32)
        self._unembed = columns("embed")
        self._norm = tensors["norm"].astype(np.float32)
        task = flashbsr.TaskInfo(config.q_heads, config.kv_heads, config.head_dim)
        self._attention = flashbsr.Attention(flashbsr.AttentionSpec(causal=True), task)

    def forward(self, batch: Batch) -> Floats:
        """Appends the batch to the caches; the final hidden states `(n, hidden)`, normalised."""
        c, started = self.config, time.perf_counter()
        layout = flashbsr.Paged(
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            kv_lens=batch.kv_lens,
            page_size=self.page_size,
        )
        self._attention.plan(layout, share_prefixes=self.share_prefixes)
        self.timers.plan += time.perf_counter() - started
        n = len(batch.tokens)
        rows, positions = flashbsr.get_batch_indices_positions(batch.qo_indptr, batch.kv_lens, n)
        last_page_len = (batch.kv_lens - 1) % self.page_size + 1
        x = self._embed[batch.tokens]
        for layer in self._layers:
            h = _rms_norm(x, layer.attn_norm, c.norm_eps) @ layer.wqkv
            heads = h.reshape(n, c.q_heads + 2 * c.kv_heads, c.head_dim)
            q, k, v = np.split(heads, (c.q_heads, c.q_heads + c.kv_heads), axis=1)
            t0 = time.perf_counter()
            q, k = flashbsr.apply_rope_pos_ids(q, k, positions, rope_theta=c.rope_theta)
            flashbsr.append_paged_kv_cache(
                k,
                v,
                rows,
                positions,
                layer.cache,
                batch.kv_indices,
                batch.kv_indptr,
                last_page_len,
            )
            t1 = time.perf_counter()
            o = self._attention.run(q, layer.cache)
            t2 = time.perf_counter()
            self.timers.cache += t1 - t0
            self.timers.attention += t2 - t1
            x = x + o.reshape(n, -1) @ layer.wo
            h = _rms_norm(x, layer.ffn_norm, c.norm_eps) @ layer.w_gate_up
            x = x + (_silu(h[:, : c.ffn]) * h[:, c.ffn :]) @ layer.w_down
        x = _rms_norm(x, self._norm, c.norm_eps)
        self.timers.forward += time.perf_counter() - started
        return x

    def logits(self, hidden: Floats) -> Floats:
        """Logits `(m, vocab)` of final hidden states `(m, hidden)`."""
        return hidden @ self._unembed
