# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Soft-cap: logits stay between -cap and cap.

    x'_ij = cap tanh(x_ij / cap),    x_ij = sm_scale q_i . k_j

Gemma 2, arXiv:2408.00118, section 2. `AttentionSpec(logits_soft_cap=cap)` is the same, built in;
as a function it can be a step of another, and the cap is a number of the run, not of the spec.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> attention = Attention(soft_cap(causal=True), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v), cap=50.0).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

import flashbsr
from flashbsr import AttentionSpec


def soft_cap(**fields: Any) -> AttentionSpec:
    """`run` takes ``cap``, a number; `fields` are those of `AttentionSpec`."""

    def score_mod(score, b, h, q_idx, kv_idx, cap):
        return cap * flashbsr.tanh(score / cap)

    return AttentionSpec.from_functions(score_mod=score_mod, extras={"cap": "float32"}, **fields)
