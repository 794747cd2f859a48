# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""QK-norm: rows of q and k are normalised before their product, and before RoPE.

    q'_i = w_q * q_i / sqrt(mean(q_i^2) + epsilon),    k'_j likewise with w_k

Dehghani et al. (ViT-22B), arXiv:2302.05442, section 2; with RMSNorm and a weight per dimension
as in Qwen3, arXiv:2505.09388, section 2. The cache holds keys as they came; a run normalises each
once per row tile and KV head. Who writes the cache may do it there instead, once for all runs.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> attention = Attention(qk_norm(causal=True, pos_encoding_mode="ROPE_LLAMA"), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> w = np.ones(64, np.float32)
>>> attention.run(q, (k, v), q_weight=w, k_weight=w, epsilon=1e-6).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec

TEXT = """
struct QKNorm : flashbsr::VariantBase {
  template <class Row, class Weight> void normalise(Row x, int dim, const Weight& weight) const {
    float sum = 0;
    for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
    const float scale = 1.0f / sqrt_of(sum / dim + epsilon);
    for (int d = 0; d < dim; ++d) x[d] = x[d] * scale * weight(d);
  }
  template <class Row> void query_transform(Row x, const RowAt& at) const {
    normalise(x, at.dim, q_weight);
  }
  template <class Row> void key_transform(Row x, const RowAt& at) const {
    normalise(x, at.dim, k_weight);
  }
};
"""


def qk_norm(**fields: Any) -> AttentionSpec:
    """`run` takes ``q_weight`` and ``k_weight``, float32 ``(head_dim,)``, and ``epsilon``."""
    extras = {"q_weight": ("float32", 1), "k_weight": ("float32", 1), "epsilon": "float32"}
    return AttentionSpec.from_source(TEXT, extras=extras, **fields)
