# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the workloads with more than one query token per request, and their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import flashbsr
from flashbsr.arrays.dtypes import output_dtype

from .cuda_data import (
    SIGMOID_BIAS,
    SOFT_CAP,
    SOFT_CAP_GAIN,
    check_rows,
    compute_bound,
    io_bytes,
    make_sinks,
    normal,
    paged_kv,
    paged_sets,
    ragged_kv,
    sample_rows,
    set_count,
    tree_parents,
)
from .cuda_peers import add_peers
from .cuda_timing import Gpu, measure
from .data import Pages, task_info
from .results import Result
from .timing import Samples
from .workloads import Workload, attention_flops, kv_bytes

__all__ = ["prefill_call", "run_prefill"]

#: Runs (q, set of K/V, out) as planned.
_Run = Callable[[Any, Any, Any], Any]


def _indptr(lengths: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def causal_bits(w: Workload) -> np.ndarray:
    """Pack the causal mask into bits, each request from a byte on."""
    parts = {
        (q, kv): np.packbits(np.tri(q, kv, kv - q, dtype=bool), bitorder="little")
        for q, kv in zip(w.q_lens, w.kv_lens, strict=True)
    }
    return np.concatenate([parts[lens] for lens in zip(w.q_lens, w.kv_lens, strict=True)])


def _plan(w: Workload, gpu: Gpu, pages: Pages | None) -> _Run:
    """Plan the layout with what the variant asks for."""
    fields: dict[str, Any] = {"causal": w.causal, "window_left": w.window_left}
    options: dict[str, Any] = {}
    if w.variant == "sigmoid":
        fields |= {"activation": "sigmoid", "sigmoid_bias": SIGMOID_BIAS}
    elif w.variant == "soft-cap":
        fields["logits_soft_cap"] = SOFT_CAP
    elif w.variant == "alibi":
        fields["pos_encoding_mode"] = "ALIBI"
    elif w.variant == "mask":
        fields["causal"] = False
        options["packed_custom_mask"] = causal_bits(w)
    elif w.variant == "tree":
        options["tree_parents"] = np.concatenate([tree_parents(n) for n in w.q_lens])
    extra = {"sinks": make_sinks(gpu, w)} if w.variant == "sinks" else {}
    attention = flashbsr.Attention(flashbsr.AttentionSpec(**fields), task_info(w, gpu.backend))
    if pages is None:
        attention.plan(flashbsr.Ragged(_indptr(w.q_lens), _indptr(w.kv_lens)), **options)
    else:
        attention.plan(pages.layout(w.q_lens), **options)
    return lambda q, kv, out: attention.run(q, kv, out=out, **extra)


def prefill_call(w: Workload, gpu: Gpu) -> tuple[Callable[[int], Any], int]:
    """Plan, run and check a batch, paged or ragged; the call and its sets.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention.
    """
    q = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype)
    if w.variant == "soft-cap":
        q *= SOFT_CAP_GAIN
    out_type = getattr(gpu.torch, output_dtype(w.dtype))
    out = gpu.torch.full(q.shape, float("nan"), dtype=out_type, device=gpu.device)
    sets: list[Any]
    if w.page_size is None:
        shape = (sum(w.kv_lens), w.num_kv_heads, w.head_dim)
        count = set_count(kv_bytes(w))
        sets = [tuple(normal(gpu, shape, w.dtype) for _ in range(2)) for _ in range(count)]
        run = _plan(w, gpu, None)
        kv_of = ragged_kv(w, *sets[0])
    else:
        sets, pages = paged_sets(gpu, w)
        run = _plan(w, gpu, pages)
        kv_of = paged_kv(w, sets[0], pages)

    def call(index: int) -> Any:
        return run(q, sets[index], out)

    call(0)
    check_rows(gpu, "flashbsr", sample_rows(w, q, out, kv_of), w)
    return call, len(sets)


def _time(w: Workload, gpu: Gpu) -> Samples:
    return measure(gpu.clock, *prefill_call(w, gpu), compute_bound=compute_bound(w))


def _add_twin(result: Result, gpu: Gpu) -> None:
    """Time the same without what the workload is about, in the same run, and compare."""
    w, seconds = result.workload, result.times["flashbsr"].median
    if w.variant != "plain":
        # A mask says all there is to say: no tile is skipped for causality, which it replaces.
        causal = w.causal and w.variant != "mask"
        twin = result.times["plain"] = _time(replace(w, variant="plain", causal=causal), gpu)
        result.metrics["variant_penalty"] = seconds / twin.median - 1
    elif w.kv_dtype is not None:
        twin = result.times["16-bit KV"] = _time(replace(w, kv_dtype=None), gpu)
        result.metrics["kv16_fraction"] = twin.median / seconds
    elif w.kind == "gpu-prefill" and w.page_size is not None:
        twin = result.times["ragged"] = _time(replace(w, page_size=None), gpu)
        result.metrics["paged_penalty"] = seconds / twin.median - 1


def run_prefill(w: Workload, gpu: Gpu, *, peer: bool) -> Result:
    """Time a workload, its twin and, with `peer`, PyTorch's backends.

    Raises
    ------
    RuntimeError
        A side computes something else than float64 attention.
    """
    result = Result(w, {"flashbsr": _time(w, gpu)})
    seconds = result.times["flashbsr"].median
    flops = attention_flops(w)
    result.metrics["tflops"] = flops / seconds * 1e-12
    if w.kind in ("gpu-short", "gpu-chunk"):
        result.metrics |= {"us": seconds * 1e6, "gbs": io_bytes(w) / seconds * 1e-9}
    _add_twin(result, gpu)
    if w.peer and peer:
        add_peers(result, gpu)
    for name in ("flash", "cudnn"):
        if name in result.times:
            result.metrics[f"{name}_tflops"] = flops / result.times[name].median * 1e-12
    return result
