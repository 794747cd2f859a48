# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-item scoring: a prefix, and items behind it that do not see each other."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..arrays import adapter_for
from ..arrays.types import Array
from ..errors import FlashbsrError, ShapeError
from .spec import AttentionSpec
from .trace.functions import maximum
from .variant import Variant

__all__ = ["items", "sees_items"]


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


def items(prefix_len: Array, positions: Array, length: int, batch: int) -> dict[str, Array]:
    """Make the extras of `sees_items` of arrays of any integers, ``positions`` [batch * length]."""
    found = []
    for name, x, count in (
        ("prefix_len_ptr", prefix_len, batch),
        ("token_pos_in_items_ptr", positions, batch * length),
    ):
        if x is None:
            raise FlashbsrError(name, None, "an array, as the other one of multi-item scoring")
        adapter = adapter_for(x, name)
        size = math.prod(x.shape)
        if size < count:
            raise ShapeError(name, f"{size} elements", f"{count}: of {batch} requests")
        found.append(adapter.cast(x.reshape(-1), "int32")[:count])
    return {"before": found[0], "within": found[1].reshape(batch, length)}
