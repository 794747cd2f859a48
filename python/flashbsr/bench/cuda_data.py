# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of a workload on the device, and a float64 check of sampled rows there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cuda_timing import Gpu
from .data import TOLERANCE, Pages, page_table
from .workloads import ITEMSIZE, Workload, kv_bytes

__all__ = ["ROTATE_BYTES", "Row", "check_rows", "normal", "paged_rows", "paged_sets", "set_count"]

#: K/V that calls rotate over, so that it comes from memory and not from L2.
ROTATE_BYTES = 512 << 20


def normal(gpu: Gpu, shape: tuple[int, ...], dtype: str) -> Any:
    """Make a tensor of normally distributed numbers."""
    torch = gpu.torch
    if dtype.startswith("float8"):
        half = torch.randn(shape, dtype=torch.float16, device=gpu.device)
        return half.to(getattr(torch, dtype))
    return torch.randn(shape, dtype=getattr(torch, dtype), device=gpu.device)


def set_count(size: int) -> int:
    """How many sets of `size` bytes make a rotation."""
    return -(-ROTATE_BYTES // size)


def paged_sets(gpu: Gpu, w: Workload) -> tuple[list[Any], Pages]:
    """Stacked NHD caches, a rotation of them, and the page table they share."""
    assert w.page_size is not None
    pages = page_table(w.kv_lens, w.page_size)
    shape = (pages.count, 2, w.page_size, w.num_kv_heads, w.head_dim)
    caches = [normal(gpu, shape, w.kv_dtype or w.dtype) for _ in range(set_count(kv_bytes(w)))]
    return caches, pages


def io_bytes(w: Workload) -> int:
    """Bytes of q, of K and V (each element once) and of the output."""
    rows = 2 * sum(w.q_lens) * w.num_qo_heads * w.head_dim
    return kv_bytes(w) + rows * ITEMSIZE[w.dtype]


@dataclass(frozen=True, slots=True)
class Row:
    """An output row and what it is made of: q (head_dim,), visible k and v (visible, head_dim)."""

    got: Any
    q: Any
    k: Any
    v: Any


def paged_rows(w: Workload, q: Any, cache: Any, pages: Pages, out: Any) -> list[Row]:
    """Sample the shortest and the longest request: first, middle and last token, two heads."""
    assert w.page_size is not None
    rows = []
    starts = [sum(w.q_lens[:i]) for i in range(len(w.q_lens))]
    for request in {w.kv_lens.index(min(w.kv_lens)), w.kv_lens.index(max(w.kv_lens))}:
        q_len, kv_len = w.q_lens[request], w.kv_lens[request]
        page, slot = (x.tolist() for x in pages.tokens(request, kv_len, w.page_size))
        for token in sorted({0, q_len // 2, q_len - 1}):
            visible = kv_len - q_len + token + 1 if w.causal else kv_len
            for head in (0, w.num_qo_heads - 1):
                kv_head = head // (w.num_qo_heads // w.num_kv_heads)
                k, v = (cache[page, side, slot, kv_head][:visible] for side in (0, 1))
                at = starts[request] + token
                rows.append(Row(out[at, head], q[at, head], k, v))
    return rows


def check_rows(gpu: Gpu, name: str, rows: list[Row], dtype: str, scale: float) -> None:
    """Compare output rows with float64 attention before they are timed.

    Raises
    ------
    RuntimeError
        A row is off by more than the dtype allows.
    """
    torch = gpu.torch
    for row in rows:
        # float8 has no conversion to float64 of its own.
        q, k, v = (x.to(torch.float32).to(torch.float64) for x in (row.q, row.k, row.v))
        expected = torch.softmax(k @ q * scale, 0) @ v
        error = float((row.got.to(torch.float64) - expected).abs().max())
        allowed = TOLERANCE[dtype] * float(expected.abs().max())
        if not error <= allowed:
            raise RuntimeError(f"{name}: wrong result, off by {error:.3g}, allowed {allowed:.3g}")
