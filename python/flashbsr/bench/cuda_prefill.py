# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the workloads with more than one query token per request, and their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import flashbsr
import flashbsr.flashinfer
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
from .data import Pages
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


def _plan_sigmoid(w: Workload, gpu: Gpu) -> _Run:
    """Plan an engine of its own: no wrapper has another activation."""
    engine = flashbsr.Attention(
        flashbsr.AttentionSpec(causal=w.causal, activation="sigmoid", sigmoid_bias=SIGMOID_BIAS),
        flashbsr.TaskInfo(
            w.num_qo_heads,
            w.num_kv_heads,
            w.head_dim,
            q_dtype=w.dtype,
            kv_dtype=w.dtype,
            backend=gpu.backend,
        ),
    )
    engine.plan(_indptr(w.q_lens), _indptr(w.kv_lens))
    return lambda q, kv, out: engine.run(q, kv, out=out)


def _plan(w: Workload, gpu: Gpu, pages: Pages | None) -> _Run:
    """Plan the wrapper of the layout with what the variant asks for."""
    if w.variant == "sigmoid":
        return _plan_sigmoid(w, gpu)
    options: dict[str, Any] = {
        "causal": w.causal,
        "window_left": w.window_left,
        "q_data_type": w.dtype,
        "kv_data_type": w.kv_dtype or w.dtype,
        "fp8_accumulation": w.fp8_accumulation,
    }
    if w.variant == "soft-cap":
        options["logits_soft_cap"] = SOFT_CAP
    elif w.variant == "alibi":
        options["pos_encoding_mode"] = "ALIBI"
    elif w.variant == "mask":
        options |= {"causal": False, "packed_custom_mask": causal_bits(w)}
    elif w.variant == "tree":
        options["tree_parents"] = np.concatenate([tree_parents(n) for n in w.q_lens])
    extra = {"sinks": make_sinks(gpu, w)} if w.variant == "sinks" else {}
    heads = (w.num_qo_heads, w.num_kv_heads, w.head_dim)
    if pages is None:
        ragged = flashbsr.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(None, backend=gpu.backend)
        ragged.plan(_indptr(w.q_lens), _indptr(w.kv_lens), *heads, **options)
        return lambda q, kv, out: ragged.run(q, *kv, out=out, **extra)
    assert w.page_size is not None
    paged = flashbsr.flashinfer.BatchPrefillWithPagedKVCacheWrapper(None, backend=gpu.backend)
    table = (pages.indptr, pages.indices, pages.last_page_len)
    paged.plan(_indptr(w.q_lens), *table, *heads, w.page_size, **options)
    return lambda q, kv, out: paged.run(q, kv, out=out, **extra)


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
    if w.kind == "gpu-short":
        result.metrics |= {"us": seconds * 1e6, "gbs": io_bytes(w) / seconds * 1e-9}
    _add_twin(result, gpu)
    if w.peer and peer:
        add_peers(result, gpu)
    for name in ("flash", "cudnn"):
        if name in result.times:
            result.metrics[f"{name}_tflops"] = flops / result.times[name].median * 1e-12
    return result
