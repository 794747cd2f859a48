# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""A bias tensor: a number of the caller's for each pair of query and key.

    x'_ij = x_ij + bias[i, j]

As AlphaFold 2 has it for pairs of residues (Jumper et al. 2021, doi:10.1038/s41586-021-03819-2,
supplementary algorithm 7), and `attn_mask` of PyTorch's `scaled_dot_product_attention` if it is of
floats. Elements of a row lie side by side along the keys: a vector of them is one load.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> attention = Attention(logits_bias(), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v), bias=np.zeros((5, 12), np.float32)).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec


def logits_bias(dtype: str = "float32", **fields: Any) -> AttentionSpec:
    """`run` takes ``bias``, an array of `dtype` for the longest request, with any strides."""

    def score_mod(score, b, h, q_idx, kv_idx, bias):
        return score + bias[q_idx, kv_idx]  # rank 4 and bias[b, h, ...]: one per request and head

    return AttentionSpec.from_functions(score_mod=score_mod, extras={"bias": (dtype, 2)}, **fields)
