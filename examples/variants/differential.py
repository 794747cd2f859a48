# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Differential attention: one softmax minus a part of another, over the same values.

    o_i = (softmax(q1_i . K1) - weight softmax(q2_i . K2)) V

Ye et al., "Differential Transformer", arXiv:2410.05258, section 2.1. Each softmax has a denominator
of its own, so they are two runs of one plan. The paper's `weight` is learned (lambda), its heads
have values of twice the dimension, and the result goes through a norm per head.

>>> import numpy as np
>>> from flashbsr import Attention, AttentionSpec, Ragged, TaskInfo
>>> q, k, v = (np.ones(s, np.float32) for s in ((5, 4, 64), (12, 2, 64), (12, 2, 128)))
>>> attention = Attention(AttentionSpec(causal=True), TaskInfo(4, 2, 64, head_dim_vo=128))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> differential(attention, (q, q), (k, -k), v, weight=0.8).shape
(5, 4, 128)
"""

from __future__ import annotations

from typing import Any

from flashbsr import Attention


def differential(
    attention: Attention, q: tuple[Any, Any], k: tuple[Any, Any], v: Any, *, weight: Any
) -> Any:
    """`q` and `k` in two halves, as ``(tokens, heads, dim)`` each; `attention` is planned."""
    first, second = (attention.run(q[i], (k[i], v)) for i in (0, 1))
    return first - weight * second
