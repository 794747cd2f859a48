# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions against float64."""

from __future__ import annotations

from typing import Any

import flashbsr
import numpy as np
import pytest
import reference
from flashbsr.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from harness import Device
from reference import Variant

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 64, 32
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "right 0": ({"window_size": (-1, 0)}, {"causal": True}),
    "window": ({"causal": True, "window_size": (5, -1)}, {"causal": True, "window_left": 5}),
    "window to 0": ({"window_size": (5, 0)}, {"causal": True, "window_left": 5}),
    "scale and cap": (
        {"softmax_scale": 0.3, "softcap": 2.0}, {"sm_scale": 0.3, "logits_soft_cap": 2.0},
    ),
    "alibi": ({"causal": True}, {"causal": True, "pos_encoding_mode": "ALIBI"}),
}  # fmt: skip


def draw(device: Device, *shape: int, seed: int = 0) -> np.ndarray:
    dtype = np.float16 if device.is_cuda else np.float32
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def expect(out: Any, lse: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, name: str) -> None:
    """Out (tokens, H, D_v) and LSE (H, tokens)."""
    slopes = SLOPES if name == "alibi" else None
    state = reference.attend(q, k, v, Variant(**OPTIONS[name][1]), slopes=slopes)
    np.testing.assert_allclose(out, state.out, atol=3e-3, rtol=3e-3)
    np.testing.assert_allclose(lse.T, state.lse, atol=3e-3, rtol=3e-3)


def options(device: Device, name: str) -> dict[str, Any]:
    given = dict(OPTIONS[name][0])
    if name == "alibi":
        given["alibi_slopes"] = device.put(SLOPES)
    return given


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(device: Device, name: str) -> None:
    q, k = draw(device, 2, 9, HEADS, DIM), draw(device, 2, 40, KV_HEADS, DIM, seed=1)
    v = draw(device, 2, 40, KV_HEADS, DIM_V, seed=2)
    there = [device.put(x) for x in (q, k, v)]
    out, lse, probs = flash_attn_func(*there, **options(device, name), return_attn_probs=True)
    assert probs is None
    assert tuple(lse.shape) == (2, HEADS, 9)
    for i in range(2):
        expect(device.get(out)[i], device.get(lse)[i], q[i], k[i], v[i], name)
    alone = flash_attn_func(*there, **options(device, name), deterministic=True)
    np.testing.assert_array_equal(device.get(alone), device.get(out))


