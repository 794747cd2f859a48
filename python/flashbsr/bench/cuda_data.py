# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors of a workload on the device, and a float64 check of sampled rows there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashbsr.arrays.dtypes import output_dtype

from .cuda_timing import Gpu
from .data import TOLERANCE, Pages, page_table
from .workloads import ITEMSIZE, Workload, attention_flops, kv_bytes

__all__ = [
    "ROTATE_BYTES",
    "SIGMOID_BIAS",
    "SOFT_CAP",
    "SOFT_CAP_GAIN",
    "Row",
    "check_rows",
    "compute_bound",
    "io_bytes",
    "make_sinks",
    "normal",
    "paged_kv",
    "paged_sets",
    "ragged_kv",
    "sample_rows",
    "set_count",
    "tree_parents",
]

#: K/V that calls rotate over, so that it comes from memory and not from L2.
ROTATE_BYTES = 512 << 20

#: Where an H200 turns from bound by memory (4.55 TB/s) to bound by products (800 TFLOP/s).
FLOPS_PER_BYTE = 180

# Values of variants: such that a result without the variant is wrong by far. The cap is Gemma 2's,
# whose logits are not those of normal numbers: q is multiplied for them.
SOFT_CAP = 50.0
SOFT_CAP_GAIN = 8.0
SIGMOID_BIAS = -8.0


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
    rows = sum(w.q_lens) * w.num_qo_heads * w.head_dim
    return kv_bytes(w) + rows * (ITEMSIZE[w.dtype] + ITEMSIZE[output_dtype(w.dtype)])


def compute_bound(w: Workload) -> bool:
    """Whether products take longer than reading and writing, on a device of this balance."""
    return attention_flops(w) > FLOPS_PER_BYTE * io_bytes(w)


def make_sinks(gpu: Gpu, w: Workload) -> Any:
    """Sinks that weigh about as much as a thousand keys, another for each head."""
    torch = gpu.torch
    return torch.linspace(6, 8, w.num_qo_heads, dtype=torch.float32, device=gpu.device)


@dataclass(frozen=True, slots=True)
class Row:
    """An output row and what it is made of.

    Attributes
    ----------
    got, q : tensor, shape (head_dim,)
    k, v : tensor, shape (visible, head_dim)
    head : int
        Of the query.
    position : int
        The query's, counted from the first visible key.
    """

    got: Any
    q: Any
    k: Any
    v: Any
    head: int = 0
    position: int = 0


def paged_kv(w: Workload, cache: Any, pages: Pages) -> Callable[[int], tuple[Any, Any]]:
    """Look up K and V of a request in the pages, both (kv_len, num_kv_heads, head_dim)."""

    def of(request: int) -> tuple[Any, Any]:
        page, slot = (x.tolist() for x in pages.tokens(request, w.kv_lens[request]))
        return cache[page, 0, slot], cache[page, 1, slot]

    return of


def ragged_kv(w: Workload, k: Any, v: Any) -> Callable[[int], tuple[Any, Any]]:
    """Likewise of contiguous requests."""

    def of(request: int) -> tuple[Any, Any]:
        start = sum(w.kv_lens[:request])
        end = start + w.kv_lens[request]
        return k[start:end], v[start:end]

    return of


def tree_parents(q_len: int) -> list[int]:
    """Drafts of which each has two continuations: 7 are all guesses of depth 0 to 2."""
    return [(token - 1) // 2 for token in range(q_len)]


def _visible(w: Workload, request: int, token: int) -> list[int] | slice:
    """Keys that a query token sees."""
    q_len, kv_len = w.q_lens[request], w.kv_lens[request]
    position = kv_len - q_len + token
    if w.variant == "tree":
        seen, parents = [token], tree_parents(q_len)
        while parents[seen[0]] >= 0:
            seen.insert(0, parents[seen[0]])
        return [*range(kv_len - q_len), *(kv_len - q_len + draft for draft in seen)]
    begin = max(0, position - w.window_left) if w.window_left >= 0 else 0
    return slice(begin, position + 1 if w.causal else kv_len)


def sample_rows(
    w: Workload, q: Any, out: Any, kv_of: Callable[[int], tuple[Any, Any]]
) -> list[Row]:
    """Sample the shortest and the longest requests: first, middle and last token, two heads."""
    rows = []
    starts = [sum(w.q_lens[:i]) for i in range(len(w.q_lens))]
    for request in {
        lens.index(most(lens)) for lens in (w.q_lens, w.kv_lens) for most in (min, max)
    }:
        q_len, kv_len = w.q_lens[request], w.kv_lens[request]
        kv = kv_of(request)
        for token in sorted({0, q_len // 2, q_len - 1}):
            at, position = starts[request] + token, kv_len - q_len + token
            seen = _visible(w, request, token)
            begin = seen.start if isinstance(seen, slice) else 0
            for head in (0, w.num_qo_heads - 1):
                k, v = (x[seen, head // (w.num_qo_heads // w.num_kv_heads)] for x in kv)
                rows.append(Row(out[at, head], q[at, head], k, v, head, position - begin))
    return rows


def _weights(gpu: Gpu, w: Workload, row: Row, logits: Any) -> Any:
    """Weights of the values by the formulas of the variant, from scaled logits."""
    torch = gpu.torch
    if w.variant == "soft-cap":
        logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
    if w.variant == "alibi":
        slope = 2.0 ** (-8 * (row.head + 1) / w.num_qo_heads)  # heads are a power of two
        logits = logits + slope * (torch.arange(len(logits), device=gpu.device) - row.position)
    if w.variant == "sigmoid":
        return torch.sigmoid(logits + SIGMOID_BIAS)
    if w.variant == "sinks":
        sink = make_sinks(gpu, w)[row.head :][:1].to(torch.float64)
        return torch.softmax(torch.cat([logits, sink]), 0)[:-1]
    return torch.softmax(logits, 0)


def check_rows(gpu: Gpu, name: str, rows: list[Row], w: Workload) -> None:
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
        expected = _weights(gpu, w, row, k @ q * w.head_dim**-0.5) @ v
        error = float((row.got.to(torch.float64) - expected).abs().max())
        allowed = TOLERANCE[w.dtype] * float(expected.abs().max())
        if not error <= allowed:
            raise RuntimeError(f"{name}: wrong result, off by {error:.3g}, allowed {allowed:.3g}")
