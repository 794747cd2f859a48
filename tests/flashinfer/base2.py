# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of the door's results: its LSE is in base 2, the reference's is natural."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
from cases import Problem

__all__ = ["compare", "natural"]


def natural(lse: Any) -> np.ndarray:
    """An LSE of base 2 in base e."""
    return np.asarray(lse, np.float32) * np.float32(np.log(2))


def compare(problem: Problem, out: np.ndarray, lse: np.ndarray | None = None) -> None:
    """`harness.compare` with an LSE of base 2; None: that of the reference."""
    harness.compare(problem, out, problem.reference().lse if lse is None else natural(lse))
