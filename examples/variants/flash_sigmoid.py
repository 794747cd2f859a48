# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashSigmoid: a sigmoid of each logit instead of a softmax of the row.

    o_i = sum_j sigmoid(x_ij + bias) v_j,    x_ij = sm_scale q_i . k_j

Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
arXiv:2409.04431, eq. 3, where bias = -log(kv_len); the example of a variant in figure 5 of the
FlashInfer paper, arXiv:2501.01005. There is no LSE: nothing is normalised.

>>> import numpy as np
>>> from flashbsr import Attention, Ragged, TaskInfo
>>> q, k, v = (np.ones((n, h, 64), np.float32) for n, h in ((5, 4), (12, 2), (12, 2)))
>>> attention = Attention(flash_sigmoid(), TaskInfo(4, 2, 64))
>>> attention.plan(Ragged([0, 5], [0, 12]))
>>> attention.run(q, (k, v), bias=-2.5).shape
(5, 4, 64)
"""

from __future__ import annotations

from typing import Any

from flashbsr import AttentionSpec

TEXT = """
struct FlashSigmoid : flashbsr::VariantBase {
  static constexpr bool use_softmax = false;
  static constexpr bool weights_at_most_one = true;
  template <class M> auto activation(typename M::Float x) const { return M::sigmoid(x + bias); }
};
"""


def flash_sigmoid(**fields: Any) -> AttentionSpec:
    """`run` takes ``bias``, a number; `fields` are those of `AttentionSpec`."""
    return AttentionSpec.from_source(TEXT, extras={"bias": "float32"}, **fields)
