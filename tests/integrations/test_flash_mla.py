# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's functions against float64, dense and over chosen tokens."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
from flashbsr.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from harness import Device
from reference import DTYPES

SCALE = 192**-0.5


def softmax_rows(q: np.ndarray, kv: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Out [rows, H, 512] and LSE [rows, H] of q [rows, H, 576] over kv [n, 576]."""
    q, kv = q.astype(np.float64), kv.astype(np.float64)
    logits = np.where(seen[:, None], np.einsum("qhd,kd->qhk", q, kv) * SCALE, -np.inf)
    top = logits.max(-1, initial=-1e30)
    weights = np.exp(logits - top[..., None])
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)
    return np.einsum("qhk,kd->qhd", weights, kv[:, :512]) / np.maximum(total, 1e-300)[
        ..., None
    ], lse


def coded(cache: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Eight bits of a cache, and what they mean."""
    rows = cache.reshape(-1, 576)
    if kind == "float8":
        with np.errstate(invalid="ignore"):
            codes = cache.astype(DTYPES["float8_e4m3fn"])
        return codes, codes.astype(np.float32)
    packed = np.full((*cache.shape[:-1], 656), 255, np.uint8)
    slots = np.flatnonzero(~np.isnan(rows[:, 0]))
    flashbsr.append_packed_latents(
        rows[slots, :512], rows[slots, 512:], cache=packed, slot_mapping=slots
    )
    return packed, flashbsr.unpack_latents(packed)[:, :, None]


def problem(
    device: Device, batch: int, q_len: int, lens: list[int], kind: str = "", heads: int = 16
) -> Any:
    rng = np.random.default_rng(1)
    pages, size = sum(-(-n // 64) for n in lens) + 2, 64
    dtype = np.float16 if device.is_cuda else np.float32
    cache = np.full((pages, size, 1, 576), np.nan, dtype)
    table = np.full((batch, max(-(-n // size) for n in lens) + 1), -1, np.int32)
    order = iter(rng.permutation(pages))
    rows = []
    for i, n in enumerate(lens):
        kv = rng.standard_normal((n, 576)).astype(dtype)
        for j in range(-(-n // size)):
            table[i, j] = page = next(order)
            part = kv[j * size : (j + 1) * size]
            cache[page, : len(part), 0] = part
        rows.append(kv)
    q = rng.standard_normal((batch, q_len, heads, 576)).astype(dtype)
    if kind:
        cache, means = coded(cache, kind)
        rows = [
            means[table[i, np.arange(n) // size], np.arange(n) % size, 0]
            for i, n in enumerate(lens)
        ]
    return q, cache, table, rows


KINDS = ["", "float8", "packed"]


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dense(device: Device, q_len: int, causal: bool, kind: str) -> None:
    lens = [130, 64, 3, 700]
    q, cache, table, rows = problem(device, 4, q_len, lens, kind)
    there = [device.put(x) for x in (q, cache, table, np.array(lens, np.int32))]
    metadata, splits = get_mla_metadata(there[3], q_len * 16, 1, is_fp8_kvcache=bool(kind))
    for _ in range(2):  # two layers
        out, lse = flash_mla_with_kvcache(*there, 512, metadata, splits, SCALE, causal, bool(kind))
    assert tuple(out.shape) == (4, q_len, 16, 512)
    assert tuple(lse.shape) == (4, 16, q_len)
    for i, n in enumerate(lens):
        last = n - q_len + np.arange(q_len) if causal else np.full(q_len, n - 1)
        expected, expected_lse = softmax_rows(q[i], rows[i], np.arange(n) <= last[:, None])
        np.testing.assert_allclose(device.get(out)[i], expected, atol=2e-3, rtol=2e-3)
        np.testing.assert_allclose(device.get(lse)[i].T, expected_lse, atol=2e-3)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_tokens(device: Device, q_len: int, kind: str) -> None:
    """Lists of their own, in any order, with -1 anywhere, and one without any token."""
    lens = [300, 90]
    q, cache, table, rows = problem(device, 2, q_len, lens, kind)
    rng = np.random.default_rng(3)
    chosen: dict[tuple[int, int], np.ndarray] = {}
    indices = np.full((2, q_len, 96), -1, np.int32)
    for i, n in enumerate(lens):
        for t in range(q_len):
            token = rng.permutation(n)[: 40 + 7 * t]
            slots = rng.permutation(96)[: len(token)]
            indices[i, t, slots] = table[i, token // 64] * 64 + token % 64
            chosen[i, t] = token
    indices[1, -1] = -1
    chosen[1, q_len - 1] = chosen[1, q_len - 1][:0]
    metadata, splits = get_mla_metadata(topk=96)
    out, lse = flash_mla_with_kvcache(
        device.put(q), device.put(cache), None, None, 512, metadata, splits, SCALE,
        is_fp8_kvcache=bool(kind), indices=device.put(indices),
    )  # fmt: skip
    for i in range(2):
        for t in range(q_len):
            kv = rows[i][chosen[i, t]]
            seen = np.ones((1, len(kv)), bool)
            expected, expected_lse = softmax_rows(q[i, t : t + 1], kv, seen)
            np.testing.assert_allclose(device.get(out)[i, t], expected[0], atol=2e-3, rtol=2e-3)
            np.testing.assert_allclose(device.get(lse)[i, :, t], expected_lse[0], atol=2e-3)


def test_lengths_may_shrink(device: Device) -> None:
    """Metadata are bounds: lengths and pages are read in every call."""
    q, cache, table, rows = problem(device, 1, 1, [300])
    metadata, _ = get_mla_metadata(np.array([300]))
    for n in (300, 129, 1):
        out, _ = flash_mla_with_kvcache(
            device.put(q), device.put(cache), device.put(table), device.put(np.array([n])), 512,
            metadata, None, SCALE,
        )  # fmt: skip
        expected, _ = softmax_rows(q[0], rows[0][:n], np.ones((1, n), bool))
        np.testing.assert_allclose(device.get(out)[0], expected, atol=2e-3, rtol=2e-3)


def test_refusals() -> None:
    lens = np.array([3])
    with pytest.raises(flashbsr.UnsupportedError, match="num_heads_k"):
        get_mla_metadata(lens, 16, 2)
    with pytest.raises(flashbsr.FlashbsrError, match="cache_seqlens"):
        get_mla_metadata()
    q, cache = np.zeros((1, 1, 16, 576), np.float32), np.zeros((2, 64, 1, 576), np.float32)
    metadata, _ = get_mla_metadata(np.array([3, 3]))
    table = np.zeros((1, 1), np.int32)
    with pytest.raises(flashbsr.PlanError, match="1 lengths"):
        flash_mla_with_kvcache(q, cache, table, lens, 512, metadata)
    with pytest.raises(flashbsr.PlanError, match="topk=5"):
        flash_mla_with_kvcache(
            q, cache, None, None, 512, metadata, indices=np.zeros((1, 1, 5), np.int32)
        )
    with pytest.raises(flashbsr.FlashbsrError, match="is_fp8_kvcache"):
        flash_mla_with_kvcache(q, cache.astype(np.int8), table, lens, 512, metadata)
    with pytest.raises(flashbsr.ShapeError, match="k_cache"):
        flash_mla_with_kvcache(q, cache[:, :, 0], table, lens, 512, metadata)
