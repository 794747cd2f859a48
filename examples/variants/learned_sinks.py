# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Learned sinks: a logit of each head that takes probability and has no value.

    o_i = sum_j exp(x_ij) v_j / (exp(sink[h]) + sum_j exp(x_ij))

gpt-oss model card, arXiv:2508.10925 (every other layer has a window of 128 tokens);
Miller, "Attention Is Off By One", 2023, is sink = 0. Built in: the term joins the denominator in
the epilogue, so no key is added and the inner loop is the plain one.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> attention = Attention(learned_sinks(window=128), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v), sinks=np.zeros(4, np.float32)).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec


def learned_sinks(window: int | None = None, **fields: Any) -> AttentionSpec:
    """`window` counts the query's own position, as models' configurations do; None sees all."""
    return AttentionSpec(causal=True, window_left=-1 if window is None else window - 1, **fields)
