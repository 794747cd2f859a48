# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's ``scaled_dot_product_attention`` on the GPU, by backend, given its best.

Contiguous ``(batch, heads, tokens, dim)`` tensors; of the ways to say GQA the fastest is timed:
``enable_gqa=True``, or, without a mask, where that is exact, the query heads of a KV head as query
rows of that head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cuda_data import Row, check_rows, compute_bound, normal, set_count
from .cuda_timing import Gpu, measure
from .results import Result
from .timing import Samples
from .workloads import Workload, kv_bytes

__all__ = ["BACKENDS", "add_peers", "time_peers"]

#: Name in the results -> PyTorch's.
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def _sets(gpu: Gpu, w: Workload) -> list[tuple[Any, Any]]:
    shape = (len(w.kv_lens), w.num_kv_heads, w.kv_lens[0], w.head_dim)
    return [
        (normal(gpu, shape, w.dtype), normal(gpu, shape, w.dtype))
        for _ in range(set_count(kv_bytes(w)))
    ]


def _forms(w: Workload, q: Any, sets: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Ways to call it; each gives (batch, num_qo_heads, tokens, head_dim)."""
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    grouped = w.num_qo_heads != w.num_kv_heads
    if w.causal and w.q_lens[0] != w.kv_lens[0]:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(w.q_lens[0], w.kv_lens[0])

        def chunk(index: int) -> Any:
            k, v = sets[index % len(sets)]
            return sdpa(q, k, v, attn_mask=bias, enable_gqa=grouped)

        return {"lower right": chunk}

    def plain(index: int) -> Any:
        k, v = sets[index % len(sets)]
        return sdpa(q, k, v, is_causal=w.causal, enable_gqa=grouped)

    folded = q.reshape(len(w.q_lens), w.num_kv_heads, -1, w.head_dim)

    def fold(index: int) -> Any:
        k, v = sets[index % len(sets)]
        return sdpa(folded, k, v).reshape(q.shape)

    return {"gqa": plain} if w.causal or not grouped else {"gqa": plain, "fold": fold}


def time_peers(gpu: Gpu, w: Workload) -> dict[str, tuple[Samples, str]]:
    """Time every backend that takes the problem; name -> (samples, how it was called).

    Raises
    ------
    RuntimeError
        A backend computes something else than float64 attention.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch = gpu.torch
    batch, length, dim = len(w.q_lens), w.q_lens[0], w.head_dim
    q = normal(gpu, (batch, w.num_qo_heads, length, dim), w.dtype)
    sets = _sets(gpu, w)
    found: dict[str, tuple[Samples, str]] = {}
    for name, backend in BACKENDS.items():
        for form, call in _forms(w, q, sets).items():

            def run(index: int, call: Callable[[int], Any] = call, backend: str = backend) -> Any:
                with torch.inference_mode(), sdpa_kernel(getattr(SDPBackend, backend)):
                    return call(index)

            try:
                out = run(0)
            except RuntimeError:  # "No available kernel": this backend does not take it
                continue
            row = Row(out[-1, -1, -1], q[-1, -1, -1], *(x[-1, -1] for x in sets[0]))
            check_rows(gpu, name, [row], w)
            samples = measure(gpu.clock, run, len(sets), compute_bound=compute_bound(w))
            if name not in found or samples.median < found[name][0].median:
                found[name] = samples, form
    return found


def add_peers(result: Result, gpu: Gpu) -> None:
    """Time PyTorch's backends and note the ratios of their times to ours."""
    found = time_peers(gpu, result.workload)
    ours = result.times["flashbsr"].median
    for name, (samples, _) in found.items():
        result.times[name] = samples
        result.metrics[f"{name}_speedup"] = samples.median / ours
    result.note = ", ".join(f"{name}: {form}" for name, (_, form) in found.items())