def test_packed(device: Device) -> None:
    qkv = device.put(draw(device, 2, 9, 3, HEADS, DIM))
    expected = device.get(flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], causal=True))
    np.testing.assert_array_equal(device.get(flash_attn_qkvpacked_func(qkv, causal=True)), expected)
    both = flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, None, True)
    np.testing.assert_array_equal(device.get(both), expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen(device: Device, name: str, paged: bool) -> None:
    q_lens, kv_lens = [5, 1, 0, 7], [37, 1, 3, 64]
    starts = [np.cumsum([0, *x]).astype(np.int32) for x in (q_lens, kv_lens)]
    q = draw(device, sum(q_lens), HEADS, DIM)
    k, v = (draw(device, sum(kv_lens), KV_HEADS, d, seed=d) for d in (DIM, DIM_V))
    keys, values, table = k, v, None
    if paged:
        size = 16
        table = np.full((4, 4), -1, np.int32)
        ids = iter(np.random.default_rng(0).permutation(12))
        keys, values = (np.full((12, size, *x.shape[1:]), np.nan, x.dtype) for x in (k, v))
        for i, n in enumerate(kv_lens):
            for j in range(-(-n // size)):
                table[i, j] = page = next(ids)
                at = slice(
                    starts[1][i] + j * size, min(starts[1][i] + (j + 1) * size, starts[1][i + 1])
                )
                keys[page, : at.stop - at.start] = k[at]
                values[page, : at.stop - at.start] = v[at]
        table = device.put(table)
    out, lse, _ = flash_attn_varlen_func(
        *map(device.put, (q, keys, values)), *map(device.put, starts), 7, 64,
        **options(device, name), return_attn_probs=True, block_table=table,
    )  # fmt: skip
    assert tuple(lse.shape) == (HEADS, 13)
    for i in range(4):
        rows, at = (slice(*x[i : i + 2]) for x in starts)
        expect(device.get(out)[rows], device.get(lse)[:, rows], q[rows], k[at], v[at], name)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("how", ["dense", "rows", "paged"])
def test_cache(device: Device, how: str, q_len: int) -> None:
    """Two steps: what is written is there, what is behind the lengths is NaN and not read."""
    lens, size = [30, 0, 16], 16
    tokens = [
        tuple(draw(device, 64, KV_HEADS, d, seed=d + i) for d in (DIM, DIM_V)) for i in range(3)
    ]
    rng = np.random.default_rng(0)
    dtype = tokens[0][0].dtype
    table = rng.permutation(16)[:12].reshape(3, 4).astype(np.int32)
    row = np.array([3, 0, 2], np.int32) if how == "rows" else np.arange(3, dtype=np.int32)
    pages = (16, size) if how == "paged" else (4, 64)
    caches = [np.full((*pages, KV_HEADS, d), np.nan, dtype) for d in (DIM, DIM_V)]
    for i, n in enumerate(lens):
        at = np.arange(n)
        where = (table[i, at // size], at % size) if how == "paged" else (row[i], at)
        for cache, x in zip(caches, tokens[i], strict=True):
            cache[where] = x[:n]
    there = [device.put(x) for x in caches]
    more: dict[str, Any] = {}
    if how == "paged":
        more["block_table"] = device.put(table)
    elif how == "rows":
        more["cache_batch_idx"] = device.put(row)
    now = np.array(lens, np.int32)
    for step in range(2):
        q = draw(device, 3, q_len, HEADS, DIM, seed=50 + step)
        new = [
            np.stack([x[j][n : n + q_len] for x, n in zip(tokens, now, strict=True)])
            for j in (0, 1)
        ]
        out, lse = flash_attn_with_kvcache(
            device.put(q), *there, *map(device.put, new), cache_seqlens=device.put(now), **more,
            causal=True, return_softmax_lse=True,
        )  # fmt: skip
        now = now + q_len
        assert tuple(lse.shape) == (3, HEADS, q_len)
        for i in range(3):
            k, v = (x[: now[i]] for x in tokens[i])
            expect(device.get(out)[i], device.get(lse)[i], q[i], k, v, "causal")


def test_cache_without_lengths(device: Device) -> None:
    """All of a row; a number for all requests."""
    q, k = draw(device, 2, 1, HEADS, DIM), draw(device, 2, 20, KV_HEADS, DIM, seed=1)
    there = [device.put(x) for x in (q, k, k)]
    whole = device.get(flash_attn_with_kvcache(*there))
    np.testing.assert_array_equal(
        device.get(flash_attn_with_kvcache(*there, cache_seqlens=20)), whole
    )
    seven, lse = flash_attn_with_kvcache(*there, cache_seqlens=7, return_softmax_lse=True)
    for i in range(2):
        expect(device.get(seven)[i], device.get(lse)[i], q[i], k[i, :7], k[i, :7], "plain")


def test_refusals() -> None:
    q = np.zeros((1, 2, 4, 64), np.float32)
    for option, value in (
        ("dropout_p", 0.1), ("window_size", (3, 3)), ("window_size", (3, -1)),
        ("alibi_slopes", np.ones((1, 4), np.float32)), ("alibi_slopes", SLOPES),
    ):  # fmt: skip
        with pytest.raises(flashbsr.UnsupportedError, match=option):
            flash_attn_func(q, q, q, **{option: value})
    for option in ("rotary_cos", "rotary_sin", "cache_leftpad"):
        with pytest.raises(flashbsr.UnsupportedError, match=option):
            flash_attn_with_kvcache(q, q, q, **{option: q})
    with pytest.raises(flashbsr.FlashbsrError, match="v: got None"):
        flash_attn_with_kvcache(q, q, q, q)
    with pytest.raises(flashbsr.ShapeError, match="k_cache"):
        flash_attn_with_kvcache(q, q[0], q[0])
    with pytest.raises(flashbsr.ShapeError, match="qkv"):
        flash_attn_qkvpacked_func(q)
