# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Arrays of a workload, page tables, and a float64 check of sampled rows."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashbsr.engine.task import TaskInfo
from flashbsr.layout.layouts import Paged

from .workloads import Workload

__all__ = [
    "Arrays",
    "Pages",
    "check_rows",
    "numpy_dtype",
    "page_table",
    "share_first",
    "supports",
    "task_info",
]

# Relative to the largest value of the checked rows; P and O are rounded to the dtype at least once
# (of float8 only P is; a float64 reference that rounds its P to e4m3 is off by 2.7e-2 on average,
# and by more than 5e-2 in one row of a thousand).
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2, "float8_e4m3fn": 6e-2}


def supports(dtype: str) -> bool:
    """Whether NumPy can hold `dtype` here: bfloat16 needs the package ml_dtypes."""
    return dtype != "bfloat16" or importlib.util.find_spec("ml_dtypes") is not None


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name."""
    if dtype == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(dtype)


CACHE_LINE = 64  # bytes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate on a cache line, as PyTorch and serving engines do.

    NumPy's own large arrays begin 16 bytes past a page: every row of the cache then straddles a
    line more, which costs decode 14 %.
    """
    count = math.prod(shape)
    raw = np.empty(count * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + count * dtype.itemsize].view(dtype).reshape(shape)


@dataclass(slots=True)
class Arrays:
    """Makes arrays of one dtype, normally distributed, from one seed.

    A chunk of a few MiB is drawn once and repeated: drawing gigabytes would take longer than the
    measurement, and the values do not matter to the time.
    """

    dtype: str
    seed: int = 0
    _chunk: np.ndarray | None = None
    _drawn: int = 0

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """Make an array of `shape`; no two calls start at the same value."""
        if self._chunk is None:
            # An odd count, so that no axis of a power of two sees the same values twice.
            draw = np.random.default_rng(self.seed).standard_normal(1_500_007, dtype=np.float32)
            self._chunk = draw.astype(numpy_dtype(self.dtype))
        out = aligned_empty(shape, numpy_dtype(self.dtype))
        _fill(out, np.roll(self._chunk, 7919 * self._drawn))
        self._drawn += 1
        return out


def _fill(out: np.ndarray, chunk: np.ndarray) -> None:
    """Repeat `chunk` over the contiguous array `out`."""
    flat = out.reshape(-1)
    for start in range(0, flat.size, chunk.size):
        part = flat[start : start + chunk.size]
        part[:] = chunk[: part.size]


@dataclass(frozen=True, slots=True)
class Pages:
    """A page table; int32 arrays."""

    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray
    page_size: int

    def layout(self, queries: tuple[int, ...] | np.ndarray | None = None) -> Paged:
        """Who meets whom; `queries` are lengths, or where they begin; None: one each."""
        qo_indptr = queries
        if isinstance(queries, tuple):
            qo_indptr = np.cumsum([0, *queries]).astype(np.int32)
        return Paged(
            qo_indptr,
            self.indptr,
            self.indices,
            last_page_len=self.last_page_len,
            page_size=self.page_size,
        )

    @property
    def count(self) -> int:
        """Pages in the table."""
        return int(self.indptr[-1])

    def tokens(self, request: int, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
        """(page, offset in the page) of every token of a request."""
        position = np.arange(kv_len)
        pages = self.indices[self.indptr[request] : self.indptr[request + 1]]
        return pages[position // self.page_size], position % self.page_size


def page_table(kv_lens: tuple[int, ...], page_size: int, seed: int = 0) -> Pages:
    """Pages in random order, every page used once."""
    lengths = np.asarray(kv_lens, np.int64)
    pages = -(-lengths // page_size)
    indptr = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    indices = np.random.default_rng(seed).permutation(int(indptr[-1])).astype(np.int32)
    last = (lengths - (pages - 1) * page_size).astype(np.int32)
    return Pages(indptr, indices, last, page_size)


def share_first(pages: Pages, tokens: int) -> None:
    """Let all requests begin with the first one's pages of `tokens` tokens, which each has."""
    count = tokens // pages.page_size
    for begin in pages.indptr[:-1]:
        pages.indices[begin : begin + count] = pages.indices[:count]


def task_info(w: Workload, backend: str = "cpu") -> TaskInfo:
    """Heads and types of a workload, where it runs."""
    return TaskInfo(
        w.num_qo_heads,
        w.num_kv_heads,
        w.head_dim,
        kv_layout=w.kv_layout,
        q_dtype=w.dtype,
        kv_dtype=w.kv_dtype or w.dtype,
        backend=backend,
        fp8_accumulation=w.fp8_accumulation,
    )


def check_rows(
    name: str,
    got: np.ndarray,
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    dtype: str,
) -> None:
    """Compare sampled output rows with float64 attention before they are timed.

    Parameters
    ----------
    name : str
        Who computed `got`, for the message.
    got : ndarray, shape (n, head_dim)
    rows : list of (q, k, v, scale)
        Per row: q of shape (head_dim,), the visible k and v of shape (visible, head_dim), and the
        scale of the logits.
    dtype : str

    Raises
    ------
    RuntimeError
        A row is off by more than the dtype allows.
    """
    for row, (q, k, v, scale) in zip(got, rows, strict=True):
        logits = k.astype(np.float64) @ q.astype(np.float64) * float(scale)
        weights = np.exp(logits - logits.max())
        expected = (weights / weights.sum()) @ v.astype(np.float64)
        error = float(np.abs(row.astype(np.float64) - expected).max())
        allowed = TOLERANCE[dtype] * float(np.abs(expected).max())
        if not error <= allowed:
            raise RuntimeError(f"{name}: wrong result, off by {error:.3g}, allowed {allowed:.3g}")
