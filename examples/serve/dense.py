# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""The reference: one sequence at once, dense attention, no cache, no flashbsr, float64.

It is written from the formulas, to be obviously right; `dtype=float32` runs the same formulas in
the engine's precision, which tells how far float32 may be away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .weights import Config

Array = NDArray[np.floating]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def rope(x: Array, positions: NDArray[np.int64], theta: float) -> Array:
    """Rotary embedding of `x (n, H, D)`, dimension `i` paired with `i + D/2` (NeoX)."""
    half = x.shape[-1] // 2
    inverse = (theta ** (-np.arange(half) / half)).astype(x.dtype)
    angle = positions.astype(x.dtype)[:, None, None] * inverse
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """`softmax(q k^T / sqrt(D) + mask) v`; q `(n, H_qo, D)`, k and v `(n, H_kv, D)`."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    out = np.empty_like(q)
    hidden = np.triu(np.ones((n, n), dtype=bool), 1)
    for h in range(heads):
        logits = q[:, h] @ k[:, h // group].T / np.sqrt(q.dtype.type(dim))
        logits[hidden] = -np.inf
        out[:, h] = softmax(logits) @ v[:, h // group]
    return out


def forward(
    config: Config,
    tensors: Mapping[str, Array],
    tokens: Sequence[int],
    dtype: DTypeLike = np.float64,
    attend: Callable[[Array, Array, Array], Array] = causal_attention,
) -> Array:
    """Logits `(n, vocab_size)` of `n` tokens at positions `0 .. n-1`."""
    w = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    n, positions = len(tokens), np.arange(len(tokens))
    x = w["embed"][np.asarray(tokens)]
    for i in range(config.layers):
        at = f"layers.{i}."
        h = rms_norm(x, w[at + "attn_norm"], config.norm_eps)
        q = (h @ w[at + "wq"].T).reshape(n, config.q_heads, config.head_dim)
        k = (h @ w[at + "wk"].T).reshape(n, config.kv_heads, config.head_dim)
        v = (h @ w[at + "wv"].T).reshape(n, config.kv_heads, config.head_dim)
        q, k = rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta)
        x = x + attend(q, k, v).reshape(n, -1) @ w[at + "wo"].T
        h = rms_norm(x, w[at + "ffn_norm"], config.norm_eps)
        gate, up = h @ w[at + "w_gate"].T, h @ w[at + "w_up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "w_down"].T
    return rms_norm(x, w["norm"], config.norm_eps) @ w["embed"].T
