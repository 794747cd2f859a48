# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Prefix-LM: tokens of the prompt see all of the prompt, tokens after it are causal.

    keep j < prefix[b]  or  j <= p,    p = kv_len - q_len + i

Dong et al. (UniLM), arXiv:1905.03197; Raffel et al. (T5), arXiv:1910.10683,
section 3.2.1; PaliGemma, arXiv:2407.07726.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((12, h, 64), np.float32) for h in (4, 2, 2))
>>> attention = Attention(prefix_lm(), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5, 12], [0, 5, 12]))
>>> attention.run(q, (k, v), prefix=np.array([3, 4], np.int32)).shape
(12, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec


def prefix_lm(**fields: Any) -> AttentionSpec:
    """`run` takes ``prefix``, int32 ``(batch_size,)``: tokens of each request's prompt."""

    def mask_mod(b, h, q_idx, kv_idx, q_position, prefix):
        return (kv_idx < prefix[b]) | (kv_idx <= q_position)

    return AttentionSpec.from_functions(
        mask_mod=mask_mod, extras={"prefix": ("int32", 1)}, **fields
    )
