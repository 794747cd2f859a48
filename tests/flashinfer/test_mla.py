# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's MLA: the wrapper and the function, against float64."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr import flashinfer
from flashbsr.flashinfer.mla import (
    BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla,
)
from harness import Device
from reference import DTYPES

SCALE = 192**-0.5
HEADS = 16


def attend(q: np.ndarray, kv: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    logits = np.einsum("qhd,kd->qhk", q, kv) * SCALE
    last = len(kv) - len(q) + np.arange(len(q)) if causal else np.full(len(q), len(kv) - 1)
    logits = np.where((np.arange(len(kv)) <= last[:, None])[:, None], logits, -np.inf)
    top = logits.max(-1)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(-1)
    return np.einsum("qhk,kd->qhd", weights / total[..., None], kv[:, :512]), top + np.log(total)


def problem(device: Device, q_lens: list[int], kv_lens: list[int], page_size: int) -> Any:
    rng = np.random.default_rng(0)
    dtype = np.float16 if device.is_cuda else np.float32
    counts = [-(-n // page_size) for n in kv_lens]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(int(indptr[-1]) + 2)[: indptr[-1]].astype(np.int32)
    cache = np.full((len(indices) + 2, page_size, 576), np.nan, dtype)
    rows = [rng.standard_normal((n, 576)).astype(dtype) for n in kv_lens]
    for begin, row in zip(indptr, rows, strict=False):
        at = np.arange(len(row))
        cache[indices[begin + at // page_size], at % page_size] = row
    q = rng.standard_normal((sum(q_lens), HEADS, 576)).astype(dtype)
    return q, cache, indptr, indices, rows


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("natural", [False, True])
def test_wrapper(device: Device, page_size: int, natural: bool) -> None:
    q_lens, kv_lens = [1, 4, 30], [65, 700, 31]
    q, cache, indptr, indices, rows = problem(device, q_lens, kv_lens, page_size)
    ends = np.cumsum([0, *q_lens]).astype(np.int32)
    wrapper = BatchMLAPagedAttentionWrapper(None)
    put = device.put
    wrapper.plan(
        put(ends), put(indptr), put(indices), put(np.array(kv_lens, np.int32)), HEADS, 512, 64,
        page_size, True, SCALE, str(q.dtype), str(q.dtype),
    )  # fmt: skip
    parts = [put(np.ascontiguousarray(x)) for a in (q, cache) for x in (a[..., :512], a[..., 512:])]
    out, lse = wrapper.run(*parts, return_lse=True, return_lse_base_on_e=natural)
    for i, row in enumerate(rows):
        expected, expected_lse = attend(q[ends[i] : ends[i + 1]], row, True)
        here = slice(ends[i], ends[i + 1])
        np.testing.assert_allclose(device.get(out)[here], expected, atol=2e-3, rtol=2e-3)
        unit = 1 if natural else np.log(2)
        np.testing.assert_allclose(device.get(lse)[here] * unit, expected_lse, atol=2e-3)
    alone = wrapper.run(*parts)
    np.testing.assert_array_equal(device.get(alone), device.get(out))


def test_float8_latents(device: Device) -> None:
    """One number for latents and rotated keys."""
    kv_lens = [65, 700]
    q, cache, indptr, indices, rows = problem(device, [1, 1], kv_lens, 64)
    codes = (cache.astype(np.float32) / 0.25).astype(DTYPES["float8_e4m3fn"])
    wrapper = BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(
        np.arange(3), indptr, indices, np.array(kv_lens), HEADS, 512, 64, 64, False, SCALE,
        str(q.dtype), "float8_e4m3fn",
    )  # fmt: skip
    parts = [device.put(np.ascontiguousarray(x)) for a in (q, codes)
             for x in (a[..., :512], a[..., 512:])]  # fmt: skip
    out = wrapper.run(*parts, ckv_scale=0.25, kpe_scale=0.25)
    for i, row in enumerate(rows):
        means = (row.astype(np.float32) / 0.25).astype(codes.dtype).astype(np.float32) * 0.25
        expected, _ = attend(q[i : i + 1], means, False)
        np.testing.assert_allclose(device.get(out)[i : i + 1], expected, atol=2e-3, rtol=2e-3)


def test_lse_alone(device: Device) -> None:
    """An `lse` without `return_lse` is written, in either base."""
    q, cache, indptr, indices, _ = problem(device, [1], [70], 64)
    wrapper = BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(
        np.array([0, 1]), indptr, indices, np.array([70]), HEADS, 512, 64, 64, False, SCALE,
        str(q.dtype),
    )  # fmt: skip
    parts = [device.put(np.ascontiguousarray(x)) for a in (q, cache)
             for x in (a[..., :512], a[..., 512:])]  # fmt: skip
    found = []
    for natural in (False, True):
        lse = device.put(np.zeros((1, HEADS), np.float32))
        wrapper.run(*parts, lse=lse, return_lse_base_on_e=natural)
        found.append(device.get(lse))
    np.testing.assert_allclose(found[1], found[0] * np.log(2), rtol=1e-6)


@pytest.mark.parametrize("q_len", [1, 3])
def test_function(device: Device, q_len: int) -> None:
    kv_lens = [65, 700]
    q, cache, indptr, indices, rows = problem(device, [q_len] * 2, kv_lens, 64)
    table = np.full((2, 12), -1, np.int32)
    for i in range(2):
        ids = indices[indptr[i] : indptr[i + 1]]
        table[i, : len(ids)] = ids
    out, lse = trtllm_batch_decode_with_kv_cache_mla(
        device.put(q.reshape(2, q_len, HEADS, 576)), device.put(cache[:, None]), None, 128, 512, 64,
        device.put(table), device.put(np.array(kv_lens, np.int32)), 700, bmm1_scale=SCALE,
        return_lse=True,
    )  # fmt: skip
    assert tuple(out.shape) == (2, q_len, HEADS, 512)
    for i, row in enumerate(rows):
        expected, expected_lse = attend(q[i * q_len : (i + 1) * q_len], row, True)
        np.testing.assert_allclose(device.get(out)[i], expected, atol=2e-3, rtol=2e-3)
        found = device.get(lse)[i * q_len : (i + 1) * q_len] * np.log(2)
        np.testing.assert_allclose(found, expected_lse, atol=2e-3)


def test_appended_rows_of_656_bytes() -> None:
    """By a page table, into one array: what `append_packed_latents` writes by slots."""
    rng = np.random.default_rng(4)
    latent, rotated = (rng.standard_normal((5, n)).astype(np.float32) for n in (512, 64))
    indices, indptr, last = np.array([2, 0, 1]), np.array([0, 1, 3]), np.array([3, 2])
    batch, positions = np.array([0, 0, 1, 1, -1]), np.array([1, 2, 15, 17, 0])
    found, expected = np.zeros((2, 3, 16, 656), np.uint8)
    flashinfer.append_paged_mla_kv_cache(
        latent, rotated, batch, positions, found, None, indices, indptr, last
    )
    slots = np.array([2 * 16 + 1, 2 * 16 + 2, 15, 1 * 16 + 1, -1])
    flashbsr.append_packed_latents(latent, rotated, cache=expected, slot_mapping=slots)
    np.testing.assert_array_equal(found, expected)
    assert found.any()
    with pytest.raises(flashbsr.FlashbsrError, match="append_ckv"):
        flashinfer.append_paged_mla_kv_cache(
            latent[:, :8], rotated, batch, positions, found, None, indices, indptr, last
        )


def test_refusals() -> None:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper()
    with pytest.raises(flashbsr.PlanError, match="plan"):
        wrapper.run(*[np.zeros((1, 16, 8), np.float32)] * 4)
    wrapper.plan(
        np.array([0, 1]), np.array([0, 1]), np.array([0]), np.array([5]), 16, 512, 64, 64, False,
        SCALE, "float32",
    )  # fmt: skip
    q, c = np.zeros((1, 16, 512), np.float32), np.zeros((2, 64, 512), np.float32)
    for option in ({"kv_len": q}, {"kpe_scale": 2.0}, {"profiler_buffer": q}):
        with pytest.raises(flashbsr.UnsupportedError, match=next(iter(option))):
            wrapper.run(q, q[..., :64], c, c[..., :64], **option)
    with pytest.raises(flashbsr.FlashbsrError, match="ckv_cache"):
        wrapper.run(q, q[..., :64], c[..., :256], c[..., :64])
