# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-item scoring: a prefix, and items behind it that do not see each other."""

from __future__ import annotations

import functools
from typing import Any

from .spec import AttentionSpec
from .trace.functions import maximum
from .variant import Variant

__all__ = ["sees_items"]


@functools.cache
def sees_items() -> Variant:
    """Make the mask of multi-item scoring, which goes beside causality.

    Its extras are ``before``, the tokens of each request before its items, int32 [B], and
    ``within``, the position of each further token in its item, int32 [B, length]. A token of an
    item sees what lies before the items, and of its own item what lies behind the delimiter that
    begins it; delimiters, at position 0, see what lies before the items.
    """

    def keeps(
        b: Any, h: Any, q_idx: Any, kv_idx: Any, q_position: Any, before: Any, within: Any
    ) -> Any:
        del h, q_idx
        first = before[b]
        behind = within[b, maximum(q_position - first, 0)]
        return (q_position < first) | (kv_idx < first) | (q_position < kv_idx + behind)

    extras = {"before": ("int32", 1), "within": ("int32", 2)}
    variant = AttentionSpec.from_functions(mask_mod=keeps, extras=extras).variant
    assert variant is not None
    return variant
