# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's rotations that write float8, against float64 rounded once."""

from __future__ import annotations

from typing import Any

import flashbsr
import flashbsr.flashinfer as flashinfer
import ml_dtypes
import numpy as np
import pytest
import torch_device
from flashbsr.flashinfer.rope import (
    mla_rope_quantize_fp8,
    rope_quantize_fp8,
    rope_quantize_fp8_append_paged_kv_cache,
)
from harness import DEVICES, Device, framework

torch = framework("torch")

TENSORS = Device("torch", "cpu", torch_device.putter(torch, "cpu"), torch_device.getter(torch))
WORLDS = pytest.mark.parametrize("device", [*DEVICES, TENSORS], ids=lambda x: x.name)
NEOX = pytest.mark.parametrize("is_neox", [True, False])

ROWS, HEADS, KV_HEADS, DIM, REST, PAGE = 13, 4, 2, 32, 64, 8
POSITIONS = 40
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
MOST = {E4M3: 448.0, E5M2: 57344.0}


def table(dim: int = DIM) -> np.ndarray:
    """Cosines, then sines, of every position."""
    angles = np.outer(np.arange(POSITIONS), 100.0 ** (-2 * np.arange(dim // 2) / dim))
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def rotated(x: np.ndarray, pos_ids: np.ndarray, is_neox: bool) -> np.ndarray:
    """Rows [nnz, heads, dim] in float64."""
    half = x.shape[-1] // 2
    cos, sin = np.split(table(x.shape[-1]).astype(np.float64)[pos_ids][:, None], 2, -1)
    x = x.astype(np.float64)
    a, b = (x[..., :half], x[..., half:]) if is_neox else (x[..., ::2], x[..., 1::2])
    turned = a * cos - b * sin, b * cos + a * sin
    return np.concatenate(turned, -1) if is_neox else np.stack(turned, -1).reshape(x.shape)


def near(found: np.ndarray, exact: np.ndarray, dtype: np.dtype) -> None:
    """Within half a step of the exact value, which is rounded once and saturated."""
    assert found.dtype == dtype
    exact = np.clip(exact, -MOST[dtype], MOST[dtype])
    bits, smallest = (3, 2.0**-9) if dtype == E4M3 else (2, 2.0**-16)
    step = np.maximum(2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) - bits), smallest)
    assert (np.abs(found.astype(np.float64) - exact) <= step * 0.5001 + 1e-6).all()


def problem(device: Device, latent: bool, dtype: Any = np.float16) -> tuple[list[Any], list[Any]]:
    """Parts of queries and keys on the host, and on the device."""
    rng = np.random.default_rng(5)
    heads = () if latent else (KV_HEADS,)
    parts = [
        rng.standard_normal((ROWS, *shape)).astype(dtype) * 3
        for shape in ((HEADS, DIM), (*heads, DIM), (HEADS, REST), (*heads, REST))
    ]
    parts[0][0, 0, :2] = 60000  # saturates
    return parts, [device.put(x) for x in parts]


POS_IDS = np.random.default_rng(1).permutation(POSITIONS)[:ROWS].astype(np.int32)


def expected(parts: list[Any], is_neox: bool, q_scale: float, kv_scale: float) -> list[np.ndarray]:
    q, k, q_rest, k_rest = (x.reshape(ROWS, -1, x.shape[-1]) for x in parts)
    found = [
        rotated(q, POS_IDS, is_neox) * q_scale, rotated(k, POS_IDS, is_neox) * kv_scale,
        q_rest.astype(np.float64) * q_scale, k_rest.astype(np.float64) * kv_scale,
    ]  # fmt: skip
    return [x.reshape(part.shape) for x, part in zip(found, parts, strict=True)]


@WORLDS
@NEOX
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_parts(dtype: str, latent: bool, is_neox: bool, device: Device) -> None:
    host, parts = problem(device, latent, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    exact = expected(host, is_neox, 0.5, 4.0)
    call = mla_rope_quantize_fp8 if latent else rope_quantize_fp8
    found = call(
        *parts, device.put(table()), device.put(POS_IDS), is_neox, None, 0.5, 4.0, enable_pdl=True
    )
    for x, wanted in zip(found, exact, strict=True):
        assert tuple(x.shape) == wanted.shape
        near(device.get(x), wanted, E4M3)


@WORLDS
@pytest.mark.parametrize("latent", [False, True])
def test_outputs_that_are_given(latent: bool, device: Device) -> None:
    """Views of one array of queries, as engines give them; they say the type."""
    host, parts = problem(device, latent)
    exact = expected(host, False, 1.0, 0.25)
    whole = device.put(np.zeros((ROWS, HEADS, DIM + REST), E5M2))
    outs = [
        whole[..., REST:], device.put(np.zeros(host[1].shape, E5M2)), whole[..., :REST],
        device.put(np.zeros(host[3].shape, E5M2)),
    ]  # fmt: skip
    found = rope_quantize_fp8(
        *parts, device.put(table()), device.put(POS_IDS), False, None, 1.0, 0.25, *outs
    )
    for x, out, wanted in zip(found, outs, exact, strict=True):
        near(device.get(x), wanted, E5M2)
        near(device.get(out), wanted, E5M2)


@WORLDS
def test_without_parts_that_are_not_rotated(device: Device) -> None:
    host, (q, k, *_) = problem(device, False)
    found = rope_quantize_fp8(
        q, k, None, None, device.put(table()), device.put(POS_IDS.astype(np.int64)),
        quantize_dtype="float8_e5m2",
    )  # fmt: skip
    for x, wanted in zip(found, expected(host, True, 1, 1)[:2], strict=False):
        near(device.get(x), wanted, E5M2)
    assert [tuple(x.shape) for x in found[2:]] == [(ROWS, HEADS, 0), (ROWS, KV_HEADS, 0)]


def paged(device: Device) -> tuple[dict[str, Any], np.ndarray]:
    """A page table of three requests, the rows' places in it, and their slots; one is padding."""
    indptr, indices = np.array([0, 2, 3, 3, 4]), np.array([5, 0, 3, 2])
    batch = np.array([0] * 9 + [1, 1, 3, -1])
    positions = np.array([*range(9), 2, 5, 0, 0])
    slots = np.full(ROWS, -1)
    own = batch >= 0
    at = positions[own]
    slots[own] = indices[indptr[batch[own]] + at // PAGE] * PAGE + at % PAGE
    arrays = {
        "kv_indices": indices, "kv_indptr": indptr, "batch_indices": batch, "positions": positions,
    }  # fmt: skip
    return {name: device.put(x.astype(np.int32)) for name, x in arrays.items()}, slots


@WORLDS
@NEOX
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_append(dtype: np.dtype, rest: bool, layout: str, is_neox: bool, device: Device) -> None:
    host, parts = problem(device, False)
    exact = expected(host, is_neox, 2.0, 0.5)
    if not rest:
        parts[2:] = None, None
    v = np.random.default_rng(6).standard_normal((ROWS, KV_HEADS, 48)).astype(np.float16)
    dims = DIM + REST * rest, 48
    caches = [np.full((6, PAGE, KV_HEADS, dim), 77, dtype) for dim in dims]
    if layout == "HND":
        caches = [x.swapaxes(1, 2).copy() for x in caches]
    caches = [device.put(x) for x in caches]
    places, slots = paged(device)
    q, q_rest = rope_quantize_fp8_append_paged_kv_cache(
        *parts, device.put(v), device.put(table()), device.put(POS_IDS), tuple(caches), **places,
        is_neox=is_neox, quantize_dtype=str(dtype), quant_scale_q=2.0, quant_scale_kv=0.5,
        page_size=PAGE, kv_layout=layout,
    )  # fmt: skip
    near(device.get(q), exact[0], dtype)
    assert tuple(q_rest.shape) == (ROWS, HEADS, REST * rest)
    if rest:
        near(device.get(q_rest), exact[2], dtype)
    keys = np.concatenate([exact[1], exact[3]], -1) if rest else exact[1]
    for cache, wanted in zip(caches, (keys, v.astype(np.float64) * 0.5), strict=True):
        found = device.get(cache)
        found = found.swapaxes(1, 2) if layout == "HND" else found
        found = found.reshape(-1, *found.shape[2:])
        near(found[slots[slots >= 0]], wanted[slots >= 0], dtype)
        assert (
            np.delete(found, slots[slots >= 0], 0).astype(np.float64) == found[8 * 4, 0, 0]
        ).all()


@WORLDS
@NEOX
def test_append_latents(is_neox: bool, device: Device) -> None:
    host, parts = problem(device, True)
    exact = expected(host, is_neox, 1.0, 8.0)
    caches = [device.put(np.full((6, PAGE, dim), 77, E4M3)) for dim in (REST, DIM)]
    places, slots = paged(device)
    out = device.put(np.zeros((ROWS, HEADS, DIM + REST), E4M3))
    found = rope_quantize_fp8_append_paged_kv_cache(
        *parts, None, device.put(table()), device.put(POS_IDS), tuple(caches), **places,
        is_neox=is_neox, quant_scale_kv=8.0, page_size=PAGE, q_rope_out=out[..., REST:],
        q_nope_out=out[..., :REST],
    )  # fmt: skip
    near(device.get(out)[..., REST:], exact[0], E4M3)
    near(device.get(found[1]), exact[2], E4M3)
    for cache, wanted in zip(caches, (exact[3], exact[1]), strict=True):
        rows = device.get(cache).reshape(-1, wanted.shape[-1])
        near(rows[slots[slots >= 0]], wanted[slots >= 0], E4M3)
        assert (np.delete(rows, slots[slots >= 0], 0) == np.array(77, E4M3)).all()


@WORLDS
def test_attention_over_what_was_appended(device: Device) -> None:
    """Queries and keys in float8, whose scales attention is given as 1 / quant_scale."""
    if device.is_cuda and torch.cuda.get_device_capability() not in torch_device.FLOAT8_Q_DIMS:
        pytest.skip("no kernel for float8 queries on this GPU")
    rng = np.random.default_rng(9)
    rows, dim = 24, 64
    q, k, v = (rng.standard_normal((rows, n, dim)).astype(np.float16) for n in (HEADS, 2, 2))
    caches = tuple(device.put(np.zeros((3, PAGE, 2, dim), E4M3)) for _ in "KV")
    at = np.arange(rows, dtype=np.int32)
    angles = np.outer(at, 100.0 ** (-2 * np.arange(32) / dim))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    indices, indptr = np.array([2, 0, 1], np.int32), np.array([0, 3], np.int32)
    put = device.put
    q8, _ = rope_quantize_fp8_append_paged_kv_cache(
        put(q), put(k), None, None, put(v), put(cos_sin), put(at), caches, put(indices),
        put(indptr), put(at * 0), put(at), quant_scale_q=16.0, quant_scale_kv=32.0, page_size=PAGE,
    )  # fmt: skip
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(
        put(np.array([0, rows], np.int32)), put(indptr), put(indices),
        put(np.array([PAGE], np.int32)), HEADS, 2, dim, PAGE, causal=True,
        q_data_type="float8_e4m3fn", kv_data_type="float8_e4m3fn", o_data_type="float16",
    )  # fmt: skip
    found = wrapper.run(q8, caches, q_scale=1 / 16, k_scale=1 / 32, v_scale=1 / 32)
    q_turned, k_turned = flashbsr.apply_rope_with_cos_sin_cache(
        at, q.astype(np.float32).reshape(rows, -1), k.astype(np.float32).reshape(rows, -1), dim,
        cos_sin,
    )  # fmt: skip
    exact = flashinfer.single_prefill_with_kv_cache(
        q_turned.reshape(q.shape), k_turned.reshape(k.shape), v.astype(np.float32), causal=True
    )
    off = np.linalg.norm(device.get(found).astype(np.float64) - exact) / np.linalg.norm(exact)
    assert off < 0.08, off


@WORLDS
def test_bad_calls(device: Device) -> None:
    _, parts = problem(device, False)
    names = "q_rope", "k_rope", "q_nope", "k_nope"
    put = device.put
    arguments = dict(zip(names, parts, strict=True)) | {
        "cos_sin_cache": put(table()), "pos_ids": put(POS_IDS),
    }  # fmt: skip
    wrong: list[tuple[str, Any]] = [
        ("quant_scale_q", 0.0), ("quant_scale_kv", -1.0), ("quant_scale_q", float("nan")),
        ("quant_scale_kv", "1"), ("quantize_dtype", "float16"), ("quantize_dtype", "uint8"),
        ("cos_sin_cache", None), ("cos_sin_cache", put(table(16))),
        ("cos_sin_cache", put(table().astype(np.float16))), ("pos_ids", put(POS_IDS[:3])),
        ("q_nope", None), ("k_nope", None), ("q_rope", None), ("k_rope", parts[1][:3]),
        ("k_nope", parts[3][:3]), ("backend", "triton"),
        ("q_rope_out", put(np.zeros((ROWS, HEADS, DIM), np.float16))),
        ("k_rope_out", put(np.zeros((ROWS, HEADS, DIM), E4M3))),
        ("q_nope_out", put(np.zeros((ROWS, HEADS, DIM), E4M3))),
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            rope_quantize_fp8(**{**arguments, name: value})
        # A shape that is not that of its output: either of the two.
        assert name in (caught.value.argument, f"{caught.value.argument}_out"), caught.value
    # Types of outputs that differ: the first one says it.
    with pytest.raises(flashbsr.DTypeError, match="^k_rope_out"):
        rope_quantize_fp8(
            **arguments, q_rope_out=put(np.zeros((ROWS, HEADS, DIM), E4M3)),
            k_rope_out=put(np.zeros((ROWS, KV_HEADS, DIM), E5M2)),
        )  # fmt: skip


@WORLDS
def test_bad_appends(device: Device) -> None:
    _, parts = problem(device, False)
    _, latents = problem(device, True)
    put = device.put
    caches = tuple(put(np.zeros((6, PAGE, KV_HEADS, DIM + REST), E4M3)) for _ in "KV")
    v = put(np.ones((ROWS, KV_HEADS, DIM + REST), np.float16))
    places, _ = paged(device)
    names = "q_rope", "k_rope", "q_nope", "k_nope"
    arguments = {
        **dict(zip(names, parts, strict=True)), "v": v, "cos_sin_cache": put(table()),
        "pos_ids": put(POS_IDS), "paged_kv_cache": caches, "page_size": PAGE, **places,
    }  # fmt: skip
    for name, value in (
        ("v", None), ("page_size", 16), ("kv_layout", "NDH"), ("paged_kv_cache", caches[0]),
        ("paged_kv_cache", None), ("paged_kv_cache", (caches[0], caches[1][0])),
        ("paged_kv_cache", (caches[0], put(np.zeros((6, PAGE, KV_HEADS, 96), E5M2)))),
        ("paged_kv_cache", (caches[0], put(np.zeros((6, PAGE, KV_HEADS, 96), np.float16)))),
        ("quant_scale_kv", 0.0), ("kv_indptr", None),
    ):  # fmt: skip
        with pytest.raises(flashbsr.FlashbsrError) as caught:
            rope_quantize_fp8_append_paged_kv_cache(**{**arguments, name: value})
        assert caught.value.argument == name, (name, caught.value)
    with pytest.raises(flashbsr.FlashbsrError, match="^v:"):
        rope_quantize_fp8_append_paged_kv_cache(
            **{**arguments, **dict(zip(names, latents, strict=True))}
        )
    assert all((device.get(x) == 0).all() for x in caches)
