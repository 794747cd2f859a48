# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tree mask for speculative decoding: a draft token sees the context and its own ancestors.

    keep j < context  or  j - context in {i, parent[i], parent[parent[i]], ...}

Miao et al. (SpecInfer), arXiv:2305.09781, section 4; Cai et al. (Medusa), arXiv:2401.10774,
section 2.1.2. The draft's keys are the last of each request's cache; all branches are verified in
one run, by the kernels of a decode step. Here the mask is written out; `flashbsr.draft_trees` and
``plan(tree_parents=)`` say the same without the bits of the context.

>>> import numpy as np
>>> from flashbsr import Attention, AttentionSpec, Paged, TaskInfo
>>> q, cache = np.ones((4, 4, 64), np.float32), np.ones((8, 2, 16, 2, 64), np.float32)
>>> mask = tree_mask([-1, 0, 0, 1], kv_len=20)  # two guesses after token 0, one after the first
>>> attention = Attention(AttentionSpec(), TaskInfo(4, 2, 64))
>>> layout = Paged([0, 4], [0, 2], [5, 3], kv_lens=[20], page_size=16)
>>> attention.plan(layout, custom_mask=mask.ravel())
>>> attention.run(q, cache).shape
(4, 4, 64)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flashbsr import FlashbsrError


def tree_mask(parents: Sequence[int], kv_len: int) -> np.ndarray:
    """Boolean ``(len(parents), kv_len)``; masks of several requests are joined after `ravel`.

    `parents` are indices of draft tokens, -1 for those that follow the context; parents come first.
    """
    context = kv_len - len(parents)
    mask = np.zeros((len(parents), kv_len), bool)
    mask[:, :context] = True
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise FlashbsrError(f"parents[{i}]", parent, f"-1, or an earlier token's, below {i}")
        if parent >= 0:
            mask[i] |= mask[parent]
        mask[i, context + i] = True
    return mask
