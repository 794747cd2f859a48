# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""Decode, chunks of prompts and appends over caches of codes with scales of tokens and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import flashbsr

from .codes import code_scale
from .cuda_data import check_rows, compute_bound, io_bytes, normal, sample_rows, set_count
from .cuda_prefill import prefill_call
from .cuda_timing import Gpu, measure
from .data import Pages, page_table, task_info
from .results import Result
from .workloads import ITEMSIZE, SCALES, Workload, attention_flops, kv_bytes

__all__ = ["run_append_codes", "run_codes"]


def _side(w: Workload, gpu: Gpu, pages: Pages) -> tuple[Any, Any]:
    """K or V: random codes, and scales that are all alike."""
    torch = gpu.torch
    assert w.kv_dtype is not None
    assert w.page_size is not None
    inner = (w.page_size, w.num_kv_heads) if w.kv_layout == "NHD" else (w.num_kv_heads, w.page_size)
    shape = (pages.count, *inner)
    if w.kv_dtype == "float8_e4m3fn":
        scale = torch.full(shape, 0.5, dtype=torch.float32, device=gpu.device)
        return normal(gpu, (*shape, w.head_dim), w.kv_dtype), scale
    whole = w.kv_dtype == "int8"
    row = w.head_dim // (1 if whole else 2)
    codes = torch.randint(0, 256, (*shape, row), dtype=torch.uint8, device=gpu.device)
    groups = SCALES[w.kv_dtype](w.head_dim)[0]
    sizes = shape if groups == 1 else (*shape, groups)
    one = code_scale(w.kv_dtype)
    if w.kv_dtype == "nvfp4":
        bits = torch.full(sizes, int(one), dtype=torch.uint8, device=gpu.device)
        return codes, bits.view(torch.float8_e4m3fn)
    scale = torch.full(sizes, float(one), dtype=torch.float32, device=gpu.device)
    return codes.view(torch.int8) if whole else codes, scale


def _kv_of(w: Workload, gpu: Gpu, cache: Any, pages: Pages) -> Callable[[int], tuple[Any, Any]]:
    """Look up K and V of a request, (kv_len, num_kv_heads, head_dim), as what the codes mean."""

    def of(request: int) -> tuple[Any, Any]:
        page, slot = (x.tolist() for x in pages.tokens(request, w.kv_lens[request]))
        at = (page, slot) if w.kv_layout == "NHD" else (page, slice(None), slot)
        k, v = (
            flashbsr.dequantize_kv_cache(
                codes[at].cpu(), scale[at].cpu(), kv_dtype=w.kv_dtype, dtype="float32"
            )
            for codes, scale in cache
        )  # fmt: skip
        return k.to(gpu.device), v.to(gpu.device)

    return of


def run_codes(w: Workload, gpu: Gpu) -> Result:
    """Time a step over codes; of chunks of prompts also the same over K and V of 16 bits.

    Raises
    ------
    RuntimeError
        A row is something else than float64 attention over what the codes mean.
    """
    assert w.page_size is not None
    pages = page_table(w.kv_lens, w.page_size)
    caches = [(_side(w, gpu, pages), _side(w, gpu, pages)) for _ in range(set_count(kv_bytes(w)))]
    chunks = max(w.q_lens) > 1
    spec = flashbsr.AttentionSpec(causal=w.causal)
    attention = flashbsr.Attention(spec, task_info(w, gpu.backend))
    attention.plan(pages.layout(w.q_lens) if chunks else pages.layout())
    q = normal(gpu, (sum(w.q_lens), w.num_qo_heads, w.head_dim), w.dtype)
    out = gpu.torch.full_like(q, float("nan"))

    def call(index: int) -> Any:
        (k, k_scale), (v, v_scale) = caches[index]
        return attention.run(q, (k, v), out=out, k_scale=k_scale, v_scale=v_scale)

    call(0)
    rows = sample_rows(w, q, out, _kv_of(w, gpu, caches[0], pages))
    check_rows(gpu, "flashbsr", rows, w)
    bound = compute_bound(w)
    result = Result(w, {"flashbsr": measure(gpu.clock, call, len(caches), compute_bound=bound)})
    seconds = result.times["flashbsr"].median
    result.metrics |= {"us": seconds * 1e6, "gbs": io_bytes(w) / seconds * 1e-9}
    if chunks:
        twin = prefill_call(replace(w, kind="gpu-short", kv_dtype=None), gpu)
        samples = result.times["16-bit KV"] = measure(gpu.clock, *twin, compute_bound=bound)
        result.metrics["tflops"] = attention_flops(w) / seconds * 1e-12
        result.metrics["kv16_fraction"] = samples.median / seconds
    return result


def run_append_codes(w: Workload, gpu: Gpu) -> Result:
    """Time an append of all tokens, as codes, into permuted pages.

    Raises
    ------
    RuntimeError
        The last tokens' codes or scales are not what the CPU makes of them.
    """
    torch = gpu.torch
    pages = page_table(w.kv_lens, w.page_size or 1)
    requests = range(len(w.q_lens))
    slots = np.concatenate([_slots(pages, i, w.q_lens[i]) for i in requests])
    mapping = torch.from_numpy(slots).to(gpu.device)
    shape = (len(slots), w.num_kv_heads, w.head_dim)
    size = kv_bytes(w) + 2 * math.prod(shape) * ITEMSIZE[w.dtype]
    caches = [(_side(w, gpu, pages), _side(w, gpu, pages)) for _ in range(set_count(size))]
    rows = [(normal(gpu, shape, w.dtype), normal(gpu, shape, w.dtype)) for _ in caches]

    def call(index: int) -> None:
        _append(w, rows[index], caches[index], mapping)

    call(0)
    _check_append(w, gpu, rows[0], caches[0], mapping)
    samples = measure(gpu.clock, call, len(caches))
    seconds = samples.median
    metrics = {"us": seconds * 1e6, "gbs": size / seconds * 1e-9}
    return Result(w, {"flashbsr": samples}, metrics)


def _slots(pages: Pages, request: int, tokens: int) -> np.ndarray:
    page, at = pages.tokens(request, tokens)
    return np.asarray(page * pages.page_size + at, np.int64)


def _append(w: Workload, rows: Any, cache: Any, mapping: Any) -> None:
    (k, k_scale), (v, v_scale) = cache
    flashbsr.append_paged_kv_cache(
        rows[0], rows[1], paged_kv_cache=(k, v), slot_mapping=mapping, k_scale=k_scale,
        v_scale=v_scale, kv_dtype=w.kv_dtype,
    )  # fmt: skip


def _check_append(w: Workload, gpu: Gpu, rows: Any, cache: Any, mapping: Any) -> None:
    """Compare what the last tokens became with what the CPU makes of them, bit for bit."""
    size, tokens = w.page_size or 1, mapping[-64:]
    count = len(tokens)
    here = [
        tuple(x.new_zeros((count // size, *x.shape[1:]), device="cpu") for x in side)
        for side in cache
    ]
    _append(w, [x[-count:].cpu() for x in rows], here, gpu.torch.arange(count))

    def each_token(x: Any) -> Any:  # float8 has no look-up of its own
        return x[..., None].view(gpu.torch.uint8).flatten(0, 1)

    for side, expected in zip(cache, here, strict=True):
        for x, y in zip(side, expected, strict=True):
            if not each_token(x)[tokens].cpu().equal(each_token(y)):
                raise RuntimeError("append_paged_kv_cache: codes or scales differ from the CPU's")
