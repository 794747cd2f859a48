# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""ALiBi with slopes of the caller: a penalty that grows with the distance, at a rate of each head.

    x'_ij = x_ij + slope[h] (j - p),    p = kv_len - q_len + i

Press et al., arXiv:2108.12409, section 3. `AttentionSpec(pos_encoding_mode="ALIBI")` with
``run(..., alibi_slopes=)`` is the same, built in.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
>>> attention = Attention(alibi(slopes, causal=True), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v)).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec


def alibi(slopes: Any, **fields: Any) -> AttentionSpec:
    """`slopes` ``(num_qo_heads,)`` lie where the run is, and every run reads them anew."""

    def score_mod(score, b, h, q_idx, kv_idx, q_position):
        return score + slopes[h] * (kv_idx - q_position)

    return AttentionSpec.from_functions(score_mod=score_mod, **fields)
