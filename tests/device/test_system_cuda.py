# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Accesses that other devices see, and the clock: system.cu."""

from __future__ import annotations

import numpy as np
import pytest
from driver import Gpu, compiled

SOURCE = "system.cu"
THREADS = 128


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
def test_compiles(target: str) -> None:
    assert len(compiled(SOURCE, target)) > 500


def test_copies_counts_and_time(gpu: Gpu, rng: np.random.Generator) -> None:
    kernel = gpu.function(SOURCE, f"sm_{gpu.capability[0]}{gpu.capability[1]}", "copies")
    rows = rng.integers(0, 2**32, (THREADS, 4), dtype=np.uint32)
    outputs = [
        np.empty((THREADS, 4), np.uint32),
        np.empty(THREADS, np.uint32),
        np.empty(THREADS + 1, np.uint32),
        np.empty(THREADS, np.uint32),
    ]
    out, words, counts, times = gpu.compute(kernel, THREADS, 0, [rows], outputs)
    np.testing.assert_array_equal(out, rows)
    np.testing.assert_array_equal(words, rows[:, 1])
    # Memory of outputs is poisoned with ones: the first thread finds 2^32 - 1, the next one 0.
    np.testing.assert_array_equal(np.sort(counts[:-1] + np.uint32(1)), np.arange(THREADS))
    assert counts[-1] == THREADS - 1
    assert (times >= 5000).all()
    assert (times < 1_000_000).all()
