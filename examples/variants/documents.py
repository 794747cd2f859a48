# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one sequence: a token sees those of its own document, up to itself.

    keep document[i] = document[j]  and  j <= i

Krell et al., "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027. The mask
is found to be causality within spans, so that nothing between documents is computed and no kernel
tests a mask.

>>> import numpy as np
>>> from flashbsr import Attention, AttentionSpec, TaskInfo
>>> q, k, v = (np.ones((12, h, 64), np.float32) for h in (4, 2, 2))
>>> spans = documents(np.repeat([0, 1, 2], [3, 4, 5]))
>>> attention = Attention(AttentionSpec(**spans.fields), TaskInfo(4, 2, 64))
>>> attention.plan(spans.layout())
>>> attention.run(q, (k, v)).shape, spans.kv_indptr.tolist()
((12, 4, 64), [0, 3, 7, 12])
"""

from __future__ import annotations

from typing import Any

from flashbsr import SpanMask, span_mask


def documents(document: Any) -> SpanMask:
    """`document` ``(tokens,)``: the number of each token's document, in one run each."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (kv_idx <= q_idx)

    return span_mask(mask_mod, len(document), len(document))
