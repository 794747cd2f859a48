# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""T5's relative bias: a learned number for each head and each bucket of distances.

    x'_ij = q_i . k_j + table[bucket(j - p), h],    p = kv_len - q_len + i

Raffel et al., arXiv:1910.10683, section 2.1. Half of the buckets are one distance each, the others
grow with its logarithm up to `max_distance`; T5 does not scale its logits.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> bias = by_distance(np.zeros((32, 4), np.float32), 12)
>>> attention = Attention(relative_bias(bias), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v)).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flashbsr import AttentionSpec


def by_distance(
    table: Any, max_len: int, *, bidirectional: bool = True, max_distance: int = 128
) -> Any:
    """Spread ``(num_buckets, num_heads)`` over distances: ``(num_heads, 2 max_len - 1)``.

    Once, on the host: kernels then load biases of neighbouring keys at once, and no logarithm in
    float32 puts a distance into the next bucket.
    """
    distance = np.arange(-max_len + 1, max_len)  # j - p
    half = len(table) // 2 if bidirectional else len(table)
    far = np.abs(distance) if bidirectional else np.maximum(-distance, 0)
    exact = half // 2
    steps = np.log(np.maximum(far, exact) / exact) / np.log(max_distance / exact) * (half - exact)
    bucket = np.where(far < exact, far, np.minimum(exact + steps.astype(int), half - 1))
    return np.ascontiguousarray(table[bucket + half * (bidirectional & (distance > 0))].T)


def relative_bias(bias: Any, **fields: Any) -> AttentionSpec:
    """`bias` is what `by_distance` made, where the run is."""
    middle = bias.shape[1] // 2  # distance 0

    def score_mod(score, b, h, q_idx, kv_idx, q_position):
        return score + bias[h, kv_idx - q_position + middle]

    return AttentionSpec.from_functions(score_mod=score_mod, **{"sm_scale": 1.0, **fields})
