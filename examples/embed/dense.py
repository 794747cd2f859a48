# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""What the example is compared with. Neither function knows flashbsr.

`embed_float64` decides whether the result is right: one sentence at a time, float64, written from
the formulas and sharing no arithmetic with `minilm.py`. `embed_padded` is the yardstick for speed:
what one does without a ragged attention, in the same fp32 NumPy as the example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .minilm import HEAD_DIM, HIDDEN, LAYER_NORM_EPS, NUM_HEADS, Rows, Weights, encode, pool

_erf = np.vectorize(math.erf, otypes=[np.float64])


def embed_float64(weights: Weights, sentences: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Embed token ids in float64, sentence by sentence. Returns (sentences, 384)."""

    def norm(x: NDArray[np.float64], scale_shift: tuple[Rows, Rows]) -> NDArray[np.float64]:
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + LAYER_NORM_EPS)
        return x * scale_shift[0] + scale_shift[1]

    def dense(x: NDArray[np.float64], weight: Rows, bias: Rows) -> NDArray[np.float64]:
        return x @ weight.T.astype(np.float64) + bias

    embeddings = []
    for ids in sentences:
        n = len(ids)
        x = weights.word[list(ids)].astype(np.float64) + weights.position[:n] + weights.token_type
        x = norm(x, weights.embedding_norm)
        for layer in weights.layers:
            qkv = dense(x, layer.qkv_weight, layer.qkv_bias)
            q, k, v = qkv.reshape(n, 3, NUM_HEADS, HEAD_DIM).transpose(1, 2, 0, 3)
            logits = q @ k.transpose(0, 2, 1) / math.sqrt(HEAD_DIM)  # (heads, n, n)
            p = np.exp(logits - logits.max(axis=2, keepdims=True))
            o = (p / p.sum(axis=2, keepdims=True)) @ v
            o = o.transpose(1, 0, 2).reshape(n, HIDDEN)
            x = norm(x + dense(o, layer.out_weight, layer.out_bias), layer.attention_norm)
            up = dense(x, layer.up_weight, layer.up_bias)
            up = up * (1.0 + _erf(up / math.sqrt(2.0))) / 2.0
            x = norm(x + dense(up, layer.down_weight, layer.down_bias), layer.output_norm)
        mean = x.mean(axis=0)
        embeddings.append(mean / np.linalg.norm(mean))
    return np.stack(embeddings)


def embed_padded(weights: Weights, sentences: Sequence[Sequence[int]]) -> Rows:
    """Embed token ids as one batch padded to its longest sentence, fp32. Returns (sentences, 384).

    Padding costs rows in every layer, and a mask keeps the padded keys out of the softmax.
    """
    lengths = np.array([len(ids) for ids in sentences])
    batch, longest = len(sentences), int(lengths.max())
    ids = np.zeros((batch, longest), np.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        row[: len(sentence)] = sentence
    real = np.arange(longest) < lengths[:, None]  # (batch, longest)
    bias = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, None, :]

    def attend(q: Rows, k: Rows, v: Rows) -> Rows:
        def heads(x: Rows) -> Rows:  # (batch, heads, longest, 32)
            return x.reshape(batch, longest, NUM_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)

        p: Rows = heads(q) @ heads(k).transpose(0, 1, 3, 2)
        p *= np.float32(HEAD_DIM**-0.5)
        p += bias
        p -= p.max(axis=3, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=3, keepdims=True)
        o: Rows = (p @ heads(v)).transpose(0, 2, 1, 3)
        return o.reshape(batch * longest, NUM_HEADS, HEAD_DIM)

    positions = np.tile(np.arange(longest), batch)
    hidden = encode(weights, ids.reshape(-1), positions, attend)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pool(hidden[real.reshape(-1)], indptr)
