# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Random block-sparse matrices, and attention with a mask of its own for each KV head."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import reference
from cases import indptr
from compare import assert_attention
from reference import DTYPES, Variant


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers inside of NaN: whatever lies around must not matter."""
    return cases.strided(rng.standard_normal(shape).astype(DTYPES[dtype]), dtype)


def check_heads(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    masks: Any,
    out: np.ndarray,
    lse: np.ndarray,
    **variant: Any,
) -> None:
    """Compare, KV head by KV head, with its own dense mask; arrays have tokens first."""
    group, dtype = q.shape[1] // k.shape[1], q.dtype.name
    for h in range(k.shape[1]):
        queries, keys = slice(h * group, (h + 1) * group), slice(h, h + 1)
        exact, working = (
            reference.attend(
                q[:, queries],
                k[:, keys],
                v[:, keys],
                Variant(**variant),
                mask=masks[h],
                work=work,
                out_dtype=None if work is None else dtype,
            )
            for work in (None, dtype)
        )
        assert_attention(out[:, queries], lse[:, queries], exact, working, dtype, f"head {h}")


def random_rows(
    rng: np.random.Generator, rows: int, columns: int, kept: float = 0.5
) -> tuple[np.ndarray, np.ndarray]:
    """CSR of a random map, columns of a row in any order; some rows alike, some empty."""
    picked = [np.flatnonzero(rng.random(columns) < kept) for _ in range(rows)]
    for i in range(1, rows):
        if rng.random() < 0.3:
            picked[i] = picked[i - 1]
        elif rng.random() < 0.2:
            picked[i] = picked[i][:0]
        else:
            rng.shuffle(picked[i])
    indices = np.concatenate([np.zeros(0, np.int32), *picked]).astype(np.int32)
    return indptr([len(p) for p in picked]), indices
